"""When a job's time is over: what Slurm or whoever started the job says, on a clock that nobody can set."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwise.base.environ import get
from rankwise.base.errors import UsageError
from rankwise.base.log import get_logger

if TYPE_CHECKING:
    from rankwise.base.clock import Clock

_LOGGER = get_logger(__name__)

#: Seconds since the epoch. Newer releases of Slurm tell the first one; the other is for all who start jobs otherwise.
_VARIABLES = ("SLURM_JOB_END_TIME", "RANKWISE_DEADLINE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """When to stop.

    Attributes:
        at_s: The moment on the monotonic clock: a clock that is set while the job runs moves nothing.
        reason: Who says so.
    """

    at_s: float
    reason: str


def find_deadline(clock: Clock, *, after_s: float | None, margin_s: float, rank: int) -> Deadline | None:
    """Return when to stop: the earliest of what the script and the environment say.

    Args:
        clock: Where time comes from.
        after_s: The script's own wish, in seconds from now.
        margin_s: How long before the end that the environment tells of. At most half of the time that is left: a short
            job would otherwise stop at its first step, be started again, and never get on.
        rank: Ours, for errors.

    Raises:
        UsageError: A variable or an argument is no time.
    """
    for name, value in (("after_s", after_s), ("margin_s", margin_s)):
        if value is not None and not 0 <= value < math.inf:
            raise UsageError(f"{name}={value!r} is not a number of seconds", rank=rank, hint="for example 3600")
    now_s = clock.monotonic()
    found = [] if after_s is None else [Deadline(at_s=now_s + after_s, reason=f"{after_s:g} s are over")]
    for name in _VARIABLES:
        if not (text := get(name).strip()):
            continue
        left_s = _read_epoch(name, text, rank) - clock.time()
        if left_s <= 0:
            # Left over from another job, or the limit was raised meanwhile: to stop at once would help neither.
            _LOGGER.warning(f"[rank {rank}] {name}={text} was {-left_s:.0f} s ago: it is not a deadline")
            continue
        margin = min(margin_s, left_s / 2)
        found.append(Deadline(at_s=now_s + left_s - margin, reason=f"{margin:.0f} s are left until {name}"))
    return min(found, key=lambda deadline: deadline.at_s, default=None)


def _read_epoch(name: str, text: str, rank: int) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(
            f"{name}={text!r} is not a time",
            rank=rank,
            hint=f"set {name} to seconds since the epoch (`date -d '+4 hours' +%s`), or unset it",
        )
    return value
