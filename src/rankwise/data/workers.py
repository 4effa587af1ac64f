"""Keep a loader's workers alive when a scheduler's signal goes to all processes of a job: the training process decides when they end.

Slurm and others tell of a preemption by a signal to every process of a job step. torch's workers die of SIGTERM, and take the
training process with them ("DataLoader worker exited unexpectedly") while it still wants to save. Here:

- A worker is started with these signals blocked, so that it and all its threads are safe from its first instruction on. A fork
  server that is started for it blocks them for good (data/fork_server.py); one that somebody has started before does not.
- Once it runs, a handler takes the place of the block: a program that the worker starts would inherit a blocked signal.
- Python tells no handler who has sent a signal. So the parent notes in shared memory whom it ends, before it does.
- A worker ends with its parent, by a thread that waits for it.
- A worker that is stuck in native code hears nothing: when the parent ends, it gives its workers some seconds, then SIGKILL.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from multiprocessing import process as base_process, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, final

from rankwise.base.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

_LOGGER = get_logger(__name__)

#: The signals that end no worker unless its parent sends them.
HELD = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name))
_CAN_HOLD = hasattr(signal, "pthread_sigmask") and hasattr(os, "fork")
#: Seconds for all workers of a process together, when it ends.
_LEAVE_S = 5.0
_SERVER_MODULE = "rankwise.data.fork_server"


def start_worker(then: Callable[[int], Any] | None, ended: Any, worker_id: int) -> None:
    """Listen to the parent, then call the user's function: what a worker calls first.

    Args:
        then: The user's ``worker_init_fn``; called last, so that it may choose otherwise about signals.
        ended: Pids of workers that their parent ends, in shared memory, and at its end how many were written; None: the
            parent can't say anything.
        worker_id: The worker's number.
    """
    if _CAN_HOLD:
        listen_to_parent(ended)
    if then is not None:
        then(worker_id)


def make_workers(then: Callable[[int], Any] | None, way: Any, num_workers: int) -> tuple[Any, Callable[[int], None]]:
    """Return how the workers of a loader are started, and what they call first.

    Args:
        then: The user's ``worker_init_fn``.
        way: torch's ``multiprocessing_context``.
        num_workers: How many there are at a time.

    Returns:
        Arguments for torch's ``multiprocessing_context`` and ``worker_init_fn``.

    Raises:
        ValueError: There is no such context.
    """
    context: Any = multiprocessing.get_context(way) if way is None or isinstance(way, str) else way
    kind = _KINDS.get(getattr(context, "_name", None)) if _CAN_HOLD else None
    if kind is None:
        return context, partial(start_worker, then, None)
    # Workers of a pass before may still be leaving.
    ended = context.RawArray("q", max(64, 4 * num_workers) + 1)
    ours = copy.copy(context)
    ours.Process = partial(kind, ended)
    return ours, partial(start_worker, then, ended)


# ------------------------------------------------------------------------------- in the parent


class _Worker(base_process.BaseProcess):
    """A process that is started with the signals blocked, and told before it is ended.

    Args:
        ended: As for ``start_worker``.
        **options: As for a process.
    """

    def __init__(self, ended: Any, **options: Any) -> None:
        super().__init__(**options)
        self.ended = ended
        self._way: str | None = getattr(self, "_start_method", None)

    def start(self) -> None:
        """Start it."""
        if self._way != "fork":
            # Else it would be started now, and unblock what we block.
            resource_tracker.ensure_running()
        if self._way == "forkserver":
            _prepare_server()
        with _blocked():
            super().start()
        if not _at_exit or not _at_exit[-1].still_active():
            # Of priority 0 and more: before multiprocessing sends SIGTERM and joins without a bound.
            _at_exit[:] = [Finalize(None, _end_all, exitpriority=100)]

    def terminate(self) -> None:
        """End it by SIGTERM."""
        if self.pid is not None and self.pid not in self.ended[:-1]:  # it must believe it
            self.ended[self.ended[-1] % (len(self.ended) - 1)] = self.pid
            self.ended[-1] += 1
        super().terminate()


def is_worker(process: object) -> bool:
    """Tell whether a process is one that unblocks its signals by itself."""
    return isinstance(process, _Worker)


_at_exit: list[Any] = []
_KINDS: dict[Any, type[_Worker]] = {}

if _CAN_HOLD:
    from multiprocessing.context import ForkProcess, ForkServerProcess, SpawnProcess

    @final
    class ForkedWorker(_Worker, ForkProcess):
        """By fork."""

    @final
    class SpawnedWorker(_Worker, SpawnProcess):
        """By spawn."""

    @final
    class ServedWorker(_Worker, ForkServerProcess):
        """By a fork server."""

    _KINDS.update(fork=ForkedWorker, spawn=SpawnedWorker, forkserver=ServedWorker)


@contextmanager
def _blocked() -> Iterator[None]:
    """Block the signals in this thread, so that a process that it starts has them blocked; here they come a little later."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _prepare_server() -> None:
    """Start a fork server that blocks the signals, if there is none yet.

    It blocks them itself, as only then it is sure to unblock them for processes that aren't ours. Since Python 3.14 it
    is sure to find our module, as it gets our ``sys.path``; and it imports the script first, which may start threads
    (NumPy does). So there it has the signals blocked from its first instruction on.
    """
    from multiprocessing import forkserver  # noqa: PLC0415 - not there on Windows

    names = list(getattr(forkserver._forkserver, "_preload_modules", []))
    if _SERVER_MODULE not in names:
        forkserver.set_forkserver_preload([_SERVER_MODULE, *names])
    with _blocked() if sys.version_info >= (3, 14) else nullcontext():
        forkserver.ensure_running()


