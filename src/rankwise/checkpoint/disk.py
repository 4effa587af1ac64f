"""The few things that a checkpoint asks of a disk, behind a seam: tests kill, fill and lie at each of them."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from rankwise.base.errors import CheckpointError, RankwiseError
from rankwise.base.os_calls import IS_WINDOWS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

#: Bytes of one write(2): large enough to cost nothing, small enough that a stop is noticed soon.
BLOCK = 16 << 20

_HINTS = {
    errno.ENOSPC: "free some space, or keep fewer checkpoints: save(..., keep=Keep(last=2))",
    errno.EDQUOT: "the quota is used up: delete something, or keep fewer checkpoints: save(..., keep=Keep(last=2))",
    errno.EACCES: "this user may not write there",
    errno.EROFS: "the file system is mounted read-only: after a disk error the kernel does that by itself",
    errno.EIO: "the disk or the server behind it reports an error: see `dmesg` on this host",
    errno.ESTALE: "the file server no longer knows the file: remount it, or see whether another job deletes files there",
}


def _sync_folder(path: Path) -> None:
    if IS_WINDOWS:  # has no such thing: NTFS journals names by itself
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network and user-space file systems don't know fsync of a folder: their names are safe or not, we can't
        # help it.
        if error.errno not in {errno.EINVAL, errno.ENOTSUP, errno.EBADF}:
            raise
    finally:
        os.close(fd)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


@final
@dataclass(frozen=True, slots=True)
class Disk:
    """What writes, syncs and renames; by default the system.

    Attributes:
        make_folder: Makes a folder that must not be there, in one that is.
        write: Writes some of the data to a file descriptor; returns how many bytes.
        sync: Returns when what was written would survive a loss of power.
        sync_folder: Returns when the names in a folder would survive a loss of power.
        rename: Gives a folder another name, at once.
        remove: Deletes a file or a folder with all that is in it.
    """

    make_folder: Callable[[Path], None] = Path.mkdir
    write: Callable[[int, memoryview], int] = os.write
    sync: Callable[[int], None] = os.fsync
    sync_folder: Callable[[Path], None] = _sync_folder
    rename: Callable[[Path, Path], object] = Path.rename
    remove: Callable[[Path], None] = _remove


REAL_DISK = Disk()


def write_file(disk: Disk, path: Path, pieces: Iterable[bytes | memoryview]) -> int:
    """Write a new file and sync it; return its size in bytes.

    Raises:
        CheckpointError: It can't be written; names the file and the cause.
    """
    size = 0
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        try:
            for piece in pieces:
                view = memoryview(piece).cast("B")
                at = 0
                while at < len(view):
                    at += disk.write(fd, view[at : at + BLOCK])
                size += len(view)
            disk.sync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise tell(error, f"can't write {path} ({size} bytes of it are there)") from error
    return size


def remove_quietly(disk: Disk, path: Path) -> None:
    """Delete what may be gone already, or may stay: it is a leftover, and is looked for again."""
    with suppress(OSError):
        disk.remove(path)


def tell(error: OSError, what: str, *, rank: int | None = None) -> CheckpointError:
    """Say what the system said, with what helps."""
    cause = error.strerror or str(error) or type(error).__name__
    return CheckpointError(f"{what}: {cause}", rank=rank, hint=_HINTS.get(error.errno or 0))


def put_in_words(error: Exception, what: str | None = None) -> dict[str, Any]:
    """Return what the other ranks receive of an error; of one of the system with what it has stopped, if given."""
    if what is not None and isinstance(error, OSError):
        error = tell(error, what)
    if isinstance(error, RankwiseError):
        return {"error": error.message, "hint": error.hint, "rank": error.rank}
    return {"error": f"{type(error).__name__}: {error}", "hint": None, "rank": None}
