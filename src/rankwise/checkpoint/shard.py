"""One rank's tensors as a file: the layout of safetensors, so that any program can read it.

Eight bytes say how long the head is; the head is JSON; then the tensors lie one behind the other.
(https://github.com/huggingface/safetensors#format)
"""

from __future__ import annotations

import json
import math
import threading
import zlib
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from rankwise.base.errors import CheckpointError
from rankwise.checkpoint.disk import tell, write_file
from rankwise.checkpoint.manifest import Chunk, File

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rankwise.checkpoint.disk import Disk

#: What safetensors calls torch's dtypes. Others lie there as plain bytes, and the index says what they are.
DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_ALIGN = 64


@final
@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor that some rank has.

    Attributes:
        tensor: The tensor's name.
        dtype: As torch writes it, without ``torch.``.
        itemsize: Bytes of an element.
        whole: The tensor's shape.
        offsets: Where the box begins.
        shape: How large it is.
        is_shard: Whether the rank has only this of the tensor, or has cut it for others to share the work.
        is_shared: Whether any rank that has it may write it; else the first one does.
    """

    tensor: str
    dtype: str
    itemsize: int
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    is_shard: bool
    is_shared: bool = True

    @property
    def name(self) -> str:
        """The tensor's name, with the place of the box if it is not all of it."""
        if self.shape == self.whole:
            return self.tensor
        cuts = [f"{at}:{at + size}" for at, size in zip(self.offsets, self.shape, strict=True)]
        return f"{self.tensor}[{','.join(cuts)}]"

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.itemsize


def make_head(boxes: Sequence[Box]) -> bytes:
    """Return all that stands in front of the tensors; a multiple of 64 bytes, so that they can be mapped into memory."""
    content: dict[str, object] = {"__metadata__": {"format": "pt", "made_by": "rankwise"}}
    at = 0
    for box in boxes:
        known, end = DTYPES.get(box.dtype), at + box.size
        content[box.name] = {
            "dtype": known or "U8",
            "shape": box.shape if known else [box.size],
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGN)
    return len(text).to_bytes(8, "little") + text


def write_shard(disk: Disk, path: Path, boxes: Sequence[Box], data: memoryview) -> tuple[File, list[Chunk]]:
    """Write a shard and sync it.

    Args:
        disk: What writes.
        path: The file, which must not be there.
        boxes: What lies in ``data``, in order and without gaps.
        data: The tensors' bytes.

    Returns:
        The file, and where in it each box lies, with its checksum.

    Raises:
        CheckpointError: It can't be written.
    """
    head = make_head(boxes)
    chunks: list[Chunk] = []

    def sum_up() -> None:
        at = 0
        for box in boxes:
            crc = zlib.crc32(data[at : at + box.size])
            chunks.append(Chunk(path.name, len(head) + at, box.size, crc, box.offsets, box.shape))
            at += box.size

    # zlib lets go of the interpreter's lock, so summing up costs no time beside the disk.
    beside = threading.Thread(target=sum_up, name="rankwise-checksum")
    # An interpreter that goes down starts no more threads (Python 3.12), and a last save in the background is still to
    # be written.
    with suppress(RuntimeError):
        beside.start()
    try:
        size = write_file(disk, path, [head, data])
    finally:
        if beside.ident is None:
            sum_up()
        else:
            beside.join()
    return File(name=path.name, size=size, head=len(head), crc32=zlib.crc32(head)), chunks


def read_chunk(path: Path, chunk: Chunk, into: memoryview, name: str) -> None:
    """Read the bytes of a box, and compare their checksum.

    Args:
        path: The file.
        chunk: Where it lies.
        into: ``chunk.size`` bytes to read into. Not by mapping the file: where it shrinks, a read tells it, and a map
            kills.
        name: Of the tensor, for the error.

    Raises:
        CheckpointError: It can't be read, or is damaged.
    """
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(chunk.start)
            at = 0
            while at < chunk.size:
                got = file.readinto(into[at:])
                if not got:
                    raise CheckpointError(f"{path} ends at byte {chunk.start + at}, inside of {name}")
                at += got
    except OSError as error:
        raise tell(error, f"can't read {name} from {path}") from error
    found = zlib.crc32(into)
    if found != chunk.crc32:
        raise CheckpointError(
            f"{path}: {name} is damaged (bytes {chunk.start} to {chunk.start + chunk.size}: checksum {found:08x}, not {chunk.crc32:08x})",
            hint="the disk or a copy changed it: use an earlier checkpoint, or a backup",
        )
