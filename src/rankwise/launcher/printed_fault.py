"""The exception of a rank that was through with its script, and never came to its end: it has printed it, and no more.

A rank notes its exception when the interpreter ends, behind all threads that it waits for. One of those may wait for ever.
"""

from __future__ import annotations

import re

from rankwise.base.faults import FaultRecord
from rankwise.evidence.reader.notes import parse_traceback

_HEAD = "Traceback (most recent call last):"
#: torch puts it before each line of a traceback.
_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)


def find_printed_fault(last_words: str, at_s: float) -> FaultRecord | None:
    """Return the exception whose traceback stands last on a rank's standard error.

    Args:
        last_words: The end of its standard error.
        at_s: When it was seen to be through with its script, on the host's monotonic clock.
    """
    _before, head, rest = _PREFIX.sub("", last_words).rpartition(_HEAD)
    lines = rest.strip("\n").split("\n")
    at = next((at for at, line in enumerate(lines) if line and not line.startswith(" ")), None)
    if not head or at is None:
        return None
    callstack = "\n".join((head, *lines))
    stack = parse_traceback("\n".join(lines[:at]))
    return FaultRecord(
        message="\n".join(lines[at:]),
        callstack=callstack + "\n",
        monotonic_s=at_s,
        where=stack.where if stack else None,
    )
