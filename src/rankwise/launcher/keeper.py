"""The keeper: a small process between the parent and the ranks, so that no orphan outlives either.

It starts what it is told to, adopts every orphan below it, tells who has ended, and ends all of them the
moment the parent is gone. Orders come as datagrams on a socket, with descriptors beside them. It is forked
from the parent before that has any thread, and never imports anything later.
"""

from __future__ import annotations

import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.osdoor import adopt_orphans, die_with_parent
from rankwise.evidence.notes import read_all
from rankwise.launcher.processes import end_descendants, list_descendants

if TYPE_CHECKING:
    from types import FrameType

#: Larger than any order; the environment travels only as what differs from ours.
DATAGRAM_BYTES = 1 << 20
_DEAF_TO = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


@dataclass(slots=True, kw_only=True)
class Order:
    """One order, with the descriptors that came with it."""

    op: str
    tag: str = ""
    argv: list[str] = field(default_factory=list)
    env: dict[str, str | None] = field(default_factory=dict)
    # Descriptors: the first three become the standard streams, each of the others keeps the number given here.
    fds: list[int] = field(default_factory=list)
    number: int = 0
    tree: bool = False
    grace_s: float = 0.0
    # Started deaf to the signals that end jobs: only we decide when it goes.
    deaf: bool = False
    # The order proper is in a memory file, as the last descriptor: too long for a datagram.
    payload: bool = False


@final
class Keeper:
    """The keeper's state: who was started, and under which tag."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._tags: dict[int, str] = {}
        self._dispositions = {name: signal.getsignal(getattr(signal, name)) for name in _DEAF_TO}

    def run(self) -> None:
        """Serve until the parent is gone, then end everything below."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        os.set_blocking(wake_read, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _wake)
        with selectors.DefaultSelector() as selector:
            selector.register(self._sock, selectors.EVENT_READ)
            selector.register(wake_read, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fd == wake_read:
                        _drain(wake_read)
                    elif not self._serve_one():
                        end_descendants((), 0, SYSTEM_CLOCK)
                        return
                self._reap()

    def _serve_one(self) -> bool:
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, DATAGRAM_BYTES, 16)
        except ConnectionError:
            return False
        if not data:
            return False
        order = Order(**json.loads(data))
        if order.payload:
            order = Order(**json.loads(read_all(fds[-1])))
            os.close(fds.pop())
        try:
            if order.op == "start":
                self._start(order, fds)
            elif order.op == "signal":
                self._signal(order)
            elif order.op == "sweep":
                keep = [pid for pid, tag in self._tags.items() if tag]
                self._say(
                    {"swept": end_descendants(keep, order.grace_s, SYSTEM_CLOCK, hurry=self._is_called)}
                )
            elif order.op == "leave":
                # A job that is through: what the script left running on purpose goes to init.
                self._say({"left": len(list_descendants(os.getpid())) - len(self._tags)})
                for pid in self._tags:
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
                os._exit(0)
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _start(self, order: Order, fds: list[int]) -> None:
        env = dict(os.environ)  # noqa: TID251 - the parent's own, as it was at the fork
        for name, value in order.env.items():
            if value is None:
                env.pop(name, None)
            else:
                env[name] = value
        me = os.getpid()

        def become_rank() -> None:
            for name, handler in self._dispositions.items():
                signal.signal(getattr(signal, name), signal.SIG_IGN if order.deaf else handler)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with_parent()
            if os.getppid() != me:
                os._exit(1)  # the keeper died in between: nobody would ever end us

        moved = []
        try:
            for wanted, fd in zip(order.fds, fds[3:], strict=True):
                moved.append(os.dup2(fd, wanted, inheritable=False))
            process = subprocess.Popen(
                order.argv, env=env, stdin=fds[0], stdout=fds[1], stderr=fds[2],
                start_new_session=True, close_fds=True, pass_fds=order.fds, preexec_fn=become_rank,  # noqa: PLW1509 - one thread
            )  # fmt: skip
        except OSError as error:
            self._say({"failed": order.tag, "error": f"{error.strerror}: {error.filename or order.argv[0]}"})
            return
        finally:
            for fd in moved:
                os.close(fd)
        self._tags[process.pid] = order.tag
        process.returncode = 0  # reaped below, together with adopted orphans; Popen must not try
        self._say({"started": order.tag, "pid": process.pid})

    def _signal(self, order: Order) -> None:
        for pid, tag in self._tags.items():
            if tag != order.tag:
                continue
            try:
                if order.tree:
                    os.killpg(pid, order.number)
                else:
                    os.kill(pid, order.number)
            except (ProcessLookupError, PermissionError):
                continue

    def _is_called(self) -> bool:
        """Whether the parent is gone or has another order: then what is being done must end at once."""
        return bool(select.select([self._sock], [], [], 0)[0])

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            tag = self._tags.pop(pid, None)
            if tag is not None:
                self._say({"ended": tag, "pid": pid, "status": status, "at": SYSTEM_CLOCK.monotonic()})

    def _say(self, message: dict[str, object]) -> None:
        with suppress(OSError):  # the parent is gone: the next look at the socket ends all
            self._sock.send(json.dumps(message).encode())


def _wake(_number: int, _frame: FrameType | None) -> None:
    """Let the wake-up descriptor tell that a child has ended."""


def _drain(fd: int) -> None:
    with suppress(BlockingIOError):
        while os.read(fd, 4096):
            pass


def _alone_with(sock: socket.socket) -> socket.socket:
    """Close all that was inherited but the standard streams and the socket, which gets a low number.

    So no descriptor of ours stands where a rank's are to be put.
    """
    fd = sock.detach()
    if fd != 3:
        os.dup2(fd, 3, inheritable=False)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    return socket.socket(fileno=3)


def fork_keeper() -> tuple[int, socket.socket]:
    """Fork the keeper off this process, which must have one thread only.

    Returns:
        Its pid and our end of the socket.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, DATAGRAM_BYTES)
    # Taken by the parent first, so that nothing is lost between the fork and the keeper's own handlers.
    deaf = {getattr(signal, name) for name in _DEAF_TO}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, deaf)
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
        return pid, ours
    try:
        keeper = Keeper(_alone_with(theirs))
        if hasattr(signal, "SIGWINCH"):
            signal.signal(signal.SIGWINCH, signal.SIG_DFL)
        for number in deaf:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.setpgid(0, 0)  # out of the terminal's group: Ctrl-C is the parent's business
        adopt_orphans()
        keeper.run()
    except BaseException:  # noqa: BLE001 - a forked copy of the parent must never return into its code
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)
