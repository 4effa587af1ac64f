"""Keep a loader's workers alive when a scheduler's signal goes to all processes of a job: the training process decides when they end.

Slurm and others tell of a preemption by a signal to every process of a job step. torch's workers die of SIGTERM, and take the
training process with them ("DataLoader worker exited unexpectedly") while it still wants to save. Here a worker blocks these
signals, and a thread of it takes them, with the number of the sender: only the parent is obeyed. Another thread ends the worker
with its parent. To ignore the signals would not do: multiprocessing ends its children by SIGTERM, and would wait for ever.

Two SIGTERM of which the first has not been taken yet become one, with the first one's sender. So the parent says in shared memory
that it leaves, before multiprocessing sends its own.

A program that a worker starts inherits the blocked signals; it ends when its pipes close, or by SIGKILL.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from collections.abc import Callable

_HELD = ("SIGTERM", "SIGUSR1", "SIGUSR2")


@final
@dataclass(frozen=True, slots=True)
class WorkerStart:
    """What a worker calls first.

    Attributes:
        then: The user's ``worker_init_fn``; called after it, so that it may choose otherwise about signals.
        leaving: A number in shared memory: not 0 as soon as the parent is about to end its children.
    """

    then: Callable[[int], Any] | None
    leaving: Any

    def __call__(self, worker_id: int) -> None:
        """Hold the signals, then call the user's function."""
        hold_signals(self.leaving)
        if self.then is not None:
            self.then(worker_id)


def make_start(owner: object, then: Callable[[int], Any] | None, way: Any) -> WorkerStart:
    """Return what the workers of a loader call first.

    Args:
        owner: Who has the workers; when it goes, they are to end.
        then: The user's ``worker_init_fn``.
        way: torch's ``multiprocessing_context``.
    """
    context = multiprocessing.get_context(way) if way is None or isinstance(way, str) else way
    leaving = context.RawValue("b", 0)
    # Finalizers of priority 0 and more run before multiprocessing sends SIGTERM and joins.
    Finalize(owner, _set, args=(leaving,), exitpriority=100)
    return WorkerStart(then, leaving)


def _set(leaving: Any) -> None:
    leaving.value = 1


def hold_signals(leaving: Any) -> None:
    """Let SIGTERM, SIGUSR1 and SIGUSR2 end this process only if its parent sends them; and let it end with its parent.

    Call it from the main thread of a child of multiprocessing, before it starts threads. SIGINT stays as it is. Where
    the system has no ``sigwaitinfo`` (macOS, Windows), nothing happens.

    Args:
        leaving: As for ``WorkerStart``.
    """
    parent = multiprocessing.parent_process()
    if parent is None or not hasattr(signal, "sigwaitinfo"):
        return
    held = {getattr(signal, name) for name in _HELD}
    signal.pthread_sigmask(signal.SIG_BLOCK, held)
    # With a fork server, the process that forked us is not the one that started us; either may end us.
    parents = {parent.pid, os.getppid()}
    threading.Thread(target=_obey, args=(held, parents, leaving), daemon=True, name="signals").start()
    threading.Thread(target=_follow, args=(parent.sentinel,), daemon=True, name="parent").start()


def _obey(held: set[signal.Signals], parents: set[int], leaving: Any) -> None:
    while signal.sigwaitinfo(held).si_pid not in parents and not leaving.value:
        pass
    os._exit(0)  # as torch's own handler does


def _follow(sentinel: int) -> None:
    """End with the parent: torch would see it after some seconds, and only between two batches, and never with a fork server."""
    wait([sentinel])
    os._exit(0)
