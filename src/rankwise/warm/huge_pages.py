"""Huge pages for a process that is forked again and again: with one entry in place of 512, a fork and the end of what was forked take a quarter of the time.

Most of what a fork of a Python with torch costs is the copy of its page tables (60,000 entries), and to drop them again at its
end. The kernel gathers the memory of a process in huge pages on demand (MADV_COLLAPSE, Linux 6.1, see madvise(2)); where it
may not or can't, forks are slower and all else is the same. What a fork writes to is copied by 4 KiB as before.

It stands alone, as ``server.py`` does, and is loaded by path.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_SYS_PROCESS_MADVISE, _MADV_COLLAPSE = 440, 25
_HUGE_BYTES = 2 << 20
#: Gathered at once: it takes 0.02 s, where all of a Python with torch takes 0.3 s.
_STEP_BYTES = 8 * _HUGE_BYTES


def gather(pid: int, *, stop: Callable[[], bool] = lambda: False) -> bool:
    """Gather what memory a process has of its own in huge pages: its heap, and what it has mapped without a file.

    Args:
        pid: A process that has imported what there is to import, and shares none of that with a fork at the moment: what is
            shared would be copied.
        stop: Asked between steps whether there is something better to do. What is gathered already costs next to
            nothing the next time.

    Returns:
        Whether it came to the end.
    """
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            for start, end in _list_own(pid):
                first = -(-start // _HUGE_BYTES) * _HUGE_BYTES  # a step that cuts a huge page in two would leave it out
                for at in range(first, end, _STEP_BYTES):
                    if stop():
                        return False
                    vector = struct.pack("PN", at, min(_STEP_BYTES, end - at))
                    ctypes.CDLL(None).syscall(
                        _SYS_PROCESS_MADVISE, pidfd, vector, ctypes.c_size_t(1), _MADV_COLLAPSE, 0
                    )
        finally:
            os.close(pidfd)
    return True


def _list_own(pid: int) -> list[tuple[int, int]]:
    found = []
    with open(f"/proc/{pid}/maps") as file:
        for line in file:
            place, rights, _, _, inode, *name = line.split(None, 5)
            if rights == "rw-p" and inode == "0" and not "".join(name).startswith("[stack"):
                start, _, end = place.partition("-")
                found.append((int(start, 16), int(end, 16)))
    return found
