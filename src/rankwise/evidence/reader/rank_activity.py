"""How a living rank seems to whoever watches it: for how long it has been quiet, and whether it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

#: Ranks that wait for so long are a reason to look at all of them; before the first process group they mostly import.
_QUIET_S, _QUIET_BEFORE_S, _IDLE_S = 2.0, 5.0, 1.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RankActivity:
    """How a living rank seems.

    Attributes:
        quiet_s: For how long it has made no record and no step.
        idle_s: For how long, beside that, it has used next to no CPU time.
        asked_s: When it was asked last, monotonic; minus infinity for never.
        is_answered: Whether it has answered, or can't.
        has_joined: Whether it has made a process group.
        reported_s: When it was so, monotonic, of a rank of another node; infinite for one that is looked at.
    """

    rank: int
    quiet_s: float
    idle_s: float
    asked_s: float = float("-inf")
    is_answered: bool = True
    has_joined: bool = True
    reported_s: float = float("inf")

    @property
    def seems_to_wait(self) -> bool:
        """Whether it has done nothing for so long that it may wait for others."""
        return self.idle_s >= _IDLE_S and self.quiet_s >= (_QUIET_S if self.has_joined else _QUIET_BEFORE_S)
