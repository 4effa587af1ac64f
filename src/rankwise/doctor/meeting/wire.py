"""What hosts send each other: lines of JSON over TCP, bounded in length, and nothing that anybody would run."""

from __future__ import annotations

import json
import math
import socket
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias, cast, final

from rankwise.doctor.meeting.border import clean, is_suspect

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwise.doctor.reading import Fact

Message: TypeAlias = "dict[str, Fact]"
#: The first word of each connection, and the version of what follows.
GREETING, VERSION = "rankwise-doctor", 1
#: Each side says something this often, and takes the other one for dead after so long a silence.
BEAT_S, SILENCE_S = 1.0, 6.0
#: The text of the error where the other side has ended the connection itself.
CLOSED = "it closed the connection"
#: Why a host has left that said so itself.
INTERRUPTED = "its doctor was interrupted there"
#: So long a line may be: from somebody unknown, and from a host of the meeting.
_FIRST_BYTES, _MOST_BYTES = 1 << 16, 64 << 20
_READ_BYTES = 1 << 18
_MOST_WHOLE = 1 << 53
#: Bytes in a packet of the meeting: so small that it passes where larger ones are dropped in silence.
_SEGMENT_BYTES = 1200


class GoneError(Exception):
    """The other side is gone, or says what it should not; the text tells which."""


class StrangerError(GoneError):
    """Somebody else answers: no doctor of rankwise."""


class SilentError(GoneError):
    """Somebody has opened, and never said a word: a program that is no doctor, or one that is frozen."""


def text(message: Mapping[str, Fact], key: str) -> str:
    """Return a text of a message; empty if there is none."""
    value = message.get(key)
    return value if isinstance(value, str) else ""


def number(message: Mapping[str, Fact], key: str) -> float:
    """Return a number of a message; 0 if there is none, or none that can be reckoned with."""
    value = message.get(key)
    if isinstance(value, int):
        return float(max(-_MOST_WHOLE, min(value, _MOST_WHOLE)))
    return value if isinstance(value, float) and math.isfinite(value) else 0.0


def whole(message: Mapping[str, Fact], key: str) -> int | None:
    """Return a whole number of a message, or None."""
    value = message.get(key)
    return value if isinstance(value, int) and abs(value) <= _MOST_WHOLE else None


def entries(message: Mapping[str, Fact], key: str) -> list[Fact]:
    """Return a list of a message; empty if there is none."""
    value = message.get(key)
    return value if isinstance(value, list) else []


def parts(message: Mapping[str, Fact], key: str) -> list[Message]:
    """Return those entries of a list that are messages themselves."""
    return [one for one in entries(message, key) if isinstance(one, dict)]


def texts(message: Mapping[str, Fact], key: str) -> tuple[str, ...]:
    """Return a list of texts."""
    return tuple(str(one) for one in entries(message, key))


def encode(message: Mapping[str, Fact]) -> bytes:
    """Return a message as a line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Read a line; its texts have nothing in them that a terminal would obey.

    Raises:
        StrangerError: It is no message.
    """
    try:
        message = cast("Fact", json.loads(line))
        if is_suspect(line):
            message = clean(message)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise StrangerError(f"it sent {line[:40]!r}")
    return message


def tune(sock: socket.socket) -> None:
    """Send small messages at once, and hear of a cut cable within seconds."""
    sock.setblocking(False)  # noqa: FBT003 - its only form
    with suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENCE_S * 1000))


def keep_packets_small(sock: socket.socket) -> None:
    """Let a way that drops large packets carry the meeting all the same; to be called before it connects or listens."""
    with suppress(OSError, AttributeError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT_BYTES)


@final
class Wire:
    """One connection that never blocks.

    Args:
        sock: The socket; it is ours from here on.
    """

    def __init__(self, sock: socket.socket) -> None:
        tune(sock)
        self.sock = sock
        self._out: deque[memoryview] = deque()
        self._in = bytearray()
        self._seen = 0
        self.is_known = False

    @property
    def wants_room(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._out)

    @property
    def waiting_bytes(self) -> int:
        """How much waits to be sent."""
        return sum(map(len, self._out))

    def send(self, line: bytes) -> None:
        """Send a line, or as much of it as there is room for.

        Raises:
            GoneError: The other side is gone.
        """
        self._out.append(memoryview(line))
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as there is room.

        Raises:
            GoneError: The other side is gone.
        """
        try:
            while self._out:
                sent = self.sock.send(self._out[0])
                if sent < len(self._out[0]):
                    self._out[0] = self._out[0][sent:]
                    return
                self._out.popleft()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            raise GoneError(explain(error)) from error

    def receive(self) -> list[Message]:
        """Return the messages that have come; none if nothing is whole yet.

        Raises:
            GoneError: The other side is gone, and has left no message that was not returned.
            StrangerError: It is no doctor.
        """
        end = self._read()
        messages = []
        while (cut := self._in.find(b"\n", self._seen)) >= 0:
            messages.append(decode(bytes(self._in[:cut])))
            del self._in[: cut + 1]
            self._seen = 0
        self._seen = len(self._in)
        if self._seen > (_MOST_BYTES if self.is_known else _FIRST_BYTES):
            raise StrangerError(f"it sends a line without an end, which begins with {bytes(self._in[:40])!r}")
        if end and not messages:
            raise (
                StrangerError(f"it sent {bytes(self._in[:40])!r}") if self._in and not self.is_known else end
            )
        return messages

    def close(self) -> None:
        """Close it."""
        self.sock.close()

    def _read(self) -> GoneError | None:
        try:
            # One read for each look: a host that sends much must not keep the others waiting.
            data = self.sock.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            return GoneError(explain(error))
        self._in += data
        return None if data else GoneError(CLOSED)


def explain(error: OSError) -> str:
    """Return the system's words for an error."""
    return error.strerror or str(error) or type(error).__name__
