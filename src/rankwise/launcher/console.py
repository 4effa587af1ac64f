"""The console, shared by all who write to it: whole lines, never two at once, colours only on a terminal."""

from __future__ import annotations

import os
import select
import threading
from typing import final

from rankwise.base.environ import get


@final
class Console:
    """Writes bytes to our standard output and error, one writer at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._broken: set[int] = set()

    def write(self, fd: int, data: bytes) -> None:
        """Write all of ``data``; a reader that is gone (``| head``) gets nothing more, and the job goes on."""
        with self._lock:
            at = 0
            while at < len(data) and fd not in self._broken:
                try:
                    at += os.write(fd, data[at:])
                except BlockingIOError:
                    # Somebody made the shared terminal non-blocking (ssh, an editor's shell): wait for room.
                    select.select([], [fd], [], 1.0)
                except OSError:
                    self._broken.add(fd)

    def say(self, text: str) -> None:
        """Write a line of our own to standard error."""
        self.write(2, f"{text}\n".encode("utf-8", "backslashreplace"))

    @staticmethod
    def has_colour(fd: int = 2) -> bool:
        """Tell whether colours are wanted there: a terminal, and no NO_COLOR."""
        return os.isatty(fd) and not get("NO_COLOR") and get("TERM") != "dumb"
