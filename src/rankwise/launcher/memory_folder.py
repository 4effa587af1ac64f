"""A folder in the host's memory for the ranks' copies of their state: it outlives every rank, and ends with the job.

Ranks find it by this process's number in its name, among their ancestors': a variable would be one that scripts don't see
under torchrun.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import final

from rankwise.base.osdoor import IS_LINUX, try_lock_file

_ROOT = Path("/dev/shm")
_PREFIX, _OWNER = "rankwise-memory-", ".owner"


@final
class MemoryFolder:
    """A job's folder; removed by ``drop``.

    Args:
        path: The folder, which is there.
        owner_fd: Its lock, held as long as this process lives.
    """

    def __init__(self, path: Path, owner_fd: int) -> None:
        self.path, self._owner_fd = path, owner_fd

    def drop(self) -> None:
        """Give the memory back."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            os.close(self._owner_fd)


def open_memory_folder(root: Path = _ROOT) -> MemoryFolder | None:
    """Make the folder, and remove those of launchers that were killed; None where the system has no such memory."""
    if not IS_LINUX or not os.access(root, os.W_OK):
        return None
    prefix = f"{_PREFIX}{os.getuid()}-"
    with suppress(OSError):
        _sweep(root, prefix)
        token = f"{os.getpid()}-{os.urandom(8).hex()}"
        # Under another name until it is locked: else a launcher that starts at the same moment would sweep it.
        early, path = root / f".{prefix}{token}", root / f"{prefix}{token}"
        early.mkdir(mode=0o700)
        fd = os.open(early / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if try_lock_file(fd):
            early.rename(path)
            return MemoryFolder(path, fd)
        os.close(fd)
        shutil.rmtree(early, ignore_errors=True)
    return None


def _sweep(root: Path, prefix: str) -> None:
    for path in (*root.glob(f"{prefix}*"), *root.glob(f".{prefix}*")):
        with suppress(OSError):
            fd = os.open(path / _OWNER, os.O_RDWR | os.O_CLOEXEC)
            try:
                # The lock is free exactly if its owner has ended, in whatever container it was.
                if try_lock_file(fd):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(fd)
