"""What the user's signals to the launcher mean for the attempt that runs."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, final

from rankwise.base.files import read_all
from rankwise.base.os_calls import listens_to
from rankwise.base.requeue import END_SIGNAL, heeds_interrupts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.launcher.job import Job
    from rankwise.launcher.output import Pump
    from rankwise.launcher.rank_end import Rank


@final
class AttemptSignals:
    """Takes the signals that have arrived, and passes them on or notes them.

    Attributes:
        interrupted: The first one that asks for the end; None while there is none.
        hurry: Whether nothing is waited for any more: a second one has come, or the time is over.
    """

    def __init__(self, job: Job, pump: Pump) -> None:
        self._job, self._pump = job, pump
        self.interrupted: int | None = None
        self.hurry = False

    def take(self, living: Sequence[Rank]) -> None:
        """Obey those that have arrived, with the ranks that have not ended."""
        for number in self._job.signals.take():
            self._obey(number, living)

    def _obey(self, number: int, living: Sequence[Rank]) -> None:
        if number == getattr(signal, "SIGWINCH", None):
            self._pump.resize()
        elif number in self._job.passed_on:
            for rank in living:
                self._job.workers.signal(rank.tag, number)
        elif self.interrupted is None:
            self.interrupted = number
            if number == signal.SIGINT:
                self._pump.hide_interrupts()
        elif number == signal.SIGTERM and any(rank.was_noticed or is_notice(number, rank) for rank in living):
            return  # a scheduler repeats itself
        else:
            self.hurry = True
            self._job.console.hurry()


def is_notice(number: int, rank: Rank) -> bool:
    """Tell whether a rank takes this signal for a notice to save and leave."""
    if number == signal.SIGINT:
        return heeds_interrupts(read_all(rank.notes_fd))
    return number == signal.SIGTERM and listens_to(rank.pid, END_SIGNAL, or_ignores=True)
