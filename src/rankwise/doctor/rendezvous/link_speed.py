"""Measures the link to another host: round trips of some bytes, then one stream, and what the kernel had to send again."""

from __future__ import annotations

import asyncio
import socket
import statistics
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwise.doctor.rendezvous.link_probe import begin_connect, open_socket, read_exactly, wait_connected
from rankwise.doctor.rendezvous.link_server import ORDER, PING, STALL_S, STREAM, TAKEN
from rankwise.doctor.rendezvous.wire import explain, tune

if TYPE_CHECKING:
    from rankwise.base.clock import Clock

_PINGS, _PINGS_S = 20, 3.0
_MOST_BYTES = 64 << 20
_CHUNK = bytes(4 << 20)
_OPEN_S, _GREETING_BYTES = 5.0, 1024
#: Linux: struct tcp_info, tcpi_total_retrans and tcpi_segs_out; and the option that paces a stream.
_TCP_INFO, _RESENT_AT, _SENT_AT, _SO_MAX_PACING_RATE = 11, 100, 136, 47
#: Fewer packets than these that were sent again, and so few that were sent at all, say nothing about the link.
_LEAST_RESENT, _LEAST_SENT = 4, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """How fast a link is, as in `cluster_report.Measure`; ``why`` says why it could not be measured."""

    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    resent: float | None = None
    why: str = ""


async def measure_link(
    address: str,
    port: int,
    *,
    clock: Clock,
    seconds: float,
    source_address: str = "",
    bytes_per_s: float = 0.0,
) -> Speed:
    """Measure the link to a host that listens (`link_server`), within ``seconds`` and some more; it never raises.

    ``bytes_per_s`` is how fast to send at most, where the kernel can pace; 0: as fast as it goes.
    """
    try:
        sock = open_socket(address, source_address)
    except OSError as error:
        return Speed(why=explain(error))
    with sock:
        try:
            begin_connect(sock, address, port)
            await wait_connected(sock, _OPEN_S)
            tune(sock)
            if bytes_per_s and sys.platform.startswith("linux"):
                pace = struct.pack("@I", int(min(bytes_per_s, 2**32 - 2)))
                with suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, pace)
            await _skip_greeting(sock, clock)
            latency_s = await _ping(sock, clock)
            taken_bytes, took_s = await _stream(sock, clock, seconds)
            return Speed(
                latency_s=latency_s, bytes_per_s=taken_bytes / max(took_s, 1e-6), resent=_read_resent(sock)
            )
        except OSError as error:
            return Speed(why=explain(error) if str(error) else f"no answer within {_OPEN_S:.0f} s")
        finally:
            # Whatever still waits to be sent must not be in the way of the next measurement.
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def _skip_greeting(sock: socket.socket, clock: Clock) -> None:
    until_s = clock.monotonic() + _OPEN_S
    for _ in range(_GREETING_BYTES):
        if await read_exactly(sock, 1, clock, until_s) == b"\n":
            return
    raise ConnectionAbortedError("it is not a doctor")


async def _ping(sock: socket.socket, clock: Clock) -> float:
    until_s = clock.monotonic() + _PINGS_S
    order, found = ORDER.pack(PING, 0, 0), list[float]()
    while len(found) < _PINGS:
        begin_s = clock.monotonic()
        sock.send(order)
        try:
            await read_exactly(sock, ORDER.size, clock, until_s)
        except TimeoutError:
            break
        found.append(clock.monotonic() - begin_s)
    if not found:
        raise TimeoutError(f"no answer to a few bytes within {_PINGS_S:.0f} s")
    return statistics.median(found)


async def _stream(sock: socket.socket, clock: Clock, seconds: float) -> tuple[int, float]:
    """Send until the other side answers how much it got, and in what time; nothing where it does not answer."""
    until_s = clock.monotonic() + max(seconds, STALL_S) + 1.0
    sock.send(ORDER.pack(STREAM, int(seconds * 1000), _MOST_BYTES))

    async def send() -> None:
        with suppress(OSError):
            for _ in range(_MOST_BYTES // len(_CHUNK)):
                await asyncio.get_running_loop().sock_sendall(sock, _CHUNK)

    sending = asyncio.create_task(send())
    try:
        kind, took_us, taken = ORDER.unpack(await read_exactly(sock, ORDER.size, clock, until_s))
    except TimeoutError:
        return 0, 1.0
    finally:
        sending.cancel()
        await asyncio.wait({sending})
    if kind != TAKEN:
        raise ConnectionAbortedError("it is not a doctor")
    return taken, took_us / 1e6


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
