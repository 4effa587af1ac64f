"""Where and why a text is no Python, as Python's own parser tells it."""

from __future__ import annotations

import re
import sys
import warnings
from dataclasses import dataclass

from rankwise.lint.program import parse

_NEWER = re.compile(r"\s*(?:async\s+)?(?:def|class)\s+\w+\[|\s*type\s+\w+(?:\[.*\])?\s*=")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unparsed:
    """Where a text stops to be Python.

    Attributes:
        line: From 1.
        col: From 1, in characters.
        why: What is there, as a part of a sentence.
        fix: What to do, as one line.
        is_newer: Whether a newer Python than this reads it.
    """

    line: int
    col: int
    why: str
    fix: str
    is_newer: bool = False


def find_unparsed(code: str) -> Unparsed | None:
    """Tell where and why a text is no Python; None if it is."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd escapes in strings are not ours to tell
            parse(code)
    except SyntaxError as error:
        lines = code.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        line = min(max(error.lineno or 1, 1), len(lines))
        text = lines[line - 1]
        why, fix = str(error.msg or "invalid syntax"), "fix this line; Python itself can't run the file"
        if is_newer := sys.version_info < (3, 12) and bool(_NEWER.match(text)):
            why = f"type parameters need Python 3.12, and this is {sys.version_info.major}.{sys.version_info.minor}"
            fix = "run the check with the Python that runs the script"
        col = min(max(error.offset or 1, 1), len(text) + 1)
        return Unparsed(line=line, col=col, why=why, fix=fix, is_newer=is_newer)
    return None
