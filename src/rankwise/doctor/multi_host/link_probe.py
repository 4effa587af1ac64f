"""The connecting side of a host: it tries the links to all others at once, and checks that the right host answers."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from rankwise.doctor.multi_host.cluster_report import Link, Outcome
from rankwise.doctor.multi_host.connection import in_thread
from rankwise.doctor.multi_host.wire import GREETING, GoneError, StrangerError, decode, explain, text
from rankwise.doctor.probe import Fact

#: A first packet that is lost is sent again after 1 s and after 3 s.
_OPEN_S, _AT_ONCE = 3.5, 128
_MOST_GREETING_BYTES = 1024
_OUTCOMES: dict[int | None, Outcome] = {
    errno.ECONNREFUSED: "refused", errno.ETIMEDOUT: "timeout",
    errno.ECONNRESET: "reset", errno.ECONNABORTED: "reset", errno.EPIPE: "reset",
    errno.ENETUNREACH: "no route", errno.ENETDOWN: "no route", errno.EAFNOSUPPORT: "no route",
}  # fmt: skip


async def try_all(targets: Sequence[Link], *, mark: str, greeting_s: float) -> list[Link]:
    """Connect to all targets, many at a time, and see who answers; the results are in their order.

    A host that answers must send the mark of the rendezvous, within ``greeting_s``.
    """
    gate = asyncio.Semaphore(_AT_ONCE)

    async def try_one(target: Link) -> Link:
        async with gate:
            return await in_thread(partial(_try, target, mark, greeting_s))

    return list(await asyncio.gather(*map(try_one, targets)))


def _try(one: Link, mark: str, greeting_s: float) -> Link:
    silence = f"no answer within {_OPEN_S:g} s"
    try:
        with socket.create_connection((one.address, one.port), _OPEN_S) as sock:
            silence = f"it accepted, but sent nothing within {greeting_s:.0f} s"
            greeting = read_greeting(sock, greeting_s)
    except GoneError as error:
        return replace(one, outcome="other host" if isinstance(error, StrangerError) else "reset", detail=str(error))
    except OSError as error:
        if error.errno is None:
            return replace(one, outcome="timeout", detail=silence)
        outcome = _OUTCOMES.get(error.errno, "unreachable")
        if error.errno in {errno.EMFILE, errno.ENFILE}:
            outcome = "not tried"
        elif error.errno == errno.EADDRNOTAVAIL and ":" in one.address:
            # Where IPv6 is switched off, there is no address of our own to connect from. With IPv4 it is the ports that
            # have run out.
            outcome = "no route"
        return replace(one, outcome=outcome, detail=explain(error))
    if GREETING not in greeting or text(greeting, "mark") != mark:
        return replace(one, outcome="other host", detail="it is not part of this rendezvous")
    if text(greeting, "name") != one.target:
        return replace(one, outcome="other host", detail=text(greeting, "name") or "another host")
    return replace(one, outcome="ok")


def read_greeting(sock: socket.socket, timeout_s: float) -> dict[str, Fact]:
    """Return the line with which a host greets, and after which it waits for orders; OSError or GoneError: none has come."""
    end_s, greeting = time.monotonic() + timeout_s, b""
    while b"\n" not in greeting:
        data = receive_until(sock, end_s, _MOST_GREETING_BYTES)
        if not data:
            raise GoneError("it closed the connection")
        greeting += data
        if b"\n" not in greeting and len(greeting) >= _MOST_GREETING_BYTES:
            raise StrangerError(f"it sent {greeting[:40]!r}")
    return decode(greeting.partition(b"\n")[0])


def receive_until(sock: socket.socket, end_s: float, most: int) -> bytes:
    """Return what arrives next; TimeoutError at a time of the monotonic clock, however often a few bytes have come before."""
    if (left_s := end_s - time.monotonic()) <= 0:
        raise TimeoutError("it has not come in time")
    sock.settimeout(left_s)
    return sock.recv(most)
