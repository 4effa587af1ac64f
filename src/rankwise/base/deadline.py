"""Bound a call that has no bound of its own."""

from __future__ import annotations

import os
import platform
import queue
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_GLANCE_S = 1.0
Result = TypeVar("Result")
_STARTS_NONE_AT_EXIT = platform.python_version().startswith("3.12.")
#: What is to run in a thread that waits for it, by process.
_waiting: dict[int, queue.SimpleQueue[Callable[[], None]]] = {}


class OverdueError(Exception):
    """A call did not return in time; it goes on in a thread of its own that nobody waits for."""


def call_within(
    timeout_s: float, function: Callable[[], Result], *, find_reason: Callable[[], str] | None = None
) -> Result:
    """Call a function that may block for ever in C++, and come back in time.

    The timeouts of torch's TCPStore do not protect against a server that is stopped, nor do Gloo's while it connects
    its peers (torch 2.13). Such a call can't be ended from outside; but the thread that it blocks need not be ours.

    Args:
        timeout_s: Seconds to wait.
        function: What to call; runs in a daemon thread.
        find_reason: Asked once a second; a text means that waiting on makes no sense.

    Returns:
        What it returns.

    Raises:
        OverdueError: It has not returned; whatever it raises later is lost.
        Exception: What it raised.
    """
    outcome: list[Result] = []
    failure: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            outcome.append(function())
        except BaseException as error:  # noqa: BLE001 - raised again, in the caller's thread
            failure.append(error)
        finally:
            done.set()

    _start(run)
    left_s = timeout_s
    while not done.wait(min(left_s, _GLANCE_S) if find_reason else left_s):
        left_s -= _GLANCE_S if find_reason else left_s
        reason = find_reason() if find_reason else ""
        if reason or left_s <= 0:
            raise OverdueError(reason or f"no return within {round(timeout_s, 1):g} s")
    if failure:
        raise failure[0]
    return outcome[0]


def prepare_exit() -> None:
    """Keep two threads for calls at the exit of this process, the second for those after one that blocks: Python 3.12 starts none there."""
    if not _STARTS_NONE_AT_EXIT or os.getpid() in _waiting:
        return
    calls = _waiting[os.getpid()] = queue.SimpleQueue()

    def run_all() -> None:
        while True:
            calls.get()()

    for _ in range(2):
        threading.Thread(target=run_all, name="rankwise-exit", daemon=True).start()


def _start(run: Callable[[], None]) -> None:
    try:
        threading.Thread(target=run, name="rankwise-deadline", daemon=True).start()
    except RuntimeError:
        if (calls := _waiting.get(os.getpid())) is None:
            raise
        calls.put(run)
