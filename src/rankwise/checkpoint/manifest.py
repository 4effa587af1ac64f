"""What stands in a checkpoint's two JSON files, and how a changed byte in them is noticed.

``manifest.json`` is short and says what the checkpoint is and which files it has; ``index.json`` says where each tensor
lies and holds all that is not a tensor. Plain JSON: nothing here can execute, and any program can read it.
"""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, final

from rankwise.base.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

FORMAT, VERSION = "rankwise checkpoint", 1
MANIFEST, INDEX = "manifest.json", "index.json"

#: The checksum stands in a place of fixed width on top, and is taken over all that follows it.
_TOP = '{\n "crc32": "'
_TOP_SIZE = len(_TOP) + 8


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file of a checkpoint.

    Attributes:
        name: Its name in the checkpoint's folder.
        size: Bytes.
        head: Bytes that ``crc32`` is taken over, from the start. The rest are tensors, whose checksums the index has.
        crc32: Checksum of the head.
    """

    name: str
    size: int
    head: int
    crc32: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint is.

    Attributes:
        step: The training step that it was saved at.
        serial: Counts the checkpoints of a folder: the latest is the one with the highest. Clocks jump, and steps go
            back.
        world_size: How many ranks saved it.
        files: Its files but this one, the index first.
        mesh: Axis names and sizes of the device mesh that it was sharded over; empty if it was not.
        versions: Of rankwise, torch and Python.
        metrics: Numbers that it is judged by.
        parts: Names of the parts of the state.
        saved_at: When, for people; nothing is decided by it.
    """

    step: int
    serial: int
    world_size: int
    files: tuple[File, ...]
    mesh: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    parts: tuple[str, ...] = ()
    saved_at: str = ""

    @property
    def size(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(file.size for file in self.files)


class Chunk(NamedTuple):
    """A box of a tensor, and where its bytes are.

    Attributes:
        file: Name of the file.
        start: First byte in it.
        size: How many bytes.
        crc32: Their checksum.
        offsets: Where the box begins in the tensor, one number for each dim.
        shape: How large the box is.
    """

    file: str
    start: int
    size: int
    crc32: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A saved tensor.

    Attributes:
        dtype: As torch writes it, without ``torch.``.
        shape: Of the whole tensor.
        chunks: Boxes that make it up, without gap or overlap.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@final
@dataclass(frozen=True, slots=True)
class Index:
    """What a checkpoint holds.

    Attributes:
        tensors: By name.
        trees: For each part all that is not a tensor, with the tensors' names where they belong.
        rank_trees: The same for parts that each rank has its own of, by rank.
    """

    tensors: Mapping[str, TensorEntry]
    trees: Mapping[str, Any]
    rank_trees: Mapping[int, Mapping[str, Any]]


# ------------------------------------------------------------------ writing


def dump_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of ``manifest.json``."""
    # JSON has no NaN, and a loss that has become one must not stop the save.
    metrics = {name: value if math.isfinite(value) else repr(value) for name, value in manifest.metrics.items()}
    return dump({"format": FORMAT, "version": VERSION, **asdict(manifest), "metrics": metrics})


def dump_index(index: Index) -> bytes:
    """Return the bytes of ``index.json``."""
    files = sorted({chunk.file for entry in index.tensors.values() for chunk in entry.chunks})
    number = {name: place for place, name in enumerate(files)}
    tensors = {
        name: [entry.dtype, entry.shape, [[number[c.file], c.start, c.size, c.crc32, c.offsets, c.shape] for c in entry.chunks]]
        for name, entry in index.tensors.items()
    }  # fmt: skip
    ranks = {str(rank): trees for rank, trees in index.rank_trees.items()}
    return dump({"files": files, "tensors": tensors, "trees": index.trees, "rank_trees": ranks}, indent=None)


def dump(content: Mapping[str, Any], indent: int | None = 1) -> bytes:
    """Return an object as JSON with its checksum on top."""
    text = json.dumps(content, indent=indent, allow_nan=False)
    rest = ('",\n' + text.lstrip("{").lstrip("\n") + "\n").encode()
    return f"{_TOP}{zlib.crc32(rest):08x}".encode() + rest


# ------------------------------------------------------------------ reading


class NewerFormatError(CheckpointError):
    """A checkpoint is whole, and of a later version than this rankwise reads."""


def parse_manifest(data: bytes, path: object) -> Manifest:
    """Read ``manifest.json``.

    Raises:
        CheckpointError: A byte of it was changed or is missing, or it is of a later version.
    """
    content = parse(data, path)
    if content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not the manifest of a checkpoint of rankwise")
    version = content.get("version")
    if version != VERSION:
        kind = NewerFormatError if isinstance(version, int) and version > VERSION else CheckpointError
        raise kind(
            f"{path} has version {content.get('version')} of the format; this rankwise reads version {VERSION}",
            hint="load it with the rankwise that wrote it, or a later one",
        )
    try:
        files = tuple(File(**file) for file in content["files"])
        rest = {name: content[name] for name in Manifest.__dataclass_fields__ if name != "files"}
        metrics = {name: float(value) for name, value in rest["metrics"].items()}
        return Manifest(files=files, **{**rest, "parts": tuple(rest["parts"]), "metrics": metrics})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} lacks what a manifest must have: {error}") from error


def parse_index(data: bytes, path: object) -> Index:
    """Read ``index.json``.

    Raises:
        CheckpointError: A byte of it was changed or is missing.
    """
    content = parse(data, path)
    try:
        files = content["files"]
        tensors = {
            name: TensorEntry(dtype, tuple(shape), tuple(Chunk(files[c[0]], c[1], c[2], c[3], tuple(c[4]), tuple(c[5])) for c in chunks))
            for name, (dtype, shape, chunks) in content["tensors"].items()
        }  # fmt: skip
        ranks = {int(rank): trees for rank, trees in content["rank_trees"].items()}
        return Index(tensors, content["trees"], ranks)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{path} lacks what an index must have: {error!r}") from error


def parse(data: bytes, path: object) -> dict[str, Any]:
    """Read what ``dump`` wrote.

    Raises:
        CheckpointError: A byte of it was changed or is missing.
    """
    result, rest = data[len(_TOP) : _TOP_SIZE], data[_TOP_SIZE:]
    found = f"{zlib.crc32(rest):08x}".encode()
    if not data.startswith(_TOP.encode()) or result != found:
        raise CheckpointError(
            f"{path} is damaged: its checksum is {found.decode()}, it records {result.decode(errors='replace')!r}",
            hint="the disk or a copy changed it: use an earlier checkpoint, or a backup",
        )
    content = json.loads(data)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not an object")
    return content
