"""A link between one worker and one server: messages with a bound on every wait, and the peer's name in every error.

A link is a connection of its own, over TCP, or on one host over a Unix socket. That lets the others continue when a peer is killed, and lets
a process that is started again take its predecessor's place: agents of torch's RPC serve a whole process, and meet all others when they
start. And a message costs a fraction of what it costs over RPC or Gloo (benchmarks/parameter_server.py).
"""

from __future__ import annotations

import json
import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, final
from weakref import WeakSet

import torch
from torch import Tensor

from rankwise.base.errors import CollectiveError, CollectiveTimeoutError
from rankwise.base.log import get_logger
from rankwise.base.memory import view_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


_LOGGER = get_logger(__name__)

#: Kind, shard, bytes of the note; number, version, weight, bytes of the body.
_HEADER = struct.Struct("<iiqqqdq")
#: Up to so many bytes one buffer for header, note and body costs less than two of them.
_JOINED_BYTES = 1 << 14
#: Of a local socket; the system may allow less.
_BUFFER_BYTES = 4 << 20
#: Whoever waits longer says for whom.
_NOTICE_S = 20.0


class LinkLostError(CollectiveError):
    """The peer has ended, or the connection to it is broken."""


class Kind(IntEnum):
    """What a message asks for, or answers."""

    HELLO = 0  # who connects, and the answer to it
    PULL = 1  # a shard's values; a function to call
    ROWS = 2  # some rows of a table
    PUSH = 3  # a gradient, which has no answer
    STATE = 4  # a shard with its optimizer's states
    STATS = 5  # what a server has counted
    BYE = 6  # there is nothing more to do
    ANSWER = 7
    REFUSED = 8  # an error in place of an answer


@final
@dataclass(frozen=True, slots=True)
class Message:
    """What goes over a link.

    Attributes:
        kind: What is asked for or answered.
        shard: Which shard it is about.
        number: A version or a clock.
        weight: Of a gradient.
        seen: The version that a gradient was computed with.
        note: Small facts.
        body: Bytes, shape (N,), uint8; None if there are none.
    """

    kind: Kind
    shard: int = 0
    number: int = 0
    weight: float = 1.0
    seen: int = 0
    note: Mapping[str, Any] = field(default_factory=dict)
    body: Tensor | None = None


