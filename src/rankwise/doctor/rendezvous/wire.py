"""The protocol between hosts: lines of JSON over TCP, bounded in length; nothing in them is ever run."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

from rankwise.doctor.json_records import read_float, read_int
from rankwise.doctor.rendezvous.sanitize import clean, is_suspect

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwise.doctor.probe import Fact


Message: TypeAlias = "dict[str, Fact]"
#: The first word of each connection, and the version of what follows.
GREETING, VERSION = "rankwise-doctor", 3
#: Each side says something this often, and takes the other one for lost after so long a silence.
BEAT_S, SILENCE_S = 1.0, 6.0
#: The text of the error where the other side has ended the connection itself.
CLOSED = "it closed the connection"
#: Why a host has left, as it says itself.
INTERRUPTED = "its doctor was interrupted there"


#: Bytes in a packet of the rendezvous: so small that it passes where larger ones are dropped in silence.
_SEGMENT_BYTES = 1200


class GoneError(Exception):
    """The other side is gone, or sends what it should not; the text says which."""


class StrangerError(GoneError):
    """Somebody else answers: no doctor of rankwise."""


class SilentError(GoneError):
    """The other side has accepted, and never sent anything: another program, or a doctor that is frozen."""


def text(message: Mapping[str, Fact], key: str) -> str:
    """Return a text of a message; empty if there is none."""
    value = message.get(key)
    return value if isinstance(value, str) else ""


def number(message: Mapping[str, Fact], key: str) -> float:
    """Return a number of a message; 0 if there is none, or none that can be reckoned with."""
    return read_float(message.get(key))


def whole(message: Mapping[str, Fact], key: str) -> int | None:
    """Return a whole number of a message, or None."""
    return read_int(message.get(key))


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
    """Read a line; its texts have nothing in them that a terminal would obey; StrangerError: it is no message."""
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
    """Send small messages at once, and notice a cut cable within seconds."""
    sock.setblocking(False)  # noqa: FBT003 - its only form
    with suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENCE_S * 1000))


def keep_packets_small(sock: socket.socket) -> None:
    """Let the rendezvous pass where large packets are dropped; to be called before the socket connects or listens."""
    with suppress(OSError, AttributeError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT_BYTES)


def explain(error: OSError) -> str:
    """Return the system's words for an error."""
    return error.strerror or str(error) or type(error).__name__


Side = Literal["coordinator", "peer"]


def make_nonce() -> str:
    """Return a number that is used once."""
    return secrets.token_hex(16)


def mark(token: str) -> str:
    """Return what identifies a rendezvous in public; empty without a token."""
    return _sign(token, "meeting") if token else ""


def prove(token: str, side: Side, peer_nonce: str, coordinator_nonce: str) -> str:
    """Return the proof for these two nonces, which only who knows the token can compute, for one side of the connection."""
    return _sign(token, side, peer_nonce, coordinator_nonce)


def is_proof(proof: str, token: str, side: Side, peer_nonce: str, coordinator_nonce: str) -> bool:
    """Return whether the other side knows the token."""
    return hmac.compare_digest(proof.encode(), prove(token, side, peer_nonce, coordinator_nonce).encode())


def _sign(token: str, *words: str) -> str:
    return hmac.new(token.encode(), "\n".join(words).encode(), hashlib.sha256).hexdigest()
