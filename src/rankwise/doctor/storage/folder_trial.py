"""Tries in a folder what a checkpoint needs: write, flush, lock, rename; and leaves nothing there."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from rankwise.base.clock import Clock
from rankwise.base.os_calls import try_lock_file

_BLOCK_BYTES = 4 << 20
_MOST_BYTES, _MOST_S = 64 << 20, 1.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What a folder can do: why what failed failed, whether a lock on a file keeps another one out, and how fast a file got to the disk."""

    error: str = ""
    rename_error: str = ""
    sync_error: str = ""
    has_locks: bool = True
    bytes_per_s: float = 0.0
    size_bytes: int = 0


def try_folder(folder: Path, clock: Clock) -> Trial:
    """Try a folder that is there, for little more than a second, with 64 MiB at most."""
    try:
        place = Path(tempfile.mkdtemp(prefix=".rankwise-probe-", dir=folder))
    except OSError as error:
        return Trial(error=error.strerror or str(error))
    try:
        size, took_s, sync_error = _write(place / "data", clock)
        return Trial(
            bytes_per_s=size / max(took_s, 1e-6), size_bytes=size, sync_error=sync_error, rename_error=_rename(place), has_locks=_lock(place / "lock")
        )  # fmt: skip
    except OSError as error:
        return Trial(error=error.strerror or str(error))
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _write(path: Path, clock: Clock) -> tuple[int, float, str]:
    # Noise: a file system that compresses would make zeros look fast.
    block = os.urandom(_BLOCK_BYTES)
    begin_s, size, sync_error = clock.monotonic(), 0, ""
    with path.open("wb", buffering=0) as file:
        while size < _MOST_BYTES and clock.monotonic() - begin_s < _MOST_S:
            size += file.write(block)
            # Each block by itself: what is in the kernel's memory could take a slow disk minutes at the end.
            sync_error = sync_error or _flush(file.fileno())
    return size, clock.monotonic() - begin_s, sync_error


def _flush(fd: int) -> str:
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        return error.strerror or str(error)
    return ""


def _rename(place: Path) -> str:
    """Return why renaming does not work as a checkpoint needs it; empty if it does."""
    old, new, folder = place / "old", place / "new", place / "step.tmp"
    try:
        old.write_bytes(b"old")
        new.write_bytes(b"new")
        new.replace(old)
        folder.mkdir()
        (folder / "shard").write_bytes(b"new")
        folder.rename(place / "step")
        shard = place / "step" / "shard"
        is_good = old.read_bytes() == shard.read_bytes() == b"new" and not new.exists()
    except OSError as error:
        return error.strerror or str(error)
    return "" if is_good else "the renamed file does not have the new content"


def _lock(path: Path) -> bool:
    first = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    second = os.open(path, os.O_RDWR)
    try:
        # Two descriptors of one process that were opened apart are as two processes here.
        return try_lock_file(first) is True and try_lock_file(second) is False
    except OSError:
        return False
    finally:
        for fd in (first, second):
            with suppress(OSError):
                os.close(fd)
