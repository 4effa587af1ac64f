"""The listening side of a host: it greets whoever connects with the name of this host, and lets them measure the link."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, final

from rankwise.doctor.rendezvous.wire import GREETING, VERSION, encode, tune

if TYPE_CHECKING:
    from rankwise.base.clock import Clock

#: What a measuring host asks for, and the answer to a stream: the kind, milliseconds (in an answer microseconds), bytes.
ORDER = struct.Struct("!c3xIQ")
PING, STREAM, TAKEN = b"P", b"S", b"T"
#: So long a stream may bring nothing at all before it is said to have stalled.
STALL_S = 2.0
_IDLE_S = 60.0
_READ_BYTES = 1 << 18


@final
class LinkServer:
    """Listens at ports that the kernel chooses.

    Args:
        mark: Of the rendezvous.
        number: Of this host in it.
        name: Of this host.
        clock: Where the time comes from.
    """

    def __init__(self, *, mark: str, number: int, name: str, clock: Clock) -> None:
        self._greeting = encode({GREETING: VERSION, "mark": mark, "number": number, "name": name})
        self._clock = clock
        self._servers: list[asyncio.Server] = []
        self._writers: set[asyncio.StreamWriter] = set()

    async def listen(self, address: str, port: int = 0) -> int:
        """Listen at an address; an empty one means all of them.

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
        server = await asyncio.start_server(self._serve, sock=listener, limit=_READ_BYTES, backlog=1024)
        self._servers.append(server)
        return int(listener.getsockname()[1])

    def close(self) -> None:
        """Close all ports and connections."""
        for server in self._servers:
            server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            # A handler that is cancelled at the end, too, must end quietly: asyncio logs it otherwise (Python 3.11).
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.TimeoutError, asyncio.CancelledError):
                tune(writer.get_extra_info("socket"))
                writer.write(self._greeting)
                while await self._answer(reader, writer):
                    pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Do what is asked for once; return whether more may be asked for."""
        order = await asyncio.wait_for(reader.readexactly(ORDER.size), _IDLE_S)
        kind, bound_ms, most_bytes = ORDER.unpack(order)
        if kind == PING:
            writer.write(order)
        elif kind == STREAM:
            await self._take_stream(reader, writer, bound_ms / 1000, most_bytes)
        return bool(kind == PING)

    async def _take_stream(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bound_s: float, most_bytes: int
    ) -> None:
        begin_s, taken_bytes = self._clock.monotonic(), 0

        async def count() -> None:
            nonlocal taken_bytes
            while taken_bytes < most_bytes and (data := await reader.read(_READ_BYTES)):
                taken_bytes += len(data)

        counting = asyncio.create_task(count())
        try:
            await asyncio.wait({counting}, timeout=bound_s)
            if not taken_bytes:
                await asyncio.wait({counting}, timeout=STALL_S - bound_s)
            took_s = self._clock.monotonic() - begin_s
            writer.write(ORDER.pack(TAKEN, min(int(took_s * 1e6), (1 << 32) - 1), taken_bytes))
        finally:
            counting.cancel()
        with suppress(asyncio.CancelledError):
            await counting
        # What still comes is read, too: else the sender would not receive the answer.
        while await asyncio.wait_for(reader.read(_READ_BYTES), _IDLE_S):
            pass
