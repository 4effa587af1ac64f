"""Ranks that leave for a requeue: the first one to do so has not failed, and the others get time to follow."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from rankwise.base.requeue import REQUEUE

if TYPE_CHECKING:
    from rankwise.base.clock import Clock


@final
class RequeueWatch:
    """Knows when the first rank of this node has left with the exit code that says requeue.

    Args:
        timeout_s: How long the others may take after it.
        clock: Where the time comes from.
        is_on: Whether that exit code has this meaning here; a function that is launched returns, or fails.
    """

    def __init__(self, timeout_s: float, clock: Clock, *, is_on: bool) -> None:
        self._timeout_s, self._clock, self.is_on = timeout_s, clock, is_on
        self._first_s: float | None = None

    @property
    def has_begun(self) -> bool:
        """Whether a rank has left so."""
        return self._first_s is not None

    def takes(self, code: int | None) -> bool:
        """Tell whether an exit code says requeue."""
        return self.is_on and code == REQUEUE

    def note(self, code: int) -> None:
        """Take note of a rank's end."""
        if self._first_s is None and self.takes(code):
            self._first_s = self._clock.monotonic()

    def is_overdue(self) -> bool:
        """Whether those that live have had their time."""
        return self._first_s is not None and self._clock.monotonic() - self._first_s > self._timeout_s
