"""What to do after an attempt: pure, so that every case can be tested in a line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.verdict.case import Verdict

#: So many failures of the same cause at the same place, none later than the first by much, are a loop.
_LOOP_LENGTH = 3
_SLACK_S = 10.0
_SHORT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How an attempt failed, as far as the policy needs to know.

    Attributes:
        message: The first cause; numbers in it are ignored when two are compared.
        where: Its place; an attempt without one (killed from outside) is never part of a loop.
        lasted_s: How long the attempt ran: one that ran longer than those before made progress.
    """

    message: str
    where: str | None
    lasted_s: float


def to_failure(verdict: Verdict, *, lasted_s: float) -> Failure:
    """Return what the policy needs of a verdict.

    Which of several ranks came first is chance: the error itself is compared, not who raised it. The place is where it
        failed, or by
    which exit code; None if it was killed from outside.
    """
    text = verdict.message.partition(": ")[2] or verdict.message
    place = verdict.where or (f"exit code {verdict.exit_code}" if verdict.exit_code < 128 else None)
    return Failure(message=text, where=place, lasted_s=lasted_s)


def decide(failures: Sequence[Failure], max_restarts: int) -> str | None:
    """Say after the last of ``failures``, which are all attempts so far, why there is no further one; empty if none was asked for, None to start again."""
    used = len(failures) - 1
    if used >= max_restarts:
        used_up = "the only restart is" if max_restarts == 1 else f"all {max_restarts} restarts are"
        return f"{used_up} used up" if max_restarts else ""
    if _is_loop(failures):
        left = max_restarts - used
        return (
            f"the last {_LOOP_LENGTH} attempts failed for the same cause at the same place, none getting further: "
            f"{left} more restart{'s' * (left > 1)} would not help"
        )
    return None


def _is_loop(failures: Sequence[Failure]) -> bool:
    last = failures[-_LOOP_LENGTH:]
    if len(last) < _LOOP_LENGTH or last[0].where is None:
        return False
    if len({(_without_numbers(failure.message), failure.where) for failure in last}) > 1:
        return False
    # A long attempt may have resumed from a checkpoint and got on, wherever it failed in the end.
    return all(failure.lasted_s <= _SHORT_S for failure in last) and all(
        failure.lasted_s <= 1.5 * last[0].lasted_s + _SLACK_S for failure in last
    )


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "#", text)
