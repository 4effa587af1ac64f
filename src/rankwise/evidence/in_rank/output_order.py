"""Keeps what a rank prints in order, where its standard output and standard error lead to the same terminal, pipe or file.

Standard error goes through the launcher, standard output does not, so it would overtake: a bar of tqdm is wiped away, a line
is printed in its place, and the bar is drawn again below, on two streams. Before Python writes to standard output, it waits
here until the launcher has passed on what was written to standard error before. It stands alone, as ``rank_exit.py`` does.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

#: The launcher answers within a fraction of a millisecond; one that is stopped must not stop the rank.
_PATIENCE_S = 0.5
_LOOK_EVERY_S = 0.0001
#: What is printed while the interpreter goes down finds the modules empty: these are held here.
_pread: Any = getattr(os, "pread", None)  # Windows has none, nor what the launcher tells by it
_write, _fstat, _getpid, _sleep, _now = (
    os.write,
    os.fstat,
    os.getpid,
    time.sleep,
    time.monotonic,
)


def install(places: dict[str, Any], mark: bytes, stderr: tuple[int, int]) -> None:
    """Order the writes of this process to its standard streams from now on.

    Args:
        places: Where the launcher tells how many marks it has passed: descriptor ``file`` at ``passed_at``.
        mark: What it takes out of standard error again, and counts.
        stderr: Device and inode of the standard error that it reads: the script may put another one there.
    """
    out, err = (_find_raw(stream) for stream in (sys.stdout, sys.stderr))
    if out is None or err is None:
        return
    order = _Order(places["file"], places["passed_at"], mark, stderr)
    write_out, write_err = out.write, err.write

    def write_behind(data: Any) -> Any:
        order.wait()
        return write_out(data)

    def write_before(data: Any) -> Any:
        order.is_due = True
        return write_err(data)

    out.write, err.write = write_behind, write_before


def _find_raw(stream: Any) -> Any:
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)


class _Order:
    """Whether something is on its way through the launcher, and how it is waited for."""

    def __init__(self, fd: int, at: int, mark: bytes, stderr: tuple[int, int]) -> None:
        self._fd, self._at, self._mark, self._stderr = fd, at, mark, stderr
        self._pid, self.is_due, self._is_late = _getpid(), False, False
        self._num_marks = self._count_passed()

    def wait(self) -> None:
        """Return when the launcher has passed on what was written to standard error so far."""
        if not self.is_due or _getpid() != self._pid:
            return  # a forked child writes as it did
        self.is_due = False
        try:
            # A launcher that is stopped, or far behind, costs the rank one wait, and not one for each line.
            if self._is_late and self._count_passed() < self._num_marks:
                return
            status = _fstat(2)
            if (status.st_dev, status.st_ino) != self._stderr:
                return
            self._num_marks += 1
            _write(2, self._mark)
            end = _now() + _PATIENCE_S
            while self._count_passed() < self._num_marks and _now() < end:
                _sleep(_LOOK_EVERY_S)
            self._is_late = self._count_passed() < self._num_marks
        except OSError:
            return  # the script has closed what is not its own

    def _count_passed(self) -> int:
        return int.from_bytes(_pread(self._fd, 8, self._at), "little")
