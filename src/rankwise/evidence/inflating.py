"""Compressed bytes out of a file that anybody may have written: unpacked up to a bound."""

from __future__ import annotations

import zlib


def inflate(packed: bytes, most: int) -> bytes:
    """Return what was packed.

    Args:
        packed: By ``zlib.compress``.
        most: So many bytes are accepted: a few kilobytes can hold gigabytes.

    Raises:
        ValueError: It is damaged, or larger.
    """
    unpacked = zlib.decompressobj()
    try:
        raw = unpacked.decompress(packed, most + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(raw) > most:
        raise ValueError(f"it holds more than {most} bytes")
    if not unpacked.eof:
        raise ValueError("it is cut short")
    return raw
