"""Copies in the memory of the host: written in a moment, and still there when all ranks of the host are gone.

``rankwise run`` makes a folder in the host's memory (tmpfs) for the job, outside of every rank, and removes it when the job
ends. Ranks that are started again after a failure find there what was saved last. On several hosts each has what its own
ranks have saved; a rank that is placed elsewhere gets the rest from those that have it.
"""

from __future__ import annotations

import hashlib
import shutil
from typing import TYPE_CHECKING

from rankwise.base.errors import CheckpointError
from rankwise.base.host_memory import find_memory_folder

if TYPE_CHECKING:
    from pathlib import Path


def find_memory(folder: Path) -> Path | None:
    """Return where this host keeps copies of a folder's checkpoints; None where nobody would clean up after the job."""
    return find_memory_folder(hashlib.blake2b(str(folder.resolve()).encode(), digest_size=8).hexdigest())


def check_space(folder: Path, size: int) -> None:
    """Make sure that a copy fits beside the one before it: a full tmpfs takes memory from everything else.

    Args:
        folder: Below the host's memory folder.
        size: Bytes of it.

    Raises:
        CheckpointError: It does not fit; says how much is free.
    """
    free = shutil.disk_usage(folder.parent).free
    if size > free:
        raise CheckpointError(
            f"a copy in memory needs {size / 1e9:.2f} GB, and {folder.parent} has {free / 1e9:.2f} GB free",
            hint="give the container a larger /dev/shm (docker run --shm-size), or save to disk only",
        )
