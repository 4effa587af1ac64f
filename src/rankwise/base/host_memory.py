"""The folder that a launcher keeps for its ranks in the host's memory: what it is called, and whether it is ours."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_NUMBERS = Path("/proc/self/ns/pid")


def name_memory_folder(pid: int | None = None) -> str:
    """Return how its name begins.

    Containers may share the memory (``--ipc=host``) and have the same users and process numbers; where the numbers count tells
    them apart.

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
