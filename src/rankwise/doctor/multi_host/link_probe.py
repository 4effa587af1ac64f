"""The connecting side of a host: it tries the links to all others at once, and checks that the right host answers."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from rankwise.base.clock import Clock
from rankwise.doctor.multi_host.cluster_report import Outcome, Plane
from rankwise.doctor.multi_host.wire import GREETING, GoneError, StrangerError, decode, explain, text, whole
from rankwise.doctor.probe import Fact

#: A first packet that is lost is sent again after 1 s and after 3 s.
_OPEN_S, _AT_ONCE = 3.5, 128
_MOST_GREETING_BYTES = 1024
_RESET = {errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE}
#: At once, these come from this host's own routing table; those of a router, or a firewall, come later.
_NO_ROUTE = {errno.ENETUNREACH, errno.ENETDOWN, errno.EAFNOSUPPORT}
#: The last one is Windows'.
_UNDER_WAY = {0, errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EAGAIN, errno.EINTR, 10035}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkAttempt:
    """A connection to be tried, to the host with a number, and how it went."""

    number: int
    plane: Plane
    address: str
    port: int
    outcome: Outcome = "not tried"
    detail: str = ""


def open_socket(address: str) -> socket.socket:
    """Return a socket of an address's family that does not block; OSError: there is no descriptor left."""
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)  # noqa: FBT003 - its only form
    return sock


def begin_connect(sock: socket.socket, address: str, port: int) -> None:
    """Begin to connect; OSError: it fails at once."""
    code = sock.connect_ex((address, port))
    if code not in _UNDER_WAY:
        raise OSError(code, os.strerror(code))


async def wait_ready(sock: socket.socket, timeout_s: float, *, to_write: bool = False) -> None:
    """Wait until a socket can be read from, or written to; TimeoutError: it can't in time."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def settle(*, is_late: bool = False) -> None:
        if not ready.done():
            ready.set_exception(TimeoutError()) if is_late else ready.set_result(None)

    # A process that was stopped meanwhile sees what has come before it sees that its time is over: the loop looks at
    # sockets first.
    (loop.add_writer if to_write else loop.add_reader)(sock, settle)
    timer = loop.call_later(max(0.0, timeout_s), partial(settle, is_late=True))
    try:
        await ready
    finally:
        timer.cancel()
        (loop.remove_writer if to_write else loop.remove_reader)(sock)


async def connect(address: str, port: int, timeout_s: float) -> socket.socket:
    """Return a connection that is open; OSError: it can't be opened, or not in time."""
    sock = open_socket(address)
    try:
        begin_connect(sock, address, port)
        await wait_connected(sock, timeout_s)
    except BaseException:
        sock.close()
        raise
    return sock


async def read_exactly(sock: socket.socket, count: int, clock: Clock, until_s: float) -> bytes:
    """Return so many bytes from a socket; TimeoutError if they have not come in time, OSError if the connection has ended."""
    found = b""
    while len(found) < count:
        await wait_ready(sock, until_s - clock.monotonic())
        data = sock.recv(count - len(found))
        if not data:
            raise ConnectionResetError("it closed the connection")
        found += data
    return found


async def wait_connected(sock: socket.socket, timeout_s: float) -> None:
    """Wait until a connection is open; OSError: it can't be opened, or not in time."""
    await wait_ready(sock, timeout_s, to_write=True)
    if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise OSError(code, os.strerror(code))


def judge_error(error: OSError) -> Outcome:
    """Return the outcome that a system's error means."""
    if error.errno == errno.ECONNREFUSED:
        return "refused"
    if error.errno in _RESET:
        return "reset"
    return "timeout" if error.errno == errno.ETIMEDOUT else "unreachable"


async def try_all(targets: Sequence[LinkAttempt], *, mark: str, clock: Clock, greeting_s: float) -> list[LinkAttempt]:
    """Connect to all targets, many at a time, and see who answers; the results are in their order.

    A host that answers must send the mark of the rendezvous, within ``greeting_s``.
    """
    gate = asyncio.Semaphore(_AT_ONCE)

    async def try_one(target: LinkAttempt) -> LinkAttempt:
        async with gate:
            return await _try(target, mark, clock, greeting_s)

    return list(await asyncio.gather(*map(try_one, targets)))


async def _try(one: LinkAttempt, mark: str, clock: Clock, greeting_s: float) -> LinkAttempt:
    try:
        sock = open_socket(one.address)
    except OSError as error:
        return replace(one, detail=explain(error))
    with sock:
        try:
            begin_connect(sock, one.address, one.port)
        except OSError as error:
            # Where IPv6 is switched off, there is no address of our own to connect from. With IPv4 it is the ports that
            # have run out.
            is_off = error.errno == errno.EADDRNOTAVAIL and ":" in one.address
            outcome: Outcome = "no route" if is_off or error.errno in _NO_ROUTE else judge_error(error)
            return replace(one, outcome=outcome, detail=explain(error))
        silence = f"no answer within {_OPEN_S:g} s"
        try:
            await wait_connected(sock, _OPEN_S)
            silence = f"it accepted, but sent nothing within {greeting_s:.0f} s"
            greeting, outcome, detail = await read_greeting(sock, clock, greeting_s), "ok", ""
            if GREETING not in greeting or text(greeting, "mark") != mark:
                outcome, detail = "other host", "it is not part of this rendezvous"
            elif whole(greeting, "number") != one.number:
                outcome, detail = "other host", text(greeting, "name") or "another host"
        except OSError as error:
            outcome, detail = ("timeout", silence) if error.errno is None else (judge_error(error), explain(error))
        except GoneError as error:
            outcome, detail = "other host" if isinstance(error, StrangerError) else "reset", str(error)
        return replace(one, outcome=outcome, detail=detail)


async def read_greeting(sock: socket.socket, clock: Clock, timeout_s: float) -> dict[str, Fact]:
    """Return the line with which a host greets, and after which it waits for orders; OSError or GoneError: none has come."""
    until_s, greeting = clock.monotonic() + timeout_s, b""
    while b"\n" not in greeting:
        await wait_ready(sock, until_s - clock.monotonic())
        data = sock.recv(_MOST_GREETING_BYTES)
        if not data:
            raise GoneError("it closed the connection")
        greeting += data
        if b"\n" not in greeting and len(greeting) >= _MOST_GREETING_BYTES:
            raise StrangerError(f"it sent {greeting[:40]!r}")
    return decode(greeting.partition(b"\n")[0])
