"""The listening side of a host: it greets whoever connects with the name of this host, and lets them measure the link."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, final

from rankwise.doctor.rendezvous.link_probe import read_exactly
from rankwise.doctor.rendezvous.wire import GREETING, VERSION, encode, tune

if TYPE_CHECKING:
    from rankwise.base.clock import Clock

#: What a measuring host asks for, and the answer to a stream: the kind, milliseconds (in an answer microseconds), bytes.
ORDER = struct.Struct("!c3xIQ")
PING, STREAM, TAKEN = b"P", b"S", b"T"
#: So long a stream may bring nothing at all before it is said to have stalled.
STALL_S = 2.0
_IDLE_S = 60.0
_READ_BYTES, _READS_AT_ONCE = 1 << 18, 8


@final
class LinkServer:
    """Listens at ports that the kernel chooses, as the host of a name and a number in the rendezvous."""

    def __init__(self, *, mark: str, number: int, name: str, clock: Clock) -> None:
        self._greeting = encode({GREETING: VERSION, "mark": mark, "number": number, "name": name})
        self._clock = clock
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def listen(self, address: str, port: int = 0) -> int:
        """Listen at an address (empty: all of them), and return the port; port 0 lets the system choose; OSError: the address is not ours, or the port is taken."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, port), family=family, backlog=1024)
        listener.setblocking(False)  # noqa: FBT003 - its only form
        self._listeners.append(listener)
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)
        return int(listener.getsockname()[1])

    def close(self) -> None:
        """Close all ports and connections."""
        for task in self._tasks:
            task.cancel()
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # gone already, or there is no descriptor left: the connecting host sees it
            sock, _ = listener.accept()
            task = asyncio.create_task(self._serve(sock))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, sock: socket.socket) -> None:
        with sock, suppress(OSError):
            tune(sock)
            sock.send(self._greeting)
            while await self._answer(sock):
                pass

    async def _answer(self, sock: socket.socket) -> bool:
        """Do what is asked for once; return whether more may be asked for."""
        order = await read_exactly(sock, ORDER.size, self._clock, self._clock.monotonic() + _IDLE_S)
        kind, bound_ms, most_bytes = ORDER.unpack(order)
        if kind == PING:
            sock.send(order)
        elif kind == STREAM:
            await self._take_stream(sock, bound_ms / 1000, most_bytes)
        return bool(kind == PING)

    async def _take_stream(self, sock: socket.socket, bound_s: float, most_bytes: int) -> None:
        """Read for so long, or until so much has come; answer how much came, and in what time."""
        loop = asyncio.get_running_loop()
        begin_s, taken_bytes, buffer = self._clock.monotonic(), 0, bytearray(_READ_BYTES)
        is_full, has_ended = asyncio.Event(), asyncio.Event()

        def read() -> None:
            nonlocal taken_bytes
            try:
                for _ in range(_READS_AT_ONCE):
                    count = sock.recv_into(buffer)
                    taken_bytes += count
                    if not count:
                        raise ConnectionResetError
            except BlockingIOError:
                pass
            except OSError:
                has_ended.set()
                loop.remove_reader(sock)
            if taken_bytes >= most_bytes or has_ended.is_set():
                is_full.set()

        # One registration for the whole stream: one for each read would take longer than the read.
        loop.add_reader(sock, read)
        try:
            await _wait_for(is_full, bound_s)
            if not taken_bytes:  # it may only be late
                await _wait_for(is_full, STALL_S - bound_s)
            took_us = int((self._clock.monotonic() - begin_s) * 1e6)
            sock.send(ORDER.pack(TAKEN, min(took_us, (1 << 32) - 1), taken_bytes))
            # What still comes is read, too: else the sender would not receive the answer.
            await _wait_for(has_ended, _IDLE_S)
        finally:
            loop.remove_reader(sock)


async def _wait_for(event: asyncio.Event, timeout_s: float) -> None:
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), max(0.0, timeout_s))
