"""Trees of processes: who descends from whom, read from /proc, and ending them all."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

from rankwise.evidence.reader.process_table import DEAD, list_below, list_processes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from rankwise.base.clock import Clock


def list_descendants(root: int) -> list[int]:
    """Return the living descendants of ``root``, parents before children; nothing where /proc is missing."""
    living = {pid: stat.parent for pid, stat in list_processes().items() if stat.state not in DEAD}
    return list_below(root, living)


def end_descendants(
    keep: Collection[int],
    grace_s: float,
    clock: Clock,
    *,
    timeout_s: float = 10.0,
    hurry: Callable[[], bool] = lambda: False,
    session: int = 0,
) -> int:
    """End every descendant of this process: SIGTERM, ``grace_s`` seconds, SIGKILL, until none is left.

    This process must adopt orphans, else those escape it.

    Args:
        keep: Pids that stay, and with them nothing of what they started.
        grace_s: Seconds between SIGTERM and SIGKILL; 0 kills at once.
        clock: Where the time comes from.
        timeout_s: When to give up on processes that even SIGKILL does not end (disk sleep).
        hurry: Asked again and again; once it says yes, no more grace is given.
        session: Only those of this session; 0: all.

    Returns:
        How many there were.
    """
    seen: set[int] = set()
    start = clock.monotonic()
    while True:
        found = list_descendants(os.getpid())
        left = [
            pid for pid in found if pid not in keep and _is_ours(pid) and (not session or _find_session(pid) == session)
        ]
        passed = clock.monotonic() - start
        if passed > grace_s + timeout_s:
            return len(seen)
        # While /proc was read, a process may have started another, which was not listed yet, and be gone itself.
        if not left and (found or keep or session or _is_alone()):
            return len(seen)
        if passed < grace_s and hurry():
            grace_s = passed
        for pid in left:
            if passed >= grace_s:
                _send(pid, signal.SIGKILL)
            elif pid not in seen:
                _send(pid, signal.SIGTERM)
                _send(pid, signal.SIGCONT)  # a stopped process can't hear SIGTERM
        seen.update(left)
        _reap(left)
        clock.sleep(0.005 if passed >= grace_s else 0.02)


def _find_session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def _is_ours(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return False
    except ProcessLookupError:
        return True
    return True


def _send(pid: int, number: int) -> None:
    # Gone, or another user's by now (sudo): there is nothing that we may do about it.
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _is_alone() -> bool:
    """Whether no child lives, by the kernel's word; those that have ended are taken in."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def _reap(pids: Collection[int]) -> None:
    for pid in pids:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            continue
