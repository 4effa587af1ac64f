"""Sizes of memory, as people write and read them."""

from __future__ import annotations

import re

from rankwise.base.errors import UsageError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_size(size: str | int) -> int:
    """Return a number of bytes; "80GB", "80 GiB" and "80g" are the same: makers of GPUs say GB for 2**30."""
    if isinstance(size, int):
        number, unit = float(size), ""
    else:
        found = _SIZE.fullmatch(size.strip())
        if found is None:
            raise UsageError(
                f"{size!r} is not a size of memory", hint="use 80GB, 512MB, or a number of bytes"
            )
        number, unit = float(found[1]), found[2].lower()
    if number <= 0:
        raise UsageError(f"a memory of {size!r} holds nothing", hint="use 80GB, 512MB, or a number of bytes")
    return int(number * _UNITS[unit])


def show_size(size: int) -> str:
    """Return bytes as people read them: ``1.4 GiB``."""
    for name, unit in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} B"
