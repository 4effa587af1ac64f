"""The supervisor: a small process between the parent and the ranks, so that no orphan outlives either.

It starts what it is told to, adopts every orphan below it, tells who has ended, and ends all of them the
moment the parent is gone. Requests come as datagrams on a socket, with descriptors beside them. It is forked
from the parent before that has any thread, and never imports anything later.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Literal, final

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.files import read_all
from rankwise.base.os_calls import (
    ASK_FD,
    EVIDENCE_FD,
    NOTES_FD,
    SERVER_FD,
    STACKS_FD,
    adopt_orphans,
    close_from,
    die_with_parent,
    raise_file_limit,
    set_file_limit,
    wait_ready,
)
from rankwise.launcher.processes import end_descendants, list_descendants
from rankwise.launcher.rank_command import hook_path_env
from rankwise.launcher.supervisor_protocol import DATAGRAM_BYTES, Request, make_supervisor_socket
from rankwise.launcher.warm_link import Message, Waiting, WarmLink
from rankwise.launcher.workers import Change, Cooled, Ended, NotStarted, Started, Warmed
from rankwise.verdict.exit_codes import name_signal

if TYPE_CHECKING:
    from types import FrameType

#: How often a server that says nothing is looked at.
_LOOK_EVERY_S = 5.0
_LOOK_AT_KILLED_EVERY_S = 0.5
_DEAF_TO = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
# A process that is still waiting for the server need not begin after one of these.
_ENDING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGKILL")


@final
class Supervisor:
    """The supervisor's state: who was started, and under which tag.

    Args:
        sock: To the parent.
        can_adopt: Whether orphans below it become its children.
        dispositions: What signals do in what it starts; without it, what they do here.
    """

    def __init__(
        self, sock: socket.socket, *, can_adopt: bool, dispositions: dict[str, signal._HANDLER] | None = None
    ) -> None:
        self._sock, self._can_adopt = sock, can_adopt
        self._tags: dict[int, str] = {}
        self._dispositions = dispositions or {name: signal.getsignal(getattr(signal, name)) for name in _DEAF_TO}
        self._ending = {int(getattr(signal, name)) for name in _ENDING}
        self._link: WarmLink | None = None
        self._server_status: int | None = None
        # What has ended before the server's message said which process it was.
        self._unclaimed: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        # Requests that wait for the warm server hold descriptors; the ranks keep the limit that the user gave them.
        self._file_limit = raise_file_limit()
        # What a rank finds under these numbers passes through here: nothing of ours may ever stand there.
        self._nowhere = os.open(os.devnull, os.O_RDWR)
        for number in (NOTES_FD, STACKS_FD, SERVER_FD, EVIDENCE_FD, ASK_FD):
            os.dup2(self._nowhere, number, inheritable=False)

    def adopt_server(self, pid: int, sock: socket.socket) -> None:
        """Fork ranks from a warm server that is there already."""
        self._server_status = None
        # The hook has been taken out of its environment, as it has been out of that of a server started here.
        self._link = WarmLink(pid, sock, hook_path_env(), SYSTEM_CLOCK.monotonic())
        self._selector.register(self._link, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the parent is gone, then end everything below."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        os.set_blocking(wake_read, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _wake)
        with self._selector as selector:
            selector.register(self._sock, selectors.EVENT_READ)
            selector.register(wake_read, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(self._choose_wait()):
                    if key.fd == wake_read:
                        _drain(wake_read)
                    elif key.fd == self._sock.fileno() and not self._serve_one():
                        end_descendants((), 0, SYSTEM_CLOCK)
                        return
                # Before the dead are counted: a forked process must be known by the time it ends.
                self._hear_server()
                self._reap()

    def _choose_wait(self) -> float | None:
        if self._link is None:
            return None
        return _LOOK_AT_KILLED_EVERY_S if self._link.waits_for_killed else _LOOK_EVERY_S

    def _serve_one(self) -> bool:
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, DATAGRAM_BYTES, 16)
        except ConnectionError:
            return False
        if not data:
            return False
        request = Request(**json.loads(data))
        if request.payload:
            request = Request(**json.loads(read_all(fds[-1])))
            os.close(fds.pop())
        try:
            if request.op == "start" and request.forks and self._link is not None:
                self._link.fork(request, fds)
                fds = []
            elif request.op == "start":
                self._start(request, fds)
            elif request.op == "warm":
                self._warm_up(request, fds)
            else:
                self._obey(request)
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _obey(self, request: Request) -> None:
        if request.op == "retire":
            self._end_link()
        elif request.op == "signal":
            self._signal(request)
        elif request.op == "sweep":
            keep = [*self._tags, *self._list_server()]
            self._say(
                {
                    "swept": end_descendants(
                        keep, request.grace_s, SYSTEM_CLOCK, hurry=self._is_called, session=request.number
                    )
                }
            )
        elif request.op == "leave":
            # A job that is through: what the script left running on purpose goes to init.
            ours = {*self._tags, *self._list_server()}
            self._say({"left": len(set(list_descendants(os.getpid())) - ours)})
            for pid in ours:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            os._exit(0)

    def _start(self, request: Request, fds: list[int]) -> int | None:
        """Start a process and tell its pid; None if that could not be done."""
        try:
            pid = self._spawn(request, fds)
        except OSError as error:
            self._tell(NotStarted(tag=request.tag, error=f"{error.strerror}: {error.filename or request.argv[0]}"))
            return None
        self._tags[pid] = request.tag
        self._tell(Started(tag=request.tag, pid=pid))
        return pid

    def _spawn(self, request: Request, fds: list[int]) -> int:
        env = dict(os.environ)  # noqa: TID251 - the parent's own, as it was at the fork
        for name, value in request.env.items():
            if value is None:
                env.pop(name, None)
            else:
                env[name] = value
        me = os.getpid()

        def become_rank() -> None:
            for name, handler in self._dispositions.items():
                signal.signal(getattr(signal, name), signal.SIG_IGN if request.deaf else handler)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            set_file_limit(self._file_limit)
            die_with_parent()
            if os.getppid() != me:
                os._exit(1)  # the supervisor died in between: nobody would ever end us

        try:
            for wanted, fd in zip(request.fds, fds[3:], strict=True):
                os.dup2(fd, wanted, inheritable=False)
            process = subprocess.Popen(
                request.argv, env=env, stdin=fds[0], stdout=fds[1], stderr=fds[2],
                start_new_session=True, close_fds=True, pass_fds=request.fds, preexec_fn=become_rank,  # noqa: PLW1509 - one thread
            )  # fmt: skip
        finally:
            for wanted in request.fds:
                os.dup2(self._nowhere, wanted, inheritable=False)
        process.returncode = 0  # reaped below, together with adopted orphans; Popen must not try
        return process.pid

    # ------------------------------------------------------------ the warm server

    def _warm_up(self, request: Request, fds: list[int]) -> None:
        """Start the warm server; a request that it can't carry out is started cold."""
        if not self._can_adopt:
            self._tell(Cooled(reason="this system does not let us adopt forked ranks"))
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            pid = self._spawn(request, [*fds, theirs.fileno()])
        except OSError as error:
            ours.close()
            self._tell(Cooled(reason=f"{request.argv[0]} can't be started: {error.strerror}"))
            return
        finally:
            theirs.close()
        self._server_status = None
        self._link = WarmLink(pid, ours, request.env, SYSTEM_CLOCK.monotonic())
        self._selector.register(self._link, selectors.EVENT_READ)

    def _list_server(self) -> list[int]:
        """Return the server's pid and those of what its imports have started."""
        return [self._link.pid, *list_descendants(self._link.pid)] if self._link is not None else []

    def _hear_server(self) -> None:
        if self._link is None:
            return
        messages, is_there = self._link.read()
        refusal = ""
        for message, waiting in messages:
            if waiting is None:
                self._hear(message)
            elif "forked" in message:
                self._welcome(waiting, message["pid"])
            else:
                if not refusal:
                    self._tell(Cooled(reason=message["reason"]))
                refusal = message["reason"]
                self._start_waiting(waiting)
        if refusal:
            self._end_link()  # what stands in the way does not go away
        elif delay := self._link.find_delay(SYSTEM_CLOCK.monotonic()):
            self._end_link(delay)
        elif not is_there:
            self._lose_server(self._link)

    def _hear(self, message: Message) -> None:
        if "ready" in message:
            self._tell(Warmed(num_modules=message["num_modules"], seconds=message["seconds"]))
        elif "cold" in message:
            self._tell(Cooled(reason=message["cold"]))
        elif "warning" in message:
            self._tell(Cooled(reason=message["warning"], kind="warning"))

    def _lose_server(self, link: WarmLink) -> None:
        if not link.gave_up:
            end, was_killed = self._describe_end()
            kind: Literal["lost", "gone"] = "lost" if link.has_requests else "gone"
            self._tell(Cooled(reason=f"the warm server {end}", kind=kind if was_killed else "cold"))
        self._end_link()

    def _describe_end(self) -> tuple[str, bool]:
        """Tell how the server, which has closed its socket, came to its end, and whether a signal did it."""
        for _ in range(100):
            self._reap()
            if self._server_status is not None:
                code = os.waitstatus_to_exitcode(self._server_status)
                end = f"ended with exit code {code}" if code >= 0 else f"was killed by {name_signal(-code)}"
                return end, code < 0
            SYSTEM_CLOCK.sleep(0.01)
        return "closed its socket", False

    def _welcome(self, waiting: Waiting, pid: int) -> None:
        self._tags[pid] = waiting.request.tag
        self._tell(Started(tag=waiting.request.tag, pid=pid))
        for fd in waiting.fds:
            os.close(fd)
        if pid in self._unclaimed:
            self._tell_end(self._tags.pop(pid), os.waitstatus_to_exitcode(self._unclaimed.pop(pid)))
        for number in waiting.signals:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _start_waiting(self, waiting: Waiting) -> None:
        pid = self._start(waiting.request, waiting.fds)
        for fd in waiting.fds:
            os.close(fd)
        for number in waiting.signals if pid is not None else ():
            os.kill(pid or 0, number)

    def _end_link(self, reason: str = "") -> None:
        """End the server; what it has not forked is started cold."""
        link, self._link = self._link, None
        if link is None:
            return
        self._selector.unregister(link)
        left = link.close()
        with suppress(ProcessLookupError):
            os.kill(link.pid, signal.SIGKILL)
        if reason:
            self._tell(Cooled(reason=reason))
        for waiting in left:
            if int(signal.SIGKILL) in waiting.signals:
                self._tell_end(waiting.request.tag, -int(signal.SIGKILL))
                for fd in waiting.fds:
                    os.close(fd)
            else:
                self._start_waiting(waiting)

    def _signal(self, request: Request) -> None:
        if self._link is not None and request.number in self._ending and self._link.drop(request.tag):
            # It waited for the server, and now it need not begin: told as if it had died of the signal.
            self._tell_end(request.tag, -request.number)
            return
        if self._link is not None and self._link.signal(request.tag, request.number):
            return  # it gets the signal as soon as it is there; a server that never answers is ended by find_delay
        for pid, tag in self._tags.items():
            if tag != request.tag:
                continue
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, request.number)
            # A process that was forked a moment ago may not lead its group yet: so both.
            with suppress(ProcessLookupError, PermissionError):
                if request.tree:
                    os.killpg(pid, request.number)

    def _is_called(self) -> bool:
        """Whether the parent is gone or has another request: then what is being done must end at once."""
        return bool(wait_ready([self._sock.fileno()], 0))

    def _reap(self) -> None:
        is_asked = self._link is not None and self._link.has_requests
        if not is_asked:
            self._unclaimed.clear()
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if self._link is not None and pid == self._link.pid:
                self._server_status = status
            if pid in self._tags:
                self._tell_end(self._tags.pop(pid), os.waitstatus_to_exitcode(status))
            elif is_asked:
                self._unclaimed[pid] = status

    def _tell_end(self, tag: str, code: int) -> None:
        self._tell(Ended(tag=tag, code=code, at_s=SYSTEM_CLOCK.monotonic()))

    def _tell(self, change: Change) -> None:
        self._say({type(change).__name__: asdict(change)})

    def _say(self, message: dict[str, object]) -> None:
        with suppress(OSError):  # the parent is gone: the next look at the socket ends all
            self._sock.send(json.dumps(message).encode())


