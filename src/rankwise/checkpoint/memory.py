"""Copies in the memory of the host: written in a moment, and still there when all ranks of the host are gone.

``rankwise run`` makes a folder in the host's memory (tmpfs) for the job, outside of every rank, and removes it when the job
ends. Ranks that are started again after a failure find there what was saved last. On several hosts each has what its own
ranks have saved; a rank that is placed elsewhere gets the rest from those that have it.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from rankwise.base import environ
from rankwise.base.errors import CheckpointError
from rankwise.base.host_memory import is_own_folder, name_memory_folder

#: Names another place; by default it is the launcher's.
VARIABLE = "RANKWISE_MEMORY"
_ROOT, _MOST_ANCESTORS = Path("/dev/shm"), 16


def find_memory(folder: Path) -> Path | None:
    """Return where this host keeps copies of a folder's checkpoints; None where nobody would clean up after the job."""
    told = environ.get(VARIABLE)
    root = Path(told) if told else _find_launchers()
    if root is None or not root.is_dir():
        return None
    return root / hashlib.blake2b(str(folder.resolve()).encode(), digest_size=8).hexdigest()


def _find_launchers() -> Path | None:
    """Return the folder that the launcher of this process has made; its number is in the name."""
    pid = os.getppid()
    for _ in range(_MOST_ANCESTORS):
        if pid < 1 or not hasattr(os, "getuid"):
            break
        for path in _ROOT.glob(f"{name_memory_folder(pid)}*"):
            if is_own_folder(path):
                return path
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            break
        pid = int(stat.rpartition(")")[2].split()[1])  # the name, in brackets, may hold anything
    return None


def check_space(folder: Path, size: int) -> None:
    """Make sure that a copy fits beside the one before it: a full tmpfs takes memory from everything else.

    Args:
        folder: Below the host's memory folder.
        size: Bytes of it.

    Raises:
        CheckpointError: It does not fit; says how much is free.
    """
    system = os.statvfs(folder.parent)
    free = system.f_bavail * system.f_frsize
    if size > free:
        raise CheckpointError(
            f"a copy in memory needs {size / 1e9:.2f} GB, and {folder.parent} has {free / 1e9:.2f} GB free",
            hint="give the container a larger /dev/shm (docker run --shm-size), or save to disk only",
        )
