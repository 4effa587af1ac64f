"""Time, behind a seam: everything that waits takes a Clock, so that tests can move time."""

from __future__ import annotations

import time
from typing import Protocol, final


class Clock(Protocol):
    """Where time comes from."""

    def monotonic(self) -> float:
        """Return seconds on a clock that never goes back; equal in all processes of a host on Linux."""

    def time(self) -> float:
        """Return seconds since the epoch."""

    def sleep(self, seconds: float) -> None:
        """Let ``seconds`` pass."""


@final
class SystemClock:
    """The real clock."""

    def __repr__(self) -> str:
        return "SYSTEM_CLOCK"  # as signatures show it

    def monotonic(self) -> float:
        """Return ``time.monotonic()``."""
        return time.monotonic()

    def time(self) -> float:
        """Return ``time.time()``."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Really sleep."""
        time.sleep(seconds)


SYSTEM_CLOCK = SystemClock()