def _wake(_number: int, _frame: FrameType | None) -> None:
    """Let the wake-up descriptor tell that a child has ended."""


def _drain(fd: int) -> None:
    with suppress(BlockingIOError):
        while os.read(fd, 4096):
            pass


def _alone_with(*socks: socket.socket) -> list[socket.socket]:
    """Close all that was inherited but the standard streams and some sockets, which get low numbers.

    So no descriptor of ours stands where a rank's are to be put.
    """
    # PYTHONPERFSUPPORT has a file open that Python writes to without asking (3.12).
    if hasattr(sys, "deactivate_stack_trampoline"):
        sys.deactivate_stack_trampoline()
    wanted = range(3, 3 + len(socks))
    fds = [sock.detach() for sock in socks]
    for index in range(len(fds)):
        while fds[index] in wanted:
            fds[index] = os.dup(fds[index])  # the old number is taken over, or closed with the rest
    for number, fd in zip(wanted, fds, strict=True):
        os.dup2(fd, number, inheritable=False)
    close_from(wanted.stop)
    return [socket.socket(fileno=number) for number in wanted]


def fork_supervisor() -> tuple[int, socket.socket]:
    """Fork the supervisor off this process, which must have one thread only.

    Returns:
        Its pid and our end of the socket.
    """
    ours, theirs = make_supervisor_socket()
    # Taken by the parent first, so that nothing is lost between the fork and the supervisor's own handlers.
    deaf = {getattr(signal, name) for name in _DEAF_TO}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, deaf)
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
        return pid, ours
    try:
        (sock,) = _alone_with(theirs)
        supervisor = Supervisor(sock, can_adopt=adopt_orphans())
        if hasattr(signal, "SIGWINCH"):
            signal.signal(signal.SIGWINCH, signal.SIG_DFL)
        for number in deaf:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.setpgid(0, 0)  # out of the terminal's group: Ctrl-C is the parent's business
        supervisor.run()
    except BaseException:  # noqa: BLE001 - a forked copy of the parent must never return into its code
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


def keep(sock: socket.socket, server: tuple[int, socket.socket], ignored: frozenset[str]) -> None:
    """Be the supervisor of a run in a process that a resident server has forked, until the run is over.

    Args:
        sock: The supervisor's end of the socket to the launcher.
        server: The run's warm server, our child, and the socket to it.
        ignored: Signals that are ignored in what we start, as the launcher was started.
    """
    pid, link = server
    sock, link = _alone_with(sock, link)
    dispositions: dict[str, signal._HANDLER] = {
        name: signal.SIG_IGN if name in ignored else signal.SIG_DFL for name in _DEAF_TO
    }
    supervisor = Supervisor(sock, can_adopt=adopt_orphans(), dispositions=dispositions)
    supervisor.adopt_server(pid, link)
    supervisor.run()
