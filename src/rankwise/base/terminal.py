"""What the terminal at one of our streams can show."""

from __future__ import annotations

import os

from rankwise.base.environ import get


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
