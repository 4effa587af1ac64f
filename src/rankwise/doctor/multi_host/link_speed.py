"""Both sides of measuring a link: a host that listens and greets; and one that sends round trips of some bytes, then a stream."""

from __future__ import annotations

import asyncio
import selectors
import socket
import statistics
import struct
import sys
import time
from contextlib import suppress
from threading import Thread
from typing import cast, final

from rankwise.base.clock import Clock
from rankwise.doctor.multi_host import wire
from rankwise.doctor.multi_host.cluster_report import Measure
from rankwise.doctor.multi_host.link_probe import read_greeting, receive_until
from rankwise.doctor.multi_host.wire import GoneError, Message

_PINGS, _PINGS_S = 20, 3.0
_MOST_BYTES = 64 << 20
_CHUNK = bytes(4 << 20)
#: So long a link is measured at most, whatever the coordinator orders.
_OPEN_S, _MOST_S = 5.0, 60.0
#: Connections of all hosts at once, each a thread of a host that is asked.
_MOST_CONNECTED = 1024
#: Linux: struct tcp_info, tcpi_total_retrans and tcpi_segs_out; and the option that paces a stream.
_TCP_INFO, _RESENT_AT, _SENT_AT, _SO_MAX_PACING_RATE = 11, 100, 136, 47
#: Fewer packets than these that were sent again, and so few that were sent at all, say nothing about the link.
_LEAST_RESENT, _LEAST_SENT = 4, 100


def measure_link(order: Message, source: str, clock: Clock) -> Measure | None:
    """Measure the link to a host that listens (`LinkServer`), as the coordinator orders it; None: it can't be measured.

    It takes ``seconds`` and some more. ``pace`` is how many bytes a second to send at most, where the kernel can pace;
    0: as fast as it goes.
    """
    pace, seconds = wire.number(order, "pace"), max(0.0, min(wire.number(order, "seconds"), _MOST_S))
    try:
        with socket.create_connection((wire.text(order, "address"), wire.whole(order, "port") or 0), _OPEN_S) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with suppress(OSError):
                # Whatever still waits to be sent at the end must not be in the way of the next measurement.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                if pace and sys.platform.startswith("linux"):
                    bound = struct.pack("@I", int(min(pace, 2**32 - 2)))
                    sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, bound)
            read_greeting(sock, _OPEN_S)
            latency_s = _ping(sock, clock)
            taken_bytes, took_s = _stream(sock, clock, seconds)
            return Measure(
                source=source, target=wire.text(order, "target"), latency_s=latency_s, bytes_per_s=taken_bytes / max(took_s, 1e-6),
                resent=_read_resent(sock),
            )  # fmt: skip
    except (OSError, GoneError):
        return None


def _ping(sock: socket.socket, clock: Clock) -> float:
    begin_s, found = clock.monotonic(), list[float]()
    for _ in range(_PINGS):
        sent_s = clock.monotonic()
        sock.sendall(ORDER.pack(PING, 0, 0))
        try:
            _read_order(sock, max(0.01, begin_s + _PINGS_S - sent_s))
        except TimeoutError:
            break
        found.append(clock.monotonic() - sent_s)
    if not found:
        raise TimeoutError(f"no answer to a few bytes within {_PINGS_S:.0f} s")
    return statistics.median(found)


def _stream(sock: socket.socket, clock: Clock, seconds: float) -> tuple[int, float]:
    """Send until the other side answers how much it got, and in what time; nothing where it does not answer."""
    until_s = clock.monotonic() + max(seconds, STALL_S) + 1.0
    sock.sendall(ORDER.pack(STREAM, int(seconds * 1000), _MOST_BYTES))
    sock.setblocking(False)  # noqa: FBT003 - its only form
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE)
        while ready := selector.select(max(0.0, until_s - clock.monotonic())):
            if ready[0][1] & selectors.EVENT_READ or clock.monotonic() > until_s:
                break
            sock.send(_CHUNK)
    try:
        kind, took_us, taken = _read_order(sock, max(0.01, until_s - clock.monotonic()))
    except TimeoutError:
        return 0, 1.0
    if kind != TAKEN:
        raise ConnectionAbortedError("it is not a doctor")
    return taken, took_us / 1e6


