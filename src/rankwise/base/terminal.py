"""What the terminal at one of our streams can show."""

from __future__ import annotations

import os
import re
import stat

from rankwise.base.environ import get

#: What a terminal obeys, or can't show: control characters but for line breaks and tabs, marks that turn the direction of a text or
#: hide in it, halves of characters.
_UNSEEMLY = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff\U000e0000-\U000e0fff]"
)
#: Colours and movements; titles, links and what else a terminal is told; short orders.
_ESCAPES = re.compile(
    "\x1b\\[[0-9;?]*[ -/]*[@-~]|\x1b[]PX^_][^\x07\x1b]*(?:\x07|\x1b\\\\)|\x1b[ -/]*[0-Z\\\\^-~]"
)


def width(fd: int = 2) -> int | None:
    """Return how many columns the terminal there has; None if it is none, or does not tell."""
    try:
        return os.get_terminal_size(fd).columns or None
    except OSError:
        return None


def has_colour(fd: int = 2) -> bool:
    """Tell whether colours are wanted there: NO_COLOR and FORCE_COLOR decide, in this order, or whether it is a terminal."""
    if get("NO_COLOR"):
        return False
    return bool(get("FORCE_COLOR")) or (os.isatty(fd) and get("TERM") != "dumb")


def begin_line(fd: int = 2, others: int = 1) -> bytes:
    """Return what has to be written so that text begins a line of its own, whatever others wrote there before us.

    Args:
        fd: Where we write.
        others: Where others write, by a descriptor that we may share with them.
    """
    try:
        ours, theirs = os.fstat(fd), os.fstat(others)
        is_shared = (ours.st_dev, ours.st_ino, ours.st_rdev) == (theirs.st_dev, theirs.st_ino, theirs.st_rdev)
        if not is_shared:
            return b""
        if stat.S_ISREG(ours.st_mode):
            return b"" if _last_byte(fd) in {b"", b"\n"} else b"\n"
    except OSError:
        return b""
    if not os.isatty(fd):
        return b"\n"  # a pipe does not tell
    # As zsh does it: from the first column this fills the line, from any other it wraps into the next one.
    columns = width(fd)
    return b"" if columns is None or get("TERM") == "dumb" else b" " * columns + b"\r\x1b[K"


def _last_byte(fd: int) -> bytes:
    """Return the last byte of a file that was opened for writing only."""
    with open(f"/proc/self/fd/{fd}", "rb") as file:  # noqa: PTH123 - no path of anything
        file.seek(-1, os.SEEK_END)
        return file.read(1)


def clean_text(text: str) -> str:
    """Return a text in which ``?`` stands for each character that a terminal would obey; line breaks stay."""
    return _UNSEEMLY.sub("?", text)


def strip_escapes(text: str) -> str:
    """Take out of a text what colours it and moves on a terminal; of the rest that a terminal would obey, ``?`` stands for each character."""
    return clean_text(_ESCAPES.sub("", text.replace("\r\n", "\n")))
