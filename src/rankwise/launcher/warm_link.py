"""The supervisor's link to the warm server: requests wait here until it has forked them, or come back to be started cold."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict, final

from rankwise.base.clock import SYSTEM_CLOCK

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwise.launcher.supervisor_protocol import Request

#: Python starts in 0.03 s; on a slow network disk it may take seconds to get as far as our hook.
_HELLO_S = 60.0
#: A fork takes milliseconds; but the server may be at the imports for later attempts.
_ANSWER_S = 20.0
#: A process that has been killed before it was forked is waited for so long; a fork takes milliseconds, on a busy host
#: a second.
_KILLED_S = 3.0
#: Nobody imports torch for so long, unless a disk hangs.
_READY_S = 900.0


@dataclass(slots=True, kw_only=True)
class Waiting:
    """A request that the server has not carried out yet; the descriptors are ours until then."""

    request: Request
    fds: list[int]
    sent_s: float | None = None
    signals: list[int]

    @property
    def is_killed(self) -> bool:
        """Whether it is to end as soon as it is there."""
        return int(signal.SIGKILL) in self.signals


class Message(TypedDict, total=False):
    """What the server says: that it is there, and what of it; what became of a request; or why it can't serve.

    Attributes:
        ready: Its pid, once it can fork; with the modules that it has imported, and the seconds that this took.
        forked: The tag of a request; ``pid`` is the new process's, which is the supervisor's child by now or in a moment.
        refused: The tag of a request that must be started cold, with the reason.
    """

    hello: int
    ready: int
    num_modules: int
    seconds: float
    warning: str
    cold: str
    forked: str
    pid: int
    refused: str
    reason: str


@final
class WarmLink:
    """One server, from its start to its end.

    Attributes:
        gave_up: Whether it has said why it can't serve.

    Args:
        pid: The server's.
        sock: Our end of its socket.
        env: How its environment differs from the supervisor's.
        now_s: The time of its start.
    """

    def __init__(self, pid: int, sock: socket.socket, env: Mapping[str, str | None], now_s: float) -> None:
        self.pid, self._sock, self._env, self._started_s = pid, sock, env, now_s
        self._waiting: dict[str, Waiting] = {}
        self._has_hook = self._is_ready = self.gave_up = False
        sock.setblocking(False)  # noqa: FBT003 - its only form

    @property
    def has_requests(self) -> bool:
        """Whether somebody waits for it."""
        return bool(self._waiting) or not self._is_ready

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when the server has spoken, or is gone."""
        return self._sock.fileno()

    def fork(self, request: Request, fds: list[int]) -> None:
        """Have a process forked, as soon as the server is ready."""
        self._waiting[request.tag] = Waiting(request=request, fds=list(fds), signals=[])
        if self._is_ready:
            self._send_waiting()

    def signal(self, tag: str, number: int) -> bool:
        """Note a signal for a process that is not forked yet; False if none of that name waits."""
        if tag not in self._waiting:
            return False
        self._waiting[tag].signals.append(number)
        return True

    def drop(self, tag: str) -> bool:
        """Forget a request that has not reached the server."""
        waiting = self._waiting.get(tag)
        if waiting is None or waiting.sent_s is not None:
            return False
        del self._waiting[tag]
        _close(waiting.fds)
        return True

    def read(self) -> tuple[list[tuple[Message, Waiting | None]], bool]:
        """Return what the server has said, in order, each with the request that it is about, and whether it is still there."""
        found: list[tuple[Message, Waiting | None]] = []
        while True:
            try:
                data = self._sock.recv(1 << 16)
            except BlockingIOError:
                return found, True
            except ConnectionError:
                data = b""
            if not data:
                return found, False
            message: Message = json.loads(data)
            self._has_hook |= "hello" in message
            self._is_ready |= "ready" in message
            self.gave_up |= "cold" in message
            tag = message.get("forked") or message.get("refused")
            found.append((message, None if tag is None else self._waiting.pop(tag)))
            if self._is_ready:
                self._send_waiting()

    @property
    def waits_for_killed(self) -> bool:
        """Whether a process that was killed is still to be forked: nobody should wait long for that."""
        return any(waiting.is_killed for waiting in self._waiting.values())

    def find_delay(self, now_s: float) -> str:
        """Tell what takes too long; empty as long as nothing does."""
        passed = now_s - self._started_s
        if not self._has_hook and passed > _HELLO_S:
            return f"Python did not reach our hook within {_HELLO_S:.0f} s"
        if not self._is_ready and passed > _READY_S:
            return f"torch was not imported within {_READY_S:.0f} s"
        killed = [waiting.sent_s for waiting in self._waiting.values() if waiting.is_killed and waiting.sent_s]
        if killed and now_s - min(killed) > _KILLED_S:
            return "the warm server does not answer"
        sent = [waiting.sent_s for waiting in self._waiting.values() if waiting.sent_s is not None]
        if sent and now_s - min(sent) > _ANSWER_S:
            return f"the warm server has not answered for {_ANSWER_S:.0f} s"
        return ""

    def close(self) -> list[Waiting]:
        """Close our end, upon which the server ends; return the requests that it has not carried out."""
        self._sock.close()
        left, self._waiting = list(self._waiting.values()), {}
        return left

    def _send_waiting(self) -> None:
        for waiting in self._waiting.values():
            if waiting.sent_s is not None:
                continue
            try:
                socket.send_fds(self._sock, [self._serialize(waiting.request)], waiting.fds)
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.ETOOMANYREFS):
                    return  # enough on its way: the rest follows the next answer
                # Whatever is wrong with the socket, the next look at it tells.
            waiting.sent_s = SYSTEM_CLOCK.monotonic()

    def _serialize(self, request: Request) -> bytes:
        names = {*self._env, *request.env}
        outer = os.environ  # noqa: TID251 - the supervisor's own, which both environments are made of
        differing: dict[str, str | None] = {}
        for name in names:
            wanted = request.env[name] if name in request.env else outer.get(name)
            if wanted != (self._env[name] if name in self._env else outer.get(name)):
                differing[name] = wanted
        program = {"runs": request.argv[2], "args": request.argv[3:]} if request.forks == "main" else {"runs": "script"}
        message = {
            "tag": request.tag,
            "env": differing,
            "fds": request.fds,
            "deaf": request.deaf,
            "supervisor": os.getpid(),
            "args": [],
            **program,
        }
        return json.dumps(message).encode()


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