def _read_order(sock: socket.socket, timeout_s: float) -> tuple[bytes, int, int]:
    """Return the next order or answer; TimeoutError if it has not come in time, OSError if the connection has ended."""
    end_s, data = time.monotonic() + timeout_s, b""
    while len(data) < ORDER.size:
        if not (more := receive_until(sock, end_s, ORDER.size - len(data))):
            raise ConnectionResetError("it closed the connection")
        data += more
    return cast("tuple[bytes, int, int]", ORDER.unpack(data))


def _read_resent(sock: socket.socket) -> float | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 256)
        resent, sent = (struct.unpack_from("=I", info, at)[0] for at in (_RESENT_AT, _SENT_AT))
    except (OSError, struct.error):  # a kernel before 4.2
        return None
    if resent < _LEAST_RESENT:
        return 0.0 if sent >= _LEAST_SENT else None
    return float(min(1.0, resent / max(sent, 1)))


#: What a measuring host asks for, and the answer to a stream: the kind, milliseconds (in an answer microseconds),
#: bytes.
ORDER = struct.Struct("!c3xIQ")
PING, STREAM, TAKEN = b"P", b"S", b"T"
#: So long a stream may bring nothing at all before it is said to have stalled.
STALL_S = 2.0
_IDLE_S = 60.0
_READ_BYTES = 1 << 18


@final
class LinkServer:
    """Listens at ports that the kernel chooses, as the host of a name in the rendezvous."""

    def __init__(self, *, mark: str, name: str, clock: Clock) -> None:
        self._greeting = wire.encode({wire.GREETING: wire.VERSION, "mark": mark, "name": name})
        self._clock = clock
        self._listeners: list[socket.socket] = []
        self._connected: set[socket.socket] = set()

    def listen(self, address: str) -> int:
        """Listen at an address, and return the port, which the system chooses; OSError: the address is not ours."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=1024)
        listener.setblocking(False)  # noqa: FBT003 - its only form
        self._listeners.append(listener)
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)
        return int(listener.getsockname()[1])

    def close(self) -> None:
        """Close all ports, and end what is connected."""
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
        for sock in [*self._connected]:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # gone already, or there is no descriptor left: the connecting host sees it
            sock, _ = listener.accept()
            if len(self._connected) >= _MOST_CONNECTED:
                sock.close()
                return
            self._connected.add(sock)
            try:
                Thread(target=self._attend, args=(sock,), name="rankwise-link", daemon=True).start()
            except RuntimeError:  # the system has no more threads
                self._connected.discard(sock)
                sock.close()

    def _attend(self, sock: socket.socket) -> None:
        try:
            self._serve(sock)
        finally:
            self._connected.discard(sock)

    def _serve(self, sock: socket.socket) -> None:
        with sock, suppress(OSError):
            sock.settimeout(_IDLE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(self._greeting)
            while (order := _read_order(sock, _IDLE_S))[0] == PING:
                sock.sendall(ORDER.pack(*order))
            if order[0] == STREAM:
                self._take_stream(sock, min(order[1] / 1000, _MOST_S), min(order[2], _MOST_BYTES))

    def _take_stream(self, sock: socket.socket, bound_s: float, most_bytes: int) -> None:
        """Read for so long, or until so much has come; answer how much came, and in what time."""
        begin_s, taken_bytes, buffer = self._clock.monotonic(), 0, bytearray(_READ_BYTES)
        # What has brought nothing at all may only be late.
        while (left_s := begin_s + (bound_s if taken_bytes else max(bound_s, STALL_S)) - self._clock.monotonic()) > 0:
            sock.settimeout(left_s)
            try:
                count = sock.recv_into(buffer)
            except TimeoutError:
                break
            taken_bytes += count
            if not count or taken_bytes >= most_bytes:
                break
        took_us = int((self._clock.monotonic() - begin_s) * 1e6)
        sock.settimeout(_IDLE_S)
        sock.sendall(ORDER.pack(TAKEN, min(took_us, (1 << 32) - 1), taken_bytes))
        # What still comes is read, too: else the sender would not receive the answer.
        while sock.recv_into(buffer):
            pass
