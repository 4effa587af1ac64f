"""Files checked in several processes, which end with their parent however that ends."""

from __future__ import annotations

import gc
import os
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rankwise.lint.running.one_file import Checker, Result

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

#: Objects that a worker makes before it looks for cycles among the young ones.
_MOST_YOUNG = 1_000_000
_checker: Checker | None = None


def check_chunks(
    chunks: Sequence[Sequence[str]], roots: tuple[Path, ...], jobs: int, failures: list[str]
) -> Iterator[Result]:
    """Check lists of files side by side.

    Args:
        chunks: Paths that are checked in one go.
        roots: Folders from which imports are tried.
        jobs: Processes.
        failures: Takes a line where a process died.
    """
    # Not every Python has them (a browser's, a small embedded one), and files can be checked without.
    import multiprocessing  # noqa: PLC0415
    from concurrent.futures import as_completed  # noqa: PLC0415
    from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor  # noqa: PLC0415

    # Not a fork server: a Python process has one, and what is imported there is not for us to choose.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(roots,))
    try:
        with _deaf_to_ctrl_c():
            tasks = {pool.submit(_check, tuple(chunk)): chunk for chunk in chunks}
        for task in as_completed(tasks):
            try:
                yield from task.result()
            except BrokenProcessPool:
                chunk = tasks[task]
                failures.append(f"{chunk[0]} and {len(chunk) - 1} more: the process that looked at them has died")
    finally:
        # After Ctrl-C: what has begun ends with its chunk, nothing else begins.
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Start workers with SIGINT blocked, as they inherit it: one that comes before ``_begin`` would be told by a traceback."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    from multiprocessing import resource_tracker  # noqa: PLC0415 - as above

    resource_tracker.ensure_running()  # first: it lets SIGINT through when it is through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(roots: tuple[Path, ...]) -> None:
    global _checker  # noqa: PLW0603 - a worker has one
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches us all; the parent alone decides
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked on the way here
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _checker = Checker(roots=roots)
    # What is there stays there, and trees of text are many objects with few cycles: to look through them costs a
    # quarter of the time.
    gc.freeze()
    gc.set_threshold(_MOST_YOUNG)


def _end_with_parent() -> None:
    import multiprocessing  # noqa: PLC0415 - as above
    from multiprocessing.connection import wait  # noqa: PLC0415

    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _check(paths: tuple[str, ...]) -> list[Result]:
    if _checker is None:
        raise RuntimeError("a worker was asked before it was set up")
    return [_checker.check(path) for path in paths]
