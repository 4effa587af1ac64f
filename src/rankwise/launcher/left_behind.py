"""Notice ranks that wait for one that has already left: with NCCL, or before init, nothing else would tell them."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from rankwise.evidence.snapshot import take_stacks
from rankwise.launcher.processes import cpu_ticks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwise.base.clock import Clock

#: So much CPU time is no sign of life: a thread that wakes up now and then uses it.
_IDLE_TICKS = 2


@final
class LeftBehindWatch:
    """Looks at the ranks that live after others of their node have ended.

    Args:
        timeout_s: How long they must have been idle, all of them.
        clock: Where the time comes from.
    """

    def __init__(self, timeout_s: float, clock: Clock) -> None:
        self._timeout_s, self._clock = timeout_s, clock
        self._idle_since: float | None = None
        self._ticks: dict[int, int] = {}

    def are_left_behind(self, living: Mapping[int, tuple[int, int]]) -> bool:
        """Tell whether all of ``living`` have been idle for too long and stand in a collective.

        Idle means that no thread has used the CPU. Only then are they asked for their stacks: a signal can cut
        a sleeping system call short.

        Args:
            living: By global rank: (pid, descriptor of its stack file).
        """
        now, ticks = self._clock.monotonic(), {rank: cpu_ticks(pid) for rank, (pid, _) in living.items()}
        if self._idle_since is None or any(self._has_moved(rank, at) for rank, at in ticks.items()):
            self._ticks, self._idle_since = ticks, now
            return False
        if now - self._idle_since < self._timeout_s:
            return False
        self._idle_since = None
        stacks = take_stacks(living, self._clock)
        return len(stacks) == len(living) and all(stack.op for stack in stacks.values())

    def _has_moved(self, rank: int, ticks: int) -> bool:
        return ticks < 0 or rank not in self._ticks or ticks - self._ticks[rank] > _IDLE_TICKS
