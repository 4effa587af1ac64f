"""Keep a stop notice from ending the rank's children first: its data-loading workers, above all.

A scheduler often signals every process of a job. The rank takes the signal as a notice and works on for a step or two;
a worker that dies of it takes the rank with it ("DataLoader worker is killed by signal: Terminated"). So children that
are forked while the rank listens ignore the rank's notices. Python does not tell a handler who has sent a signal, and
``terminate()`` of multiprocessing must still work: the parent notes in shared memory whom it ends, before it does.

A handler of Python's does not run in a child that hangs in native code, and multiprocessing waits for its children without
a bound: so a shielded daemon that does not end in time is killed, when somebody waits for it.

A handler is used, and not ``SIG_IGN`` or a blocked signal: those two would be inherited by the programs that a worker starts.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import time
from functools import cache
from typing import TYPE_CHECKING, Any, final
from weakref import WeakKeyDictionary, WeakSet

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

#: Pids go round: two that are ended in one moment are no multiple of this apart.
_NUM_SLOTS = 1 << 13
_ENTRY = struct.Struct("qq")
#: A shielded daemon that was asked to end gets this long; torch gives its workers half as long before it tells them.
_LAST_GRACE_S = 10.0


@final
class ChildShield:
    """What children forked from now on do with the rank's notices: ignore them, unless the notice is meant for them.

    Args:
        numbers: The signals that are notices.
    """

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self._numbers, self._parent = numbers, 0
        #: When the last fork was.
        self.fork_ns = 0
        # Whom their parents have asked to end, and when, in memory that a rank shares with all that it forks.
        self._asked = mmap.mmap(-1, _NUM_SLOTS * _ENTRY.size)
        self._is_loader_worker = False

    def cover_child(self, *, is_loader_worker: bool = False) -> None:
        """In a child: listen as a child does.

        Args:
            is_loader_worker: Whether torch takes any end of it by a signal for an accident.
        """
        self._parent, self._is_loader_worker = os.getppid(), is_loader_worker
        for number in self._numbers:
            # Calls in the kernel must be cut short by it (no siginterrupt(False)): a child that is in a read() would
            # else hear of its end after that read.
            signal.signal(number, self._hear)

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        has_parent, pid = os.getppid() == self._parent, os.getpid()
        pid_asked, at_ns = _ENTRY.unpack_from(self._asked, pid % _NUM_SLOTS * _ENTRY.size)
        # An earlier process with this number may have been asked.
        if has_parent and not (pid_asked == pid and at_ns >= self.fork_ns):
            return
        if has_parent and self._is_loader_worker and number == signal.SIGTERM:
            # As torch's own handler does. By the signal, it would raise an error in the parent, which may be amid
            # multiprocessing's exit: the workers that come after this one would not be asked to end.
            os._exit(0)
        signal.signal(number, signal.SIG_DFL)
        os.kill(pid, number)

    def note_end_of(self, pid: int) -> None:
        """Before a child is asked to end: it must believe it."""
        _ENTRY.pack_into(self._asked, pid % _NUM_SLOTS * _ENTRY.size, pid, time.monotonic_ns())


_active: list[ChildShield] = []
_latest: list[ChildShield] = []


def open_shield(numbers: tuple[int, ...]) -> None:
    """Shield the children that this process forks from now on.

    Args:
        numbers: The signals that are notices to the rank, and nothing to its children.
    """
    if not hasattr(os, "register_at_fork"):
        return
    _hook()
    _active[:] = _latest[:] = [ChildShield(numbers)]


def close_shield() -> None:
    """Leave the children that are forked from now on alone; those that are there can still be ended."""
    _active.clear()


def _note_fork() -> None:
    for shield in _active:
        shield.fork_ns = time.monotonic_ns()


def _cover(*, is_loader_worker: bool = False) -> None:
    if _active:
        _active[-1].cover_child(is_loader_worker=is_loader_worker)


@cache
def _hook() -> None:
    # Runs in the child before whatever multiprocessing starts there.
    os.register_at_fork(before=_note_fork, after_in_child=_cover)
    _wrap_popen()
    _wrap_worker_signals()


#: Daemons that multiprocessing has forked while the shield was open; and when they were asked to end, in monotonic
#: seconds.
_daemons: WeakSet[Any] = WeakSet()
_asked_s: WeakKeyDictionary[Any, float] = WeakKeyDictionary()


def _wrap_popen() -> None:
    """Let multiprocessing's ``terminate()`` (and its exit, and the DataLoader's) note whom it ends, and ``join()`` kill who hangs."""
    from multiprocessing import popen_fork  # noqa: PLC0415 - not there on Windows

    kind: Any = popen_fork.Popen
    if not (hasattr(kind, "_launch") and hasattr(kind, "_send_signal")):
        return
    launch: Callable[[Any, Any], None] = kind._launch
    send: Callable[[Any, int], None] = kind._send_signal

    def launch_noted(popen: Any, process: Any) -> None:
        launch(popen, process)
        if _active and process.daemon:
            _daemons.add(popen)

    def send_noted(popen: Any, number: int) -> None:
        if _latest and number == signal.SIGTERM and popen.returncode is None:
            _latest[-1].note_end_of(popen.pid)
            if popen in _daemons:
                _asked_s.setdefault(popen, time.monotonic())
        send(popen, number)

    kind._launch, kind._send_signal = launch_noted, send_noted
    _wrap_wait(kind, send)


def _wrap_wait(kind: Any, send: Callable[[Any, int], None]) -> None:
    wait: Callable[[Any, float | None], int | None] = kind.wait

    def wait_or_kill(popen: Any, timeout: float | None = None) -> int | None:
        asked_s = _asked_s.get(popen)
        if asked_s is None or popen.returncode is not None:
            return wait(popen, timeout)
        left_s = max(0.0, asked_s + _LAST_GRACE_S - time.monotonic())
        if timeout is not None and timeout <= left_s:
            return wait(popen, timeout)
        if wait(popen, left_s) is None:
            send(popen, signal.SIGKILL)
        return wait(popen, None if timeout is None else timeout - left_s)

    kind.wait = wait_or_kill


def _wrap_worker_signals() -> None:
    """A DataLoader's worker puts a handler of torch's in our place, which lets it die of a notice: come back after it."""
    from torch.utils.data._utils import signal_handling  # noqa: PLC0415 - only where it is used

    install: Callable[[], None] | None = getattr(signal_handling, "_set_worker_signal_handlers", None)
    if install is None:
        return
    rank_pid = os.getpid()

    def install_below_ours() -> None:
        install()
        if os.getpid() != rank_pid:
            _cover(is_loader_worker=True)

    signal_handling._set_worker_signal_handlers = install_below_ours
