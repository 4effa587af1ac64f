"""Huge pages for the processes that tests fork from: with one entry in place of 512, a fork and the end of what was forked take a quarter of the time.

Most of what a fork of a Python with torch costs is the copy of its page tables (60,000 entries), and to drop them again at its
end. The kernel gathers the memory of a process in huge pages on demand (MADV_COLLAPSE, Linux 6.1), for another process, too;
where it may not or can't, forks are slower and all else is the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import sys
from pathlib import Path

_SYS_PROCESS_MADVISE, _MADV_COLLAPSE = 440, 25
_HUGE_BYTES = 2 << 20
_gathered: set[int] = set()


def gather_residents(folder: Path) -> None:
    """Gather the memory of the resident servers in a folder, of each of them once for all workers of the tests."""
    for path in folder.glob("*.sock"):
        pid = int(path.stem.rpartition("-")[2])
        if pid not in _gathered:
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                path.with_suffix(".gathered").touch(exist_ok=False)
                gather(pid)
            _gathered.add(pid)


def gather_forkserver() -> None:
    """Gather the memory of the process from which `rankwise.testing.run_ranks` forks, once it is there."""
    module = sys.modules.get("multiprocessing.forkserver")
    pid = getattr(getattr(module, "_forkserver", None), "_forkserver_pid", None)
    if pid is not None and pid not in _gathered:
        gather(pid)


def gather(pid: int) -> None:
    """Gather a process's own memory in huge pages, as far as there are any.

    Args:
        pid: A process that has imported what there is to import.
    """
    _gathered.add(pid)
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            for start, end in _list_memory(pid):
                vector = struct.pack("PN", start, end - start)
                ctypes.CDLL(None).syscall(_SYS_PROCESS_MADVISE, pidfd, vector, ctypes.c_size_t(1), _MADV_COLLAPSE, 0)
        finally:
            os.close(pidfd)


def _list_memory(pid: int) -> list[tuple[int, int]]:
    """Return where the memory lies that a process has of its own: its heap, and what it has mapped without a file."""
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        place, rights, _, _, inode, *name = line.split(None, 5)
        if rights == "rw-p" and inode == "0" and not "".join(name).startswith("[stack"):
            start, _, end = place.partition("-")
            found.append((int(start, 16), int(end, 16)))
    return found
