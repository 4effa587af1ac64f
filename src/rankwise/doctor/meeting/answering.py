"""The listening side of a host: whoever connects is told who is here, and may measure the way."""

from __future__ import annotations

import selectors
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Thread
from typing import TYPE_CHECKING, final

from rankwise.doctor.meeting.wire import GREETING, VERSION, encode, tune

if TYPE_CHECKING:
    from rankwise.base.clock import Clock

#: Orders of who measures, and the answer at the end of a stream: what it is, milliseconds (of an answer microseconds), bytes.
ORDER = struct.Struct("!c3xIQ")
PING, STREAM, TAKEN = b"P", b"S", b"T"
#: So long a stream may bring nothing at all before it is said to have stalled.
STALL_S = 2.0
_GLANCE_S, _IDLE_S = 0.02, 60.0
_READ_BYTES = 1 << 18
_READS_A_LOOK = 8


@dataclass(slots=True, kw_only=True)
class _Guest:
    sock: socket.socket
    heard_s: float
    waiting: bytearray = field(default_factory=bytearray)
    begin_s: float = -1.0
    bound_s: float = 0.0
    most_bytes: int = 0
    taken_bytes: int = 0

    @property
    def is_streaming(self) -> bool:
        return self.begin_s >= 0


@final
class Answering:
    """Listens at ports that the kernel chooses, in a thread of its own.

    Args:
        mark: Of the meeting.
        number: Of this host in the meeting.
        name: Of this host.
        clock: Where the time comes from.
    """

    def __init__(self, *, mark: str, number: int, name: str, clock: Clock) -> None:
        self._greeting = encode({GREETING: VERSION, "mark": mark, "number": number, "name": name})
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._guests: dict[int, _Guest] = {}
        self._buffer = bytearray(_READ_BYTES)
        self._woken, self._waker = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._listeners: list[socket.socket] = []
        self._thread = Thread(target=self._run, name="rankwise-answering", daemon=True)

    def listen(self, address: str, port: int = 0) -> int:
        """Listen at an address, before ``start``; an empty one means all of them.

        Args:
            address: The address.
            port: The port; 0 lets the system choose.

        Returns:
            The port.

        Raises:
            OSError: The address is not ours, or the port is taken.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, port), family=family, backlog=1024)
        listener.setblocking(False)  # noqa: FBT003 - its only form
        self._listeners.append(listener)
        self._selector.register(listener, selectors.EVENT_READ, data="listener")
        return int(listener.getsockname()[1])

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """Stop, and close all ports."""
        with suppress(OSError):
            self._waker.send(b"x")
        if self._thread.ident is None:
            self._close_all()
        else:
            self._thread.join(timeout=5)

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._close_all()

    def _close_all(self) -> None:
        for sock in (
            *self._listeners,
            *(one.sock for one in self._guests.values()),
            self._woken,
            self._waker,
        ):
            sock.close()
        self._selector.close()

    def _serve(self) -> None:
        while True:
            is_streaming = any(one.is_streaming for one in self._guests.values())
            for key, _ in self._selector.select(_GLANCE_S if is_streaming else 1.0):
                if key.fileobj is self._woken:
                    return
                if key.data == "listener" and isinstance(key.fileobj, socket.socket):
                    self._welcome(key.fileobj)
                else:
                    self._hear(self._guests[key.fd])
            self._look_at_time()

    def _welcome(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:  # gone already, or there is no descriptor left: who connects sees it
            return
        try:
            tune(sock)
            sock.send(self._greeting)
        except OSError:  # gone meanwhile
            sock.close()
            return
        self._guests[sock.fileno()] = _Guest(sock=sock, heard_s=self._clock.monotonic())
        self._selector.register(sock, selectors.EVENT_READ)

    def _hear(self, guest: _Guest) -> None:
        guest.heard_s = self._clock.monotonic()
        try:
            for _ in range(_READS_A_LOOK if guest.is_streaming else 1):
                count = guest.sock.recv_into(self._buffer)
                if not count:
                    self._part(guest)
                    return
                if guest.is_streaming:
                    self._take(guest, count)
                else:
                    guest.waiting += self._buffer[:count]
                    self._obey(guest)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._part(guest)

    def _obey(self, guest: _Guest) -> None:
        while len(guest.waiting) >= ORDER.size and not guest.is_streaming:
            order = bytes(guest.waiting[: ORDER.size])
            del guest.waiting[: ORDER.size]
            kind, bound_ms, most_bytes = ORDER.unpack(order)
            if kind == PING:
                guest.sock.send(order)
            elif kind == STREAM:
                guest.begin_s, guest.bound_s, guest.most_bytes = guest.heard_s, bound_ms / 1000, most_bytes
                guest.taken_bytes = 0
                self._take(guest, len(guest.waiting))
                guest.waiting.clear()
            else:
                raise ConnectionAbortedError("it is not a doctor")

    def _take(self, guest: _Guest, count: int) -> None:
        """Count what came of a stream. What comes after its end is read, too: else the sender would not hear of the answer."""
        if guest.bound_s < 0:
            return
        guest.taken_bytes += count
        if guest.taken_bytes >= guest.most_bytes:
            self._tell_taken(guest)

    def _tell_taken(self, guest: _Guest) -> None:
        took_s = self._clock.monotonic() - guest.begin_s
        guest.bound_s = -1.0
        guest.sock.send(ORDER.pack(TAKEN, min(int(took_s * 1e6), (1 << 32) - 1), guest.taken_bytes))

    def _look_at_time(self) -> None:
        now_s = self._clock.monotonic()
        for guest in list(self._guests.values()):
            late_s = now_s - guest.begin_s
            if guest.is_streaming and guest.bound_s >= 0 and late_s >= guest.bound_s:
                if guest.taken_bytes or late_s >= STALL_S:
                    with suppress(OSError):
                        self._tell_taken(guest)
            elif now_s - guest.heard_s > _IDLE_S:
                self._part(guest)

    def _part(self, guest: _Guest) -> None:
        self._selector.unregister(guest.sock)
        del self._guests[guest.sock.fileno()]
        guest.sock.close()
