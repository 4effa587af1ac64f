"""What the terminal at one of our streams can show."""

from __future__ import annotations

import os
import re
import stat

from rankwise.base.environ import get

#: What a terminal obeys, or can't show: control characters but for line breaks and tabs, marks that turn the direction
#: of a text or hide in it, halves of characters.
_UNSEEMLY = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff\U000e0000-\U000e0fff]"
)
#: Colours and movements; titles, links and what else a terminal is told; short orders.
_ESCAPES = re.compile("\x1b\\[[0-9;?]*[ -/]*[@-~]|\x1b[]PX^_][^\x07\x1b]*(?:\x07|\x1b\\\\)|\x1b[ -/]*[0-Z\\\\^-~]")

#: A terminal narrower than this breaks the lines itself.
NARROWEST = 40
#: Quoted text: lines of a log, or of a source file with their numbers.
_QUOTED = re.compile(r"\s*\d*\s*\|(\s|$)")
_MARGIN = re.compile(r"\s*(?:-> |- )?")


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


def wrap(text: str, columns: int | None) -> str:
    """Break lines that are too long for a terminal between words, and indent what follows.

    Quoted lines stay as they are, and so does a word that is longer than the terminal is wide: a path can be clicked.

    Args:
        text: Lines, perhaps with colours.
        columns: Of the terminal; None for what is none, whose lines stay whole.
    """
    if columns is None or columns < NARROWEST:
        return text
    return "\n".join(
        line if _count_columns(line) <= columns or _QUOTED.match(line) else _wrap_line(line, columns)
        for line in text.split("\n")
    )


def _wrap_line(text: str, columns: int) -> str:
    begin = _MARGIN.match(text)
    margin = " " * (len(begin[0]) if begin and begin[0].strip() else len(text) - len(text.lstrip()) + 2)
    lines, line = [], ""
    for space, word in re.findall(r"(\s*)(\S+)", text):
        is_short = len(margin) + _count_columns(word) <= columns
        if line.strip() and is_short and _count_columns(line + space + word) > columns:
            lines.append(line)
            line = margin + word
        else:
            line += space + word
    return "\n".join([*lines, line])


def _count_columns(text: str) -> int:
    return len(_ESCAPES.sub("", text))


def is_same_place(fd: int, other: int) -> bool:
    """Tell whether two descriptors lead to the same terminal, pipe or file."""
    try:
        ours, theirs = os.fstat(fd), os.fstat(other)
    except OSError:
        return False
    return (ours.st_dev, ours.st_ino, ours.st_rdev) == (theirs.st_dev, theirs.st_ino, theirs.st_rdev)


def begin_line(fd: int = 2, others: int = 1) -> bytes:
    """Return what has to be written so that text begins a line of its own, whatever others wrote there before us.

    Args:
        fd: Where we write.
        others: Where others write, by a descriptor that we may share with them.
    """
    if not is_same_place(fd, others):
        return b""
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode):
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
