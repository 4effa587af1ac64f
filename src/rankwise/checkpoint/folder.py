"""A folder of checkpoints: which are whole, which is the latest, and how a new one comes in.

    runs/a/step-500/                   whole: it was renamed to this after all of it was on the disk
    runs/a/step-600.tmp-4f1c.../       not whole: it is being written, or whoever wrote it is gone

Nothing here needs torch, and nothing asks a clock but the file system's.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import socket
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

from rankwise.base.errors import CheckpointError
from rankwise.checkpoint.disk import REAL_DISK, remove_quietly, tell
from rankwise.checkpoint.lock import LOCK
from rankwise.checkpoint.manifest import (
    INDEX,
    MANIFEST,
    Chunk,
    Manifest,
    NewerFormatError,
    parse_index,
    parse_manifest,
)

if TYPE_CHECKING:
    from rankwise.checkpoint.disk import Disk
    from rankwise.checkpoint.manifest import File, Index

_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")
_TEMPORARY = re.compile(r"step-\d+(?:\.\d+)?\.tmp-[0-9a-f]{16}")
_BLOCK = 4 << 20
_FORGOTTEN_S = 3600.0


@final
@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint in a folder.

    Attributes:
        path: Its own folder.
        manifest: What it says of itself; None if that can't be read.
        problem: Why it can't be loaded; None if its manifest is right and its files have the right sizes.
        is_newer: Whether a later rankwise has written it, in a format that this one does not know.
    """

    path: Path
    manifest: Manifest | None
    problem: str | None = None
    is_newer: bool = False

    @property
    def step(self) -> int:
        """The step, by its name if there is no manifest."""
        found = _NAME.fullmatch(self.path.name)
        return self.manifest.step if self.manifest else int(found[1]) if found else -1


# ------------------------------------------------------------------ looking


def list_checkpoints(folder: str | Path) -> list[Checkpoint]:
    """Return the committed checkpoints of a folder, the latest first, those without a readable manifest last.

    Only names, manifests and sizes are looked at; ``verify`` reads everything.

    Args:
        folder: The folder that was passed to ``save``; it need not exist.

    Raises:
        CheckpointError: The folder exists, but can't be read.
    """
    found = [open_checkpoint(path) for path in _list_names(Path(folder)) if _NAME.fullmatch(path.name)]
    return sorted(
        found,
        key=lambda one: (one.manifest is not None, one.manifest.serial if one.manifest else one.step),
        reverse=True,
    )


