"""Keeps tracebacks of KeyboardInterrupt off the console when the user has interrupted the job: the logs have them, and the report says it."""

from __future__ import annotations

import re
from typing import final

_FIRST = b"Traceback (most recent call last):"
_BEGIN = re.compile(rb"(\[rank\d+\]: )?" + re.escape(_FIRST) + rb"\s*$")
#: What stands in a traceback between its first and its last line begins so, behind torch's prefix.
_INSIDE = re.compile(rb"(\[rank\d+\]: )?(\s|$)")
_END = re.compile(rb"(\[rank\d+\]: )?KeyboardInterrupt\b")


@final
class InterruptTraces:
    """What of one rank's standard error is shown after an interrupt."""

    def __init__(self) -> None:
        self._held = self._half = b""

    def filter(self, data: bytes) -> bytes:
        """Return what of the next bytes is shown now; a traceback that is not complete is held."""
        shown, (*lines, half) = b"", (self._half + data).split(b"\n")
        for line in (part + b"\n" for part in lines):
            if not self._held and not _BEGIN.match(line):
                shown += line
                continue
            self._held += line
            if not _INSIDE.match(line) and not _BEGIN.match(line):
                shown += b"" if _END.match(line) else self._held
                self._held = b""
        # A question, or a bar, is shown without its end.
        may_begin = bool(self._held) or half.startswith(b"[") or _FIRST.startswith(half)
        self._half = half if may_begin else b""
        return shown + (b"" if may_begin else half)

    def flush(self) -> bytes:
        """Return what was held: the rank writes no more."""
        held, self._held, self._half = self._held + self._half, b"", b""
        return held