@final
class Link:
    """One end of a link; peer and rank are for errors.

    With ``reports_waits`` it says on standard error for whom a long wait is. Before the first message is received,
    ``opening`` is called with the link and the seconds to wait: it finds out who the peer is.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        peer: str,
        rank: int,
        reports_waits: bool = False,
        opening: Callable[[Link, float], None] | None = None,
    ) -> None:
        self._socket, self.peer, self._rank, self._reports_waits = connection, peer, rank, reports_waits
        self._opening = opening
        close_in_children(connection)
        if connection.family in {socket.AF_INET, socket.AF_INET6}:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:  # the kernel sizes TCP's buffers itself; these are small, and each time one is full both sides change places
            with suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._header = memoryview(bytearray(_HEADER.size))
        self._timeout_s = -1.0
        self._is_late = False

    def send(self, message: Message, *, timeout_s: float) -> None:
        """Send a message; its body may be written again afterwards.

        Raises:
            LinkLostError: The peer is gone.
            CollectiveTimeoutError: It does not take the message in time; the link is closed.
        """
        note = json.dumps(message.note).encode() if message.note else b""
        body = memoryview(b"") if message.body is None else _view(message.body)
        head = _HEADER.pack(
            message.kind, message.shard, len(note), message.number, message.seen, message.weight, len(body)
        )  # fmt: skip
        self._check_late()
        self._set_timeout(timeout_s)
        try:
            if len(body) <= _JOINED_BYTES or not hasattr(self._socket, "sendmsg"):
                self._socket.sendall(b"".join((head, note, body)))
            else:
                front = head + note
                sent = self._socket.sendmsg((front, body)) - len(front)
                if sent < 0:
                    self._socket.sendall(front[sent:])
                if sent < len(body):
                    self._socket.sendall(body[max(0, sent) :])
        except TimeoutError:
            raise self._make_timeout_error("takes no message", timeout_s) from None
        except OSError as error:
            raise self._make_lost_error(error.strerror or str(error)) from None

    def receive(self, *, timeout_s: float, place: Callable[[Message, int], Tensor | None] | None = None) -> Message:
        """Receive a message.

        Args:
            timeout_s: Seconds to wait for it, and for each of its parts.
            place: Asked where the body is to be put, given the message without it and its size in bytes; None: into new
                memory.

        Raises:
            LinkLostError: The peer is gone.
            CollectiveTimeoutError: Nothing arrived in time; the link is closed.
        """
        if self._opening is not None:
            opening, self._opening = self._opening, None
            opening(self, timeout_s)
        self._receive_into(self._header, timeout_s, is_first=True)
        kind, shard, note_size, number, seen, weight, size = _HEADER.unpack(self._header)
        text = bytearray(note_size)
        self._receive_into(memoryview(text), timeout_s)
        try:
            note = dict(json.loads(text)) if text else {}
            message = Message(Kind(kind), shard, number, weight, seen, note)
        except (TypeError, ValueError):
            self.close()
            raise self._make_lost_error("it sent an invalid message") from None
        if not size:
            return message
        body = place(message, size) if place is not None else None
        if body is None:
            body = torch.empty(size, dtype=torch.uint8)
        if body.numel() != size:
            self.close()  # what follows is no message
            raise LinkLostError(
                f"{self.peer} sends {size} bytes where {body.numel()} are expected", rank=self._rank,
                hint="the versions of rankwise or the models differ",
            )  # fmt: skip
        self._receive_into(_view(body), timeout_s)
        return replace(message, body=body)

    def exchange(self, size: int, timeout_s: float, answer: Callable[[bytes], bytes] | None = None) -> bytes:
        """Receive some bytes that are no message, and send what ``answer`` makes of them.

        Raises:
            LinkLostError: The peer is gone; or ``answer`` raises it.
            CollectiveTimeoutError: As for messages.
        """
        shown = bytearray(size)
        self._receive_into(memoryview(shown), timeout_s, is_first=True)
        if answer is not None:
            try:
                self._socket.sendall(answer(bytes(shown)))
            except OSError as error:
                raise self._make_lost_error(error.strerror or str(error)) from None
        return bytes(shown)

    def _receive_into(self, buffer: memoryview, timeout_s: float, *, is_first: bool = False) -> None:
        self._check_late()
        reports = is_first and self._reports_waits and timeout_s > _NOTICE_S
        self._set_timeout(_NOTICE_S if reports else timeout_s)
        at = 0
        while at < len(buffer):
            try:
                size = self._socket.recv_into(buffer[at:] if at else buffer)
            except TimeoutError:
                if not reports:
                    raise self._make_timeout_error("sends nothing", timeout_s) from None
                _LOGGER.info(
                    f"[rank {self._rank}] has waited {_NOTICE_S:g} s for {self.peer}, and waits {timeout_s:g} s at most"
                )
                self._set_timeout(timeout_s - _NOTICE_S)
                reports = False
                continue
            except OSError as error:
                raise self._make_lost_error(error.strerror or str(error)) from None
            if not size:
                raise self._make_lost_error("it has closed the connection")
            at += size

    def _check_late(self) -> None:
        if self._is_late:
            raise CollectiveTimeoutError(
                f"the link to {self.peer} was closed when it was late", rank=self._rank,
                hint="create the parameter server again, or let the process end: it can be started again",
            )  # fmt: skip

    def _set_timeout(self, timeout_s: float) -> None:
        if timeout_s != self._timeout_s:  # a system call
            self._timeout_s = timeout_s
            with suppress(OSError):  # closed: the next call says so
                self._socket.settimeout(timeout_s)

    def _make_lost_error(self, text: str) -> LinkLostError:
        return LinkLostError(f"{self.peer} is gone: {text}", rank=self._rank, hint="look at its output")

    def _make_timeout_error(self, what: str, timeout_s: float) -> CollectiveTimeoutError:
        # Its answer may still come, or half a message has gone: what arrives next would be taken for something else.
        self._is_late = True
        self.close()
        return CollectiveTimeoutError(
            f"{self.peer} {what} for {timeout_s:g} s", rank=self._rank,
            hint="it is stopped or overloaded: look at its stacks (`rankwise why PID`); or raise timeout_s",
        )  # fmt: skip

    def close(self) -> None:
        """Let go of the connection; the peer gets what was sent."""
        self._socket.close()


#: Of links and listeners: a process forked off this one, a DataLoader's worker say, must not hold them open when we
#: have died.
_open: WeakSet[socket.socket] = WeakSet()


def close_in_children(connection: socket.socket) -> None:
    """Have a socket closed in processes that are forked off this one; programs that it starts do not get it anyway."""
    _open.add(connection)


def _close_all() -> None:
    for connection in list(_open):
        connection.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)


def _view(body: Tensor) -> memoryview:
    """Return a contiguous tensor's memory."""
    return view_memory(body.data_ptr(), body.nbytes)