def latest(folder: str | Path) -> Path | None:
    """Return the latest complete checkpoint, by its manifest and the sizes of its files; None if there is none.

    Only this process looks. Ranks must not decide by it whether to resume: other hosts may see another. ``load`` makes
        them agree.

    Args:
        folder: The folder that was passed to ``save``; it need not exist.

    Raises:
        CheckpointError: The folder exists, but can't be read.
    """
    return next((one.path for one in list_checkpoints(folder) if one.problem is None), None)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Look at one checkpoint: its manifest, and whether its files are there with the right sizes."""
    path = Path(path)
    try:
        manifest = parse_manifest(_read(path / MANIFEST), path / MANIFEST)
    except CheckpointError as error:
        return Checkpoint(path, None, error.message, is_newer=isinstance(error, NewerFormatError))
    for file in manifest.files:
        problem = _weigh(path, file)
        if problem:
            return Checkpoint(path, manifest, problem)
    return Checkpoint(path, manifest)


def read_contents(one: Checkpoint) -> tuple[Manifest, Index]:
    """Return what a checkpoint says of itself and what it holds.

    Raises:
        CheckpointError: It can't be loaded, its index is missing or damaged; says why.
    """
    if one.manifest is None or one.problem:
        raise CheckpointError(one.problem or f"{one.path} has no manifest")
    path = one.path / INDEX
    data = _read(path)
    found = next((file for file in one.manifest.files if file.name == INDEX), None)
    if found is None or zlib.crc32(data) != found.crc32:
        raise CheckpointError(
            f"{path} is not the one that the manifest beside it refers to",
            hint="files of two checkpoints were mixed, or the disk changed it: use an earlier one",
        )
    return one.manifest, parse_index(data, path)


def verify(path: str | Path) -> list[str]:
    """Read every byte of a checkpoint, or of all checkpoints in a folder, and compare the checksums.

    Args:
        path: One checkpoint, or a folder of them.

    Returns:
        What is wrong, a line each; empty if all is valid.

    Raises:
        CheckpointError: There is no checkpoint at all.
    """
    path = Path(path)
    if (path / MANIFEST).exists() or _NAME.fullmatch(path.name):
        if not path.is_dir():
            raise CheckpointError(f"there is no folder {path}")
        return _verify_one(open_checkpoint(path))
    found = list_checkpoints(path)
    if not found:
        what = f"{path} holds no checkpoint" if path.exists() else f"there is no folder {path}"
        raise CheckpointError(what, hint="pass the folder that was passed to save()")
    return [problem for one in found for problem in _verify_one(one)]


def _verify_one(one: Checkpoint) -> list[str]:
    try:
        manifest, index = read_contents(one)
    except CheckpointError as error:
        return [error.message]
    problems: list[str] = []
    regions: dict[str, list[tuple[Chunk, str]]] = {file.name: [] for file in manifest.files}
    for name, entry in index.tensors.items():
        for chunk in entry.chunks:
            regions.setdefault(chunk.file, []).append((chunk, name))
    for file in manifest.files:
        problems += _verify_file(one.path / file.name, file, regions[file.name])
    strangers = regions.keys() - {file.name for file in manifest.files}
    return problems + [f"{one.path / name} belongs to the index, not to the manifest" for name in sorted(strangers)]


def _verify_file(path: Path, file: File, regions: list[tuple[Chunk, str]]) -> list[str]:
    """Check the head, each tensor, and that nothing lies between them unchecked."""
    problems, end = [], file.head
    try:
        with path.open("rb") as source:
            if _sum_up(source, file.head) != file.crc32:
                problems.append(f"{path}: the first {file.head} bytes are damaged")
            for chunk, name in sorted(regions, key=lambda one: (one[0].start, one[0].size)):
                if chunk.start != end:
                    problems.append(f"{path}: {name} begins at byte {chunk.start}, where {end} was expected")
                source.seek(chunk.start)
                found = _sum_up(source, chunk.size)
                if found != chunk.crc32:
                    problems.append(
                        f"{path}: {name} is damaged (bytes {chunk.start} to {chunk.start + chunk.size}: checksum {found:08x}, not {chunk.crc32:08x})"
                    )
                end = chunk.start + chunk.size
    except OSError as error:
        return [tell(error, f"can't read {path}").message]
    if end != file.size:
        problems.append(f"{path}: {file.size - end} bytes at its end belong to nothing")
    return problems


def _sum_up(source: object, size: int) -> int:
    crc, left = 0, size
    while left:
        data = source.read(min(_BLOCK, left))  # type: ignore[attr-defined]
        if not data:
            return -1
        crc, left = zlib.crc32(data, crc), left - len(data)
    return crc


def _weigh(path: Path, file: File) -> str | None:
    try:
        size = (path / file.name).stat().st_size
    except OSError as error:
        return tell(error, f"{path / file.name} can't be read").message
    return None if size == file.size else f"{path / file.name} has {size} bytes, not {file.size}"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise tell(error, f"can't read {path}") from error


def _list_names(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise tell(error, f"can't list {folder}") from error


# ------------------------------------------------------------------ writing


def name_temporary(folder: Path, step: int) -> Path:
    """Return a folder to write into that no other job can mean."""
    return folder / f"step-{step}.tmp-{_make_mark()}"


def _make_mark() -> str:
    """Return 16 digits that no other has drawn; the first 8 are those of this host."""
    return _find_host_mark() + secrets.token_hex(4)


def _find_host_mark() -> str:
    return hashlib.blake2b(socket.gethostname().encode(), digest_size=4).hexdigest()


def next_serial(folder: Path) -> int:
    """Return a serial above those of all checkpoints in a folder.

    Raises:
        CheckpointError: A later rankwise has written into the folder: what serial it gave can't be read.
    """
    found = list_checkpoints(folder)
    for one in found:  # going on from an older one would lose what was trained since
        if one.is_newer:
            raise CheckpointError(
                str(one.problem),
                hint=f"install the rankwise that wrote it, or a later one; to continue without it, move {one.path} away",
            )
    return 1 + max((one.manifest.serial for one in found if one.manifest), default=0)


def commit(disk: Disk, temporary: Path, step: int) -> Path:
    """Make a folder that is whole the checkpoint of a step; return its name.

    The rename is the commit: before it a reader finds nothing, after it everything. Where the step has a checkpoint
    already, the new one gets a number behind it, and retention takes the old one away afterwards.

    Raises:
        CheckpointError: The file system refused.
    """
    folder = temporary.parent
    try:
        disk.sync_folder(temporary)
        target = folder / f"step-{step}"
        number = 2
        while target.exists():
            target, number = folder / f"step-{step}.{number}", number + 1
        try:
            disk.rename(temporary, target)
        except OSError:
            # A network file system that lost the server's answer asks again, and is told that the source is gone.
            if temporary.exists() or not (target / MANIFEST).exists():
                raise
    except OSError as error:
        raise tell(error, f"can't rename {temporary} to a checkpoint of step {step}") from error
    if not (target / MANIFEST).exists():
        raise CheckpointError(
            f"{target} is missing after its rename",
            hint="the file system does not do what it reports: don't keep checkpoints on it",
        )
    # Committed is committed: readers see it, whether or not a loss of power now would take it back.
    with suppress(OSError):
        disk.sync_folder(folder)
    return target


def delete(disk: Disk, path: Path) -> None:
    """Delete a committed checkpoint; a half deleted one is never taken for a whole one.

    Raises:
        OSError: The file system refused.
    """
    condemned = path.with_name(f"{path.name}.tmp-{_make_mark()}")
    disk.rename(path, condemned)
    disk.remove(condemned)


def _is_forgotten(path: Path) -> bool:
    """Tell whether nothing was written into a folder for an hour, by the clock of its file system."""
    with suppress(OSError):
        now_s = (path.parent / LOCK).stat().st_mtime  # whoever holds the lock has just written it
        return now_s - max(one.stat().st_mtime for one in (path, *path.iterdir())) > _FORGOTTEN_S
    return False


def sweep(folder: Path, disk: Disk = REAL_DISK) -> list[Path]:
    """Delete what dead jobs left half written. Only whoever holds the folder's lock may do it.

    On some file systems (NFS with local_lock, Lustre with localflock, BeeGFS) that lock holds on one host only, and
    nobody says so. So what another host began is left alone for as long as something was written there within the last
    hour.

    Args:
        folder: The folder of checkpoints.
        disk: What deletes.

    Returns:
        What was deleted.
    """
    own = f".tmp-{_find_host_mark()}"
    with suppress(CheckpointError):
        gone = [
            path
            for path in _list_names(folder)
            if _TEMPORARY.fullmatch(path.name) and (own in path.name or _is_forgotten(path))
        ]
        for path in gone:
            remove_quietly(disk, path)
        return gone
    return []
