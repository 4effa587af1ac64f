"""How much is taken out of a file that anybody may have written: a few bytes can stand for gigabytes."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: The largest jobs have some 100,000.
MOST_RANKS = 1 << 20


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


def check_world_size(world_size: int) -> int:
    """Return a number of ranks.

    Raises:
        ValueError: No job has so many, or it is none.
    """
    if not 0 < world_size <= MOST_RANKS:
        raise ValueError(f"a job of {world_size} ranks; from 1 to {MOST_RANKS} are known")
    return world_size


def expand_runs(runs: Iterable[Sequence[int]]) -> list[int]:
    """Return the ranks of runs, each given by its first and its last one.

    Raises:
        ValueError: There are more ranks than any job has.
    """
    found: list[int] = []
    for first, last in runs:
        if last - first >= MOST_RANKS or len(found) > MOST_RANKS:
            raise ValueError(f"ranks {first} to {last} of a group; at most {MOST_RANKS} are known")
        found += range(first, last + 1)
    return found
