"""Ranks that leave for a requeue: the first one to do so has not failed, and the others get time to follow."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from rankwise.base.files import read_all
from rankwise.base.os_calls import IS_LINUX
from rankwise.base.requeue import REQUEUE, has_asked

if TYPE_CHECKING:
    from rankwise.base.clock import Clock


@final
class RequeueWatch:
    """Knows when the first rank of this node has left for a requeue.

    Args:
        timeout_s: How long the others may take after it.
        clock: Where the time comes from.
        is_on: Whether a rank can ask for one here; a function that is launched returns, or fails.
    """

    def __init__(self, timeout_s: float, clock: Clock, *, is_on: bool) -> None:
        self._timeout_s, self._clock, self._is_on = timeout_s, clock, is_on
        self._first_s: float | None = None

    @property
    def has_begun(self) -> bool:
        """Whether a rank has left so."""
        return self._first_s is not None

    def takes(self, code: int | None, notes_fd: int) -> bool:
        """Tell whether a rank's end asks for a requeue: by exit code 75, and by a note that this is what it means.

        Args:
            code: The rank's exit code.
            notes_fd: Its notes. Elsewhere than on Linux a rank can't find them from within, and the code alone counts.
        """
        return self._is_on and code == REQUEUE and (not IS_LINUX or has_asked(read_all(notes_fd)))

    def note(self, code: int, notes_fd: int) -> None:
        """Take note of a rank's end."""
        if self._first_s is None and self.takes(code, notes_fd):
            self._first_s = self._clock.monotonic()

    def is_overdue(self) -> bool:
        """Whether those that live have had their time."""
        return self._first_s is not None and self._clock.monotonic() - self._first_s > self._timeout_s
