"""The console, shared by all who write to it: whole lines, never two at once, colours only on a terminal."""

from __future__ import annotations

import os
import re
import threading
from typing import final

from rankwise.base import terminal
from rankwise.base.os_calls import IS_WINDOWS, wait_ready

_PIPE_BUF_BYTES = 4096
_LOOK_EVERY_S = 0.2
_SHORT_TIMEOUT_S = 1.0
#: About a hundred lines: what stands there is found by scrolling up a little.
_RECENT_BYTES = 8 << 10
#: torch's, and those of ``--tee``.
_PREFIXES = re.compile(r"^(\[[^\]]*\]:\s?)+")


@final
class Console:
    """Writes bytes to our standard output and error, one writer at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._broken: set[int] = set()
        self._timeout_s: float | None = None
        self._is_line_open = False
        self._recent = b""

    def hurry(self) -> None:
        """From now on wait for no reader that takes nothing: the job is over, or the user wants it to be."""
        self._timeout_s = _SHORT_TIMEOUT_S

    def write(self, fd: int, data: bytes) -> None:
        """Write all of ``data``; a reader that is gone (``| head``) gets nothing more, and the job goes on."""
        with self._lock:
            self._write(fd, data, None)
            if fd == 2 and data:
                self._is_line_open = not data.endswith(b"\n")
                self._recent = (self._recent + data)[-_RECENT_BYTES:] if fd not in self._broken else b""

    def has_shown(self, text: str) -> bool:
        """Tell whether all lines of a text are among the last that ranks wrote to standard error here."""
        with self._lock:
            recent = terminal.strip_escapes(self._recent.decode("utf-8", "replace"))
        shown = {"", *(_PREFIXES.sub("", line).strip() for line in recent.splitlines())}
        return all(_PREFIXES.sub("", line).strip() in shown for line in terminal.strip_escapes(text).splitlines())

    def say(self, text: str, *, apart: bool = False) -> None:
        """Write a line of our own to standard error, or drop it if nobody reads there.

        Called by the loop that must stay awake for signals, so it never waits for long.

        Args:
            text: The line, or several.
            apart: Whether it must not continue a line that ranks have begun on standard output, which we don't see.
        """
        if self._lock.acquire(timeout=_SHORT_TIMEOUT_S):
            try:
                begin = b"\n" if self._is_line_open else terminal.begin_line() if apart else b""
                message = terminal.wrap(text, self.width())
                self._write(2, begin + f"{message}\n".encode("utf-8", "backslashreplace"), _SHORT_TIMEOUT_S)
                self._is_line_open = False
            finally:
                self._lock.release()

    def _write(self, fd: int, data: bytes, timeout_s: float | None) -> None:
        at = 0
        while at < len(data) and fd not in self._broken:
            if not self._wait_for_room(fd, timeout_s):
                return
            try:
                # A pipe that has room takes this much without blocking.
                at += os.write(fd, data[at : at + _PIPE_BUF_BYTES])
            except BlockingIOError:
                continue  # somebody made the shared terminal non-blocking (ssh, an editor's shell)
            except OSError:
                self._broken.add(fd)

    def _wait_for_room(self, fd: int, timeout_s: float | None) -> bool:
        if IS_WINDOWS:
            return True
        waited = 0.0
        while not wait_ready([fd], _LOOK_EVERY_S, to_write=True):
            waited += _LOOK_EVERY_S
            limit = self._timeout_s if timeout_s is None else timeout_s
            if limit is not None and waited >= limit:
                if self._timeout_s is not None:
                    self._broken.add(fd)
                return False
        return True

    @staticmethod
    def width(fd: int = 2) -> int | None:
        """Return how many columns the terminal there has; None if it is none, or does not tell."""
        return terminal.width(fd)

    @staticmethod
    def has_colour(fd: int = 2) -> bool:
        """Tell whether colours are wanted there."""
        return terminal.has_colour(fd)
