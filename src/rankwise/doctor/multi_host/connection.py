"""A connection to another host, on asyncio streams; and calls that block, beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import TypeVar, final

from rankwise.doctor.multi_host import wire
from rankwise.doctor.multi_host.wire import GoneError, Message, SilentError, StrangerError
from rankwise.doctor.probe import Fact

Result = TypeVar("Result")
#: So long a line may be: from somebody unknown, and from a host of the rendezvous.
_FIRST_BYTES, _MOST_BYTES = 1 << 16, 64 << 20
_READ_BYTES, _GRACE_S = 1 << 18, 0.5


@final
class Connection:
    """Messages to and from one other host: each is a line of JSON. The streams are ours from here on."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock = writer.get_extra_info("socket")
        wire.tune(sock)
        # A socket for both families shows addresses of IPv4 within IPv6.
        self.address, self.local_address = (
            str(*name[:1]).removeprefix("::ffff:").partition("%")[0] for name in (sock.getpeername(), sock.getsockname())
        )  # fmt: skip
        self._reader, self._writer = reader, writer
        self._buffer, self._seen = bytearray(), 0
        #: Whether the other side is known to be a doctor: then its messages may be long.
        self.is_known = False

    def send(self, message: Mapping[str, Fact] | bytes) -> None:
        """Send a message, or the line of one; if the connection has ended, `receive` raises."""
        if not self._writer.is_closing():
            self._writer.write(message if isinstance(message, bytes) else wire.encode(message))

    async def receive(self, timeout_s: float) -> Message:
        """Return the next message.

        Raises:
            GoneError: The other side is gone, and has left no message that was not returned; or nothing has arrived for
                so long.
            SilentError: Nothing has ever arrived.
            StrangerError: It is no doctor.
        """
        while (end := self._buffer.find(b"\n", self._seen)) < 0:
            self._seen = len(self._buffer)
            if self._seen > (_MOST_BYTES if self.is_known else _FIRST_BYTES):
                start = bytes(self._buffer[:40])
                raise StrangerError(f"it sends a line without an end, which begins with {start!r}")
            data = await self._read(timeout_s)
            if not data:
                if self._buffer and not self.is_known:
                    raise StrangerError(f"it sent {bytes(self._buffer[:40])!r}")
                raise GoneError(wire.CLOSED)
            self._buffer += data
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._seen = 0
        return wire.decode(line)

    async def _read(self, timeout_s: float) -> bytes:
        # What arrived while this process was stopped is read within the second time.
        for bound_s in (timeout_s, _GRACE_S):
            try:
                return await asyncio.wait_for(self._reader.read(_READ_BYTES), bound_s)
            except asyncio.TimeoutError:
                continue
            except OSError as error:
                raise GoneError(f"its connection ended: {wire.explain(error)}") from error
        if not self.is_known:
            raise SilentError(f"it accepted, but sent nothing within {timeout_s:.0f} s")
        raise GoneError(f"nothing received for {timeout_s:.0f} s: it is frozen, or its cable is cut")

    def close(self) -> None:
        """Close it, after what waits to be sent."""
        self._writer.close()

    async def wait_closed(self, timeout_s: float) -> None:
        """Close it, and wait until what was to be sent has left; what does not leave in time is dropped."""
        self.close()
        try:
            await asyncio.wait_for(self._writer.wait_closed(), timeout_s)
        except (OSError, asyncio.TimeoutError):
            self._writer.transport.abort()


async def in_thread(function: Callable[[], Result]) -> Result:
    """Call a function that blocks in a thread of its own, which nobody waits for at the end: it may block for ever."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def run() -> None:
        try:
            settle = partial(future.set_result, function())
        except BaseException as error:  # noqa: BLE001 - raised again, where it is awaited
            settle = partial(future.set_exception, error)
        with suppress(RuntimeError):  # the loop has ended: nobody waits any more
            loop.call_soon_threadsafe(lambda: None if future.done() else settle())

    Thread(target=run, name="rankwise-doctor", daemon=True).start()
    return await future
