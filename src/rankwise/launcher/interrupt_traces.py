"""Keeps tracebacks of KeyboardInterrupt off the console when the user has interrupted the job: the logs have them, and the report says it."""

from __future__ import annotations

import re
from typing import Literal, final

_FIRST = b"Traceback (most recent call last):"
_BEGIN = re.compile(rb"(\[rank\d+\]: )?" + re.escape(_FIRST) + rb"\s*$")
#: What stands in a traceback between its first and its last line begins so, behind torch's prefix.
_INSIDE = re.compile(rb"(\[rank\d+\]: )?(\s|$)")
_BLANK = re.compile(rb"(\[rank\d+\]: )?\s*$")
#: Between the tracebacks of exceptions that followed from each other.
_CHAIN = re.compile(
    rb"(\[rank\d+\]: )?(During handling of the above exception|The above exception was the direct cause)"
)
_END = re.compile(rb"(\[rank\d+\]: )?KeyboardInterrupt\b")
#: Python 3.13 writes tracebacks in colours on a terminal.
_COLOUR = re.compile(rb"\x1b\[[\d;]*m")


@final
class InterruptTraces:
    """What of one rank's standard error is shown after an interrupt."""

    def __init__(self) -> None:
        self._held = self._half = b""
        # What is held: a traceback that goes on; one that is complete; one behind which another one is announced.
        self._state: Literal["open", "complete", "chained"] = "open"
        # Where the last traceback of a chain begins in it, with the line that announces it.
        self._last_at = 0

    def filter(self, data: bytes) -> bytes:
        """Return what of the next bytes is shown now; a traceback that is not complete is held."""
        shown, (*lines, half) = b"", (self._half + data).split(b"\n")
        for part in lines:
            shown += self._take(part + b"\n")
        # A question, or a bar, is shown without its end.
        plain = _COLOUR.sub(b"", half)
        may_begin = bool(self._held) or plain.startswith(b"[") or (_FIRST + b"\r").startswith(plain)
        self._half = half if may_begin else b""
        return shown + (b"" if may_begin else half)

    def _take(self, line: bytes) -> bytes:
        """Take a line, and return what is shown now."""
        plain = _COLOUR.sub(b"", line)
        shown, begins = b"", bool(_BEGIN.match(plain))
        if self._held and self._state != "open":
            if _CHAIN.match(plain):
                self._state, self._last_at = "chained", len(self._held)
            elif not _BLANK.match(plain) and not (begins and self._state == "chained"):
                shown, self._held = self._held, b""
        if not self._held and not begins:
            return shown + line
        self._last_at = self._last_at if self._held else 0
        self._held += line
        if begins:
            self._state = "open"
        elif self._state == "open" and not _INSIDE.match(plain):
            if _END.match(plain):
                self._held = self._held[: self._last_at]
            self._state = "complete"
        return shown

    def flush(self) -> bytes:
        """Return what was held: the rank writes no more."""
        held, self._held, self._half = self._held + self._half, b"", b""
        return held
