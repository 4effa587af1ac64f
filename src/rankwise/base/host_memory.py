"""The folder that a launcher keeps for its ranks in the host's memory: what it is called, and whether it is ours."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from rankwise.base import environ

#: Names another place; by default it is the launcher's.
VARIABLE = "RANKWISE_MEMORY"
_ROOT, _MOST_ANCESTORS = Path("/dev/shm"), 16
_NUMBERS = Path("/proc/self/ns/pid")


def name_memory_folder(pid: int | None = None) -> str:
    """Return how its name begins.

    Containers may share the memory (``--ipc=host``) and have the same users and process numbers; where the numbers
    count tells them apart.

    Args:
        pid: The launcher's; None: of all launchers of this user.
    """
    user = f"rankwise-memory-{os.getuid()}-"
    if pid is None:
        return user
    try:
        space = _NUMBERS.stat().st_ino
    except OSError:
        space = 0  # not Linux
    return f"{user}{space}-{pid}-"


def is_own_folder(path: Path) -> bool:
    """Tell whether a path is a folder that this user has made for itself alone: anybody may make one there, or a link."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def find_memory_folder(name: str) -> Path | None:
    """Return where this rank's host keeps something in its memory until the job ends; None where nobody would clean up after the job.

    Args:
        name: Of the folder below the launcher's, or below that which RANKWISE_MEMORY names.
    """
    value = environ.get(VARIABLE)
    root = Path(value) if value else _find_launchers()
    return root / name if root is not None and root.is_dir() else None


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
