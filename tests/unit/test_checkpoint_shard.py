"""A shard is a file of the safetensors format: others can read it, and so can we, with every byte checked."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch

from rankwise import checkpoint
from rankwise.base.errors import CheckpointError
from rankwise.checkpoint.disk import REAL_DISK
from rankwise.checkpoint.shard import Box, read_chunk, write_shard
from rankwise.checkpoint.staging import Staging, lay_out

if TYPE_CHECKING:
    from pathlib import Path

    from rankwise.checkpoint.manifest import Chunk

TENSORS = {
    "bytes": torch.arange(3, dtype=torch.uint8), "wide": torch.arange(4).to(torch.complex128).view(2, 2), "half": torch.ones(5, dtype=torch.bfloat16),
    "empty": torch.empty(0, 4), "alone": torch.tensor(2.5), "flags": torch.tensor([True, False]), "\u00e4.\"name": torch.arange(2),
}  # fmt: skip


def make_box(name: str, tensor: torch.Tensor) -> Box:
    shape = tuple(tensor.shape)
    return Box(name, str(tensor.dtype).removeprefix("torch."), tensor.itemsize, shape, (0,) * len(shape), shape, False)


def write(path: Path) -> dict[str, Chunk]:
    """Write the tensors; return where each lies."""
    boxes = lay_out([make_box(name, tensor) for name, tensor in TENSORS.items()])
    staging = Staging()
    file, chunks = write_shard(REAL_DISK, path, boxes, staging.copy(boxes, TENSORS))
    assert file.size == path.stat().st_size
    return {box.name: chunk for box, chunk in zip(boxes, chunks, strict=True)}


def test_safetensors_reads_it(tmp_path: Path) -> None:
    """The safetensors library finds the same tensors in it; what it has no name for lies there as bytes."""
    safetensors = pytest.importorskip("safetensors.torch")
    write(tmp_path / "shard")
    found = safetensors.load_file(tmp_path / "shard")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        if tensor.dtype is torch.complex128:
            assert torch.equal(found[name], tensor.reshape(-1).view(torch.uint8))
        else:
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor)


def test_every_tensor_lies_where_its_elements_can_be_read(tmp_path: Path) -> None:
    """Each begins at a multiple of its element's size, the first at one of 64, so that the file can be mapped."""
    chunks = write(tmp_path / "shard")
    assert min(chunk.start for chunk in chunks.values()) % 64 == 0
    for name, chunk in chunks.items():
        assert chunk.start % TENSORS[name].element_size() == 0
    size = int.from_bytes((tmp_path / "shard").read_bytes()[:8], "little")
    head = json.loads((tmp_path / "shard").read_bytes()[8 : 8 + size])
    spans = sorted(one["data_offsets"] for name, one in head.items() if name != "__metadata__")
    assert spans[0][0] == 0
    assert all(left[1] == right[0] for left, right in pairwise(spans))


def test_reading_checks_every_byte(tmp_path: Path) -> None:
    """What was written comes back; a changed byte, a shorter file and a missing one are errors that name tensor and file."""
    path = tmp_path / "shard"
    chunks = write(path)
    for name, chunk in chunks.items():
        into = bytearray(chunk.size)
        read_chunk(path, chunk, memoryview(into), name)
        assert bytes(into) == bytes(TENSORS[name].contiguous().reshape(-1).view(torch.uint8).tolist() if TENSORS[name].numel() else b"")  # fmt: skip
    data, chunk = path.read_bytes(), chunks["wide"]
    into = bytearray(chunk.size)
    path.write_bytes(data[: chunk.start + 5] + bytes([data[chunk.start + 5] ^ 128]) + data[chunk.start + 6 :])
    with pytest.raises(
        CheckpointError, match=f"shard: wide is damaged \\(bytes {chunk.start} to {chunk.start + chunk.size}"
    ):
        read_chunk(path, chunk, memoryview(into), "wide")
    path.write_bytes(data[: chunk.start + 5])
    with pytest.raises(CheckpointError, match=f"shard ends at byte {chunk.start + 5}, inside of wide"):
        read_chunk(path, chunk, memoryview(into), "wide")
    path.unlink()
    with pytest.raises(CheckpointError, match=r"can't read wide from .*shard: No such file"):
        read_chunk(path, chunk, memoryview(into), "wide")


def test_a_shard_is_never_written_over(tmp_path: Path) -> None:
    """A file that is there already, of whomever, is an error, and stays as it is."""
    (tmp_path / "shard").write_text("mine")
    with pytest.raises(CheckpointError, match=r"can't write .*shard .0 bytes of it are there.: File exists"):
        write(tmp_path / "shard")
    assert (tmp_path / "shard").read_text() == "mine"


def test_memory_is_kept_and_grows(tmp_path: Path) -> None:
    """Saves of a state that grows and shrinks, tensors of no size too, are right though they share one buffer."""
    for step, size in enumerate((0, 3, 1000, 5, 0), 1):
        tensor = torch.full((size,), float(step))
        checkpoint.save(tmp_path, {"t": tensor}, step=step, rng=False)
        assert torch.equal(checkpoint.read(tmp_path)["t"], tensor)
    assert checkpoint.verify(tmp_path) == []