def _end_all() -> None:
    """End all workers of this process: by SIGTERM, and those that don't hear it by SIGKILL."""
    workers = [one for one in multiprocessing.active_children() if isinstance(one, _Worker)]
    if not workers:
        return
    if threading.current_thread() is threading.main_thread():
        # torch's handler would take the end of a worker for an accident, and raise amid this.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in workers:
        with suppress(OSError):
            worker.terminate()
    until = time.monotonic() + _LEAVE_S
    for worker in workers:
        worker.join(max(0.0, until - time.monotonic()))
    stuck = [worker for worker in workers if worker.is_alive()]
    for worker in stuck:
        _LOGGER.warning(f"data-loading worker {worker.pid} did not end within {_LEAVE_S:g} s, and is killed")
        worker.kill()
        worker.join()


# ------------------------------------------------------------------------------- in the worker


def listen_to_parent(ended: Any) -> None:
    """Let the signals end this process only if its parent has said so; and let it end with its parent.

    Call it from the main thread of a worker. SIGINT stays as it is.
    """
    parent = multiprocessing.parent_process()
    if parent is None or ended is None:
        return
    pid = os.getpid()

    def hear(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != pid:
            # A child that the worker has just forked.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif pid in ended[:-1]:
            os._exit(0)  # as torch's own handler does

    for number in HELD:
        signal.signal(number, hear)
    os.register_at_fork(after_in_child=_forget)
    woken, wakes = os.pipe()
    for end in (woken, wakes):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    threading.Thread(target=_follow, args=(parent.sentinel, woken, ended), daemon=True, name="parent").start()
    # What came until now is heard now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)


def _forget() -> None:
    """In a child that the worker has forked: it ends as it would without us."""
    for number in HELD:
        signal.signal(number, signal.SIG_DFL)


def _follow(sentinel: int, woken: int, ended: Any) -> None:
    """End with the parent, or when it has said so.

    torch would see the parent's end after some seconds, and only between two batches, and never with a fork server. A
    handler runs in the main thread only, which may be in native code; this thread needs no more than the GIL.
    """
    while sentinel not in wait([sentinel, woken]) and os.getpid() not in ended[:-1]:
        with suppress(BlockingIOError):
            os.read(woken, 512)
    os._exit(0)
