"""Measures the way to another host: round trips of some bytes, then one stream, and what the kernel had to send again."""

from __future__ import annotations

import selectors
import socket
import statistics
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwise.doctor.meeting.answering import ORDER, PING, STALL_S, STREAM, TAKEN
from rankwise.doctor.meeting.connecting import begin_connect, open_socket
from rankwise.doctor.meeting.wire import explain, tune

if TYPE_CHECKING:
    from rankwise.base.clock import Clock

_PINGS, _PINGS_S = 20, 3.0
_MOST_BYTES = 64 << 20
_CHUNK = bytes(1 << 18)
_OPEN_S, _GREETING_BYTES = 5.0, 1024
#: Linux: struct tcp_info, tcpi_total_retrans and tcpi_segs_out; and the option that paces a stream.
_TCP_INFO, _RESENT_AT, _SENT_AT, _SO_MAX_PACING_RATE = 11, 100, 136, 47
#: Fewer packets than these that were sent again, and so few that were sent at all, tell nothing of the way.
_LEAST_RESENT, _LEAST_SENT = 4, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How fast a way is; see `together.Measure`.

    Attributes:
        is_stalled: Small messages passed, and a stream did not.
        why: Why it could not be measured; empty if it was.
    """

    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    resent: float | None = None
    is_stalled: bool = False
    why: str = ""


def measure_way(
    address: str,
    port: int,
    *,
    clock: Clock,
    seconds: float,
    source_address: str = "",
    bytes_per_s: float = 0.0,
) -> Way:
    """Measure the way to a host that answers (`answering`).

    Args:
        address: Its address.
        port: Its port.
        clock: Where the time comes from.
        seconds: How long to send.
        source_address: From where to connect; empty: the kernel chooses.
        bytes_per_s: How fast to send at most, where the kernel can pace; 0: as fast as it goes.

    Returns:
        What was measured, within ``seconds`` and some more; it never raises.
    """
    try:
        sock = open_socket(address, source_address)
    except OSError as error:
        return Way(why=explain(error))
    try:
        with selectors.DefaultSelector() as selector:
            return _measure(_Line(sock, selector, clock), address, port, seconds, bytes_per_s)
    except OSError as error:
        return Way(why=explain(error))
    finally:
        # Whatever still waits to be sent must not be in the way of the next measurement.
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()


def _measure(line: _Line, address: str, port: int, seconds: float, bytes_per_s: float) -> Way:
    begin_connect(line.sock, address, port)
    line.wait(selectors.EVENT_WRITE, _OPEN_S)
    tune(line.sock)
    if bytes_per_s and sys.platform.startswith("linux"):
        with suppress(OSError):
            line.sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, int(min(bytes_per_s, 2**32 - 2)))
    line.skip_greeting()
    latency_s = line.ping()
    try:
        taken_bytes, took_s = line.stream(seconds)
    except TimeoutError:
        taken_bytes, took_s = 0, 1.0
    return Way(
        latency_s=latency_s, bytes_per_s=taken_bytes / max(took_s, 1e-6), resent=_read_resent(line.sock),
        is_stalled=taken_bytes == 0,
    )  # fmt: skip


class _Line:
    def __init__(self, sock: socket.socket, selector: selectors.BaseSelector, clock: Clock) -> None:
        self.sock, self._selector, self._clock = sock, selector, clock
        selector.register(sock, selectors.EVENT_READ)

    def wait(self, event: int, timeout_s: float) -> int:
        self._selector.modify(self.sock, event)
        ready = self._selector.select(max(0.0, timeout_s))
        if not ready:
            raise TimeoutError(f"no answer within {timeout_s:.0f} s")
        return ready[0][1]

    def read(self, count: int, until_s: float) -> bytes:
        found = b""
        while len(found) < count:
            self.wait(selectors.EVENT_READ, until_s - self._clock.monotonic())
            data = self.sock.recv(count - len(found))
            if not data:
                raise ConnectionResetError("it closed the connection")
            found += data
        return found

    def skip_greeting(self) -> None:
        until_s, byte = self._clock.monotonic() + _OPEN_S, b""
        for _ in range(_GREETING_BYTES):
            byte = self.read(1, until_s)
            if byte == b"\n":
                return
        raise ConnectionAbortedError("it is not a doctor")

    def ping(self) -> float:
        until_s = self._clock.monotonic() + _PINGS_S
        order, found = ORDER.pack(PING, 0, 0), list[float]()
        while len(found) < _PINGS:
            begin_s = self._clock.monotonic()
            self.sock.send(order)
            try:
                self.read(ORDER.size, until_s)
            except TimeoutError:
                break
            found.append(self._clock.monotonic() - begin_s)
        if not found:
            raise TimeoutError(f"no answer to a few bytes within {_PINGS_S:.0f} s")
        return statistics.median(found)

    def stream(self, seconds: float) -> tuple[int, float]:
        until_s = self._clock.monotonic() + max(seconds, STALL_S) + 1.0
        self.sock.send(ORDER.pack(STREAM, int(seconds * 1000), _MOST_BYTES))
        sent = 0
        while self._clock.monotonic() < until_s:
            both = (
                selectors.EVENT_READ | selectors.EVENT_WRITE if sent < _MOST_BYTES else selectors.EVENT_READ
            )
            ready = self.wait(both, until_s - self._clock.monotonic())
            if ready & selectors.EVENT_READ:
                break
            with suppress(BlockingIOError):
                sent += self.sock.send(_CHUNK)
        kind, took_us, taken = ORDER.unpack(self.read(ORDER.size, until_s))
        if kind != TAKEN:
            raise ConnectionAbortedError("it is not a doctor")
        return taken, took_us / 1e6


def _read_resent(sock: socket.socket) -> float | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        told = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 256)
        (resent,), (sent,) = (
            struct.unpack_from("=I", told, _RESENT_AT),
            struct.unpack_from("=I", told, _SENT_AT),
        )
    except (OSError, struct.error):  # a kernel before 4.2
        return None
    if resent < _LEAST_RESENT:
        return 0.0 if sent >= _LEAST_SENT else None
    return float(min(1.0, resent / max(sent, 1)))
