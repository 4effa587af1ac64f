"""One job at a time writes into a folder of checkpoints: a second one is told who is there."""

from __future__ import annotations

import json
import os
import socket
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from rankwise.base.errors import CheckpointError
from rankwise.base.os_calls import try_lock_file

if TYPE_CHECKING:
    from pathlib import Path

LOCK = ".writer"

#: Held until the process ends; the kernel lets go of them then, however it ends.
_held: dict[Path, int] = {}


def take(folder: Path) -> bool:
    """Hold a folder for this process until it ends; once held, only the time of its lock file is that of the last call.

    Args:
        folder: The folder, which must be there.

    Returns:
        Whether it is held; False on a file system that knows no locks.

    Raises:
        CheckpointError: Another job holds it; says which.
        OSError: The lock file can't be opened.
    """
    folder = folder.resolve()
    if folder in _held and os.fstat(_held[folder]).st_nlink:
        os.utime(_held[folder] if os.utime in os.supports_fd else folder / LOCK)
        return True
    let_go(folder)  # somebody has deleted the folder that we held, and made it anew
    path = folder / LOCK
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    with ExitStack() as unless_held:
        unless_held.callback(os.close, fd)
        got = try_lock_file(fd)
        if got:
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode(), 0)
            _held[folder] = fd
            unless_held.pop_all()
            return True
        other = os.pread(fd, 4096, 0).decode(errors="replace")
    if got is None:
        return False
    with suppress(ValueError, TypeError, KeyError):
        answer = json.loads(other)
        other = f"process {answer['pid']} on host {answer['host']}"
    raise CheckpointError(
        f"another job writes checkpoints into {folder}: {other}",
        hint="give each job a folder of its own, or end the other one first",
    )


def is_held_here(folder: Path) -> bool:
    """Tell whether the last one to hold a folder was a process of this host."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        return str(json.loads((folder / LOCK).read_text())["host"]) == socket.gethostname()
    return True


def let_go(folder: Path) -> None:
    """Stop holding a folder."""
    fd = _held.pop(folder.resolve(), None)
    if fd is not None:
        os.close(fd)


def _forget() -> None:
    # The lock is the parent's, and would live on with our copies of its files.
    for fd in _held.values():
        with suppress(OSError):
            os.close(fd)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
