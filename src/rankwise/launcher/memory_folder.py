"""A folder in the host's memory for the ranks' copies of their state: it outlives every rank, and ends with the job.

Ranks find it by the supervisor's number in its name, among their ancestors': a variable would be one that scripts don't see
under torchrun.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import final

from rankwise.base.host_memory import is_own_folder, name_memory_folder
from rankwise.base.os_calls import IS_LINUX, try_lock_file

_ROOT = Path("/dev/shm")
_OWNER = ".owner"
#: Each launcher sweeps once, so this many would have to start at the same moment for one of them to get no folder.
_TRIES = 16


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


def open_memory_folder(root: Path = _ROOT, *, pid: int | None = None) -> MemoryFolder | None:
    """Make the folder, and remove those of launchers that were killed; None where the system has no such memory.

    Args:
        root: Where.
        pid: The process below which the ranks are, if that is not this one.
    """
    if not IS_LINUX or not os.access(root, os.W_OK):
        return None
    with suppress(OSError):
        _sweep(root)
    # Until it is locked, a launcher that starts at the same moment may take the folder for one of the dead, and remove
    # it.
    made = (_try_make(root, pid or os.getpid()) for _ in range(_TRIES))
    return next((folder for folder in made if folder is not None), None)


def _try_make(root: Path, pid: int) -> MemoryFolder | None:
    name = f"{name_memory_folder(pid)}{os.urandom(8).hex()}"
    # Under another name until it is locked, so that ranks see no folder that may go.
    early, path = root / f".{name}", root / name
    fd = -1
    with suppress(OSError):
        early.mkdir(mode=0o700)
        fd = os.open(early / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if try_lock_file(fd):
            early.rename(path)
            return MemoryFolder(path, fd)
    if fd >= 0:
        os.close(fd)
    shutil.rmtree(early, ignore_errors=True)
    return None


def _sweep(root: Path) -> None:
    prefix = name_memory_folder()
    for path in (*root.glob(f"{prefix}*"), *root.glob(f".{prefix}*")):
        if not is_own_folder(path):
            continue
        with suppress(OSError):
            fd = os.open(path / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                # The lock is free exactly if its owner has ended, in whatever container it was.
                if try_lock_file(fd):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(fd)
