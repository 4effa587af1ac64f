"""Getting a checkpoint's bytes to where they are needed: from files, or from a rank that can read them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from rankwise.base.errors import CheckpointError
from rankwise.checkpoint.shard import read_chunk
from rankwise.checkpoint.staging import view_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rankwise.checkpoint.manifest import Chunk, Index
    from rankwise.checkpoint.plan import Reads
    from rankwise.checkpoint.ranks import Ranks
    from rankwise.checkpoint.sources import Key, Opened

_MOST_THREADS = 4


def read_all(here: Mapping[Key, tuple[Path, Chunk]], index: Index, reads: Reads) -> None:
    """Read what a rank needs, some chunks at a time.

    Args:
        here: Where each chunk is.
        index: What the checkpoint holds.
        reads: What is needed.

    Raises:
        CheckpointError: A byte of it is damaged or can't be read.
    """

    def fetch(key: Key) -> None:
        path, chunk = here[key]
        data = torch.empty(chunk.size, dtype=torch.uint8)
        read_chunk(path / chunk.file, chunk, view_bytes(data), key[0])
        _deliver(reads, index, key, data)

    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), "rankwise-load") as readers:
        for _ in readers.map(fetch, reads.by_chunk):
            pass


def receive_all(ranks: Ranks, opened: Opened, reads: Reads) -> None:
    """Let one rank read each chunk that any rank needs, and hand it to all.

    Raises:
        CheckpointError: Something can't be read; on every rank.

    Collective: every rank.
    """
    needed = ranks.control.exchange(sorted(reads.by_chunk), what="checkpoint.load (which tensors?)")
    trouble: Exception | None = None
    for key in sorted({key for keys in needed for key in keys}):
        sender, name = opened.senders[key], key[0]
        # A byte behind the data says whether they are right: the others are already waiting.
        data = torch.zeros(opened.index.tensors[name].chunks[key[1]].size + 1, dtype=torch.uint8)
        problem = None
        if sender == ranks.rank:
            path, chunk = opened.here[key]
            try:
                read_chunk(path / chunk.file, chunk, view_bytes(data[:-1]), name)
                data[-1] = 1
            except CheckpointError as error:
                problem = error
        ranks.control.broadcast(data, sender=sender, what=f"checkpoint.load ({name})")
        if not data[-1]:
            raise problem or CheckpointError(
                f"rank {sender} could not read {name}", rank=sender, hint="its own error has the details"
            )
        if key in reads.by_chunk and trouble is None:
            try:
                _deliver(reads, opened.index, key, data[:-1])
            except Exception as error:  # noqa: BLE001 - of the device: first the others get what they wait for
                trouble = error
    if trouble is not None:
        raise trouble


def _shape(data: torch.Tensor, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
    return data.view(dtype).view(chunk.shape) if chunk.size else torch.empty(chunk.shape, dtype=dtype)


def _deliver(reads: Reads, index: Index, key: Key, data: torch.Tensor) -> None:
    entry = index.tensors[key[0]]
    values = _shape(data, entry.chunks[key[1]], getattr(torch, entry.dtype))
    for item in reads.by_chunk[key]:
        reads.deliver(item, values)


def read_tensors(path: Path, index: Index) -> Mapping[str, torch.Tensor]:
    """Read all tensors of a checkpoint into host memory, whole.

    Raises:
        CheckpointError: A byte is damaged or can't be read.
    """
    found = {name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)) for name, entry in index.tensors.items()}
    for name, entry in index.tensors.items():
        for chunk in entry.chunks:
            data, target = torch.empty(chunk.size, dtype=torch.uint8), found[name]
            read_chunk(path / chunk.file, chunk, view_bytes(data), name)
            for dim, (start, length) in enumerate(zip(chunk.offsets, chunk.shape, strict=True)):
                target = target.narrow(dim, start, length)
            target.copy_(_shape(data, chunk, target.dtype))
    return found
