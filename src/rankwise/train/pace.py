"""How often reports are made: every so many steps as asked, or about four a second, by a number that all ranks hear from rank 0."""

from __future__ import annotations

import math
from typing import Literal, final

from rankwise.base.errors import UsageError

#: Often enough for people; where steps take milliseconds, a report at each would cost more than the step's own
#: arithmetic.
_SECONDS = 0.25
_MOST_STEPS, _GROWTH = 1000, 4


@final
class Pace:
    """When the next report is due; the same on all ranks.

    Args:
        log_every: Steps between two reports, or "auto".
    """

    def __init__(self, log_every: int | Literal["auto"]) -> None:
        if log_every != "auto" and (type(log_every) is not int or log_every < 1):
            raise UsageError(f"log_every={log_every!r}", hint='a whole number of steps, 1 or more, or "auto"')
        self._every = 1 if log_every == "auto" else int(log_every)
        self._is_chosen = log_every != "auto"
        self._last = 0

    def is_due(self, step: int) -> bool:
        """Tell whether a report follows this step."""
        return step % self._every == 0 if self._is_chosen else step >= self._last + self._every

    def propose(self, num_steps: int, seconds: float) -> int:
        """Return how many steps should lie between reports, by the time that some took; what rank 0 says counts.

        Args:
            num_steps: Steps since the last report.
            seconds: How long they took.
        """
        wanted = math.ceil(_SECONDS * num_steps / max(seconds, 1e-9)) if num_steps else 1
        return max(1, min(wanted, _MOST_STEPS, _GROWTH * self._every))

    def follow(self, step: int, proposed: int) -> None:
        """Take up rank 0's number, on all ranks after the same step."""
        self._last = step
        if not self._is_chosen:
            self._every = max(1, proposed)
