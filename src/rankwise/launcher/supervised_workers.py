"""Workers behind the supervisor: our side of its socket."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
from array import array
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, final

from rankwise.base.errors import LaunchError
from rankwise.base.os_calls import SERVER_FD, adopt_orphans, adopts_orphans, make_memory_file, wait_ready
from rankwise.launcher.processes import end_descendants
from rankwise.launcher.supervisor import fork_supervisor
from rankwise.launcher.supervisor_protocol import DATAGRAM_BYTES, Request
from rankwise.launcher.workers import (
    Change,
    Command,
    Cooled,
    Ended,
    NotStarted,
    Started,
    SupervisorLost,
    Warmed,
)

if TYPE_CHECKING:
    from rankwise.base.clock import Clock
    from rankwise.launcher.signals import Signals

_LONGEST_DATAGRAM = 60_000
#: A supervisor takes a request in well under a millisecond; a process is started in a few.
_REQUEST_S = 60.0
_FULL_LOOK_S = 0.01
#: What the supervisor tells of its own accord; all else answers a question.
_CHANGES: dict[str, type[Change]] = {one.__name__: one for one in (Started, NotStarted, Ended, Warmed, Cooled)}


@final
class SupervisedWorkers:
    """Starts processes through the supervisor, which is forked here: before this process has threads.

    Args:
        signals: Noted signals, which end every wait.
        clock: Where the time comes from.
        supervisor: Pid and socket of one that a resident server has forked for us; None to fork one.
    """

    def __init__(self, signals: Signals, clock: Clock, supervisor: tuple[int, socket.socket] | None = None) -> None:
        # If the supervisor dies, what it had adopted comes to us; below a resident server, to that one.
        self._adopted_before = adopts_orphans()
        adopt_orphans()
        self._signals, self._clock = signals, clock
        self._pid, self._sock = supervisor or fork_supervisor()
        self._is_child = supervisor is None
        self._waiting: list[Change] = []
        self._answers: dict[str, int] = {}
        self._lost = self._is_leaving = False

    def warm_up(self, command: Command) -> bool:
        request = _to_request("warm", "", command)
        request.fds.append(SERVER_FD)
        self._send(request, list(command.stdio))
        return True

    def retire(self) -> None:
        self._send(Request(op="retire"))

    def start(self, tag: str, command: Command) -> None:
        request = _to_request("start", tag, command)
        self._send(request, [*command.stdio, *(fd for _, fd in command.extra_fds)])

    def signal(self, tag: str, number: int, *, tree: bool = False) -> None:
        self._send(Request(op="signal", tag=tag, number=number, tree=tree))

    def sweep(self, grace_s: float, *, session: int = 0) -> None:
        self._send(Request(op="sweep", grace_s=grace_s, number=session))
        self._wait_answer("swept", grace_s + 15)

    def leave(self) -> int:
        self._is_leaving = True
        self._send(Request(op="leave"))
        left = self._wait_answer("left", 5)
        self._end_supervisor()
        adopt_orphans(self._adopted_before)
        return max(0, left)

    def close(self) -> None:
        # Closing the socket is the request to end everything; the supervisor ends when all below it has ended.
        self._sock.close()
        self._end_supervisor()
        # The process may be a user's, who has called launch(): what that leaves behind is reaped by init.
        adopt_orphans(self._adopted_before)

    def wait_change(self, timeout_s: float) -> list[Change]:
        if not self._waiting and not self._lost:
            ready = self._wait_ready(timeout_s)
            if self._sock.fileno() in ready:
                self._receive()
        elif self._lost and not self._waiting:
            wait_ready([self._signals.fileno()], timeout_s)
        found, self._waiting = self._waiting, []
        return found

    def _wait_ready(self, timeout_s: float, *, for_signals: bool = True) -> list[int]:
        awaited = [self._sock.fileno(), *([self._signals.fileno()] if for_signals else [])]
        return wait_ready(awaited, timeout_s)

    def _receive(self) -> None:
        """Take all messages that are there: changes, and answers to questions of ours."""
        while True:
            try:
                data = self._sock.recv(DATAGRAM_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                if not self._lost and not self._is_leaving:
                    end_descendants((self._pid,), 0, self._clock)
                    self._waiting.append(SupervisorLost())
                self._lost = True
                return
            ((name, body),) = json.loads(data).items()
            if name in _CHANGES:
                self._waiting.append(_CHANGES[name](**body))
            else:
                self._answers[name] = body

    def _wait_answer(self, name: str, timeout_s: float) -> int:
        end, hurried = self._clock.monotonic() + timeout_s, False
        self._answers.pop(name, None)
        while not self._lost and (rest := end - self._clock.monotonic()) > 0:
            ready = self._wait_ready(rest, for_signals=not hurried)
            if self._sock.fileno() in ready:
                self._receive()
            if name in self._answers:
                return self._answers.pop(name)
            if self._signals.has_pending and not hurried:
                # Somebody presses Ctrl-C: any further request tells the supervisor to hurry. The signal itself is left
                # for the loop that takes signals.
                hurried = True
                self._send(Request(op="hurry"))
        return 0

    def _send(self, request: Request, fds: list[int] | None = None) -> None:
        if self._lost:
            return
        data, fds, payload = json.dumps(asdict(request)).encode(), list(fds or ()), None
        if len(data) > _LONGEST_DATAGRAM:
            payload = make_memory_file("rankwise-request")
            os.write(payload, data)
            data, fds = json.dumps({"op": request.op, "payload": True}).encode(), [*fds, payload]
        try:
            self._hand_over(data, fds)
        except (BrokenPipeError, ConnectionError):
            return  # the next look at the socket tells that the supervisor is lost
        except OSError as error:
            raise LaunchError(f"the supervisor can't take a request: {error}") from error
        finally:
            if payload is not None:
                os.close(payload)

    def _hand_over(self, data: bytes, fds: list[int]) -> None:
        """Send one request, and read while the socket is full: the supervisor takes no request while its own answers find no room."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        end = self._clock.monotonic() + _REQUEST_S
        while not self._lost:
            try:
                self._sock.sendmsg([data], rights, socket.MSG_DONTWAIT)
            except OSError as error:
                # Too many descriptors on their way at once (ETOOMANYREFS) is a full socket, too.
                if error.errno not in {errno.EAGAIN, errno.ETOOMANYREFS}:
                    raise
            else:
                return
            if self._clock.monotonic() > end:
                raise LaunchError(
                    f"the supervisor (pid {self._pid}) has accepted no request for {_REQUEST_S:.0f} s",
                    hint="is it stopped? `ps -o pid,stat,wchan -p PID` shows its state",
                )
            self._receive()
            wait_ready([self._sock.fileno()], _FULL_LOOK_S, to_write=True)

    @property
    def supervisor_pid(self) -> int:
        return self._pid

    def _end_supervisor(self) -> None:
        end = self._clock.monotonic() + 12
        while self._clock.monotonic() < end:
            if self._has_ended():
                return
            self._clock.sleep(0.002)
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        if self._is_child:
            os.waitpid(self._pid, 0)

    def _has_ended(self) -> bool:
        with suppress(ChildProcessError, ProcessLookupError):
            if self._is_child:
                return bool(os.waitpid(self._pid, os.WNOHANG)[0])
            os.kill(self._pid, 0)  # its parent takes its end in at once
            return False
        return True


def _to_request(op: str, tag: str, command: Command) -> Request:
    return Request(
        op=op,
        tag=tag,
        argv=list(command.argv),
        env=command.env,
        deaf=command.deaf,
        forks=command.forks,
        fds=[number for number, _ in command.extra_fds],
    )
