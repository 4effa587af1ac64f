"""The protocol between hosts: lines of JSON over TCP, bounded in length, cleaned and validated before anything is done; nothing in them is run."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Literal, TypeAlias, cast

from rankwise.base.terminal import clean_text
from rankwise.doctor.json_records import read_float, read_int
from rankwise.doctor.probe import Fact

Message: TypeAlias = "dict[str, Fact]"
#: The first word of each connection, and the version of what follows.
GREETING, VERSION = "rankwise-doctor", 4
#: The coordinator says something this often, each host answers, and each side takes the other one for lost after so long a silence.
BEAT_S, SILENCE_S = 1.0, 6.0
#: The text of the error where the other side has ended the connection itself.
CLOSED = "it closed the connection"
#: Why a host has left, as it says itself.
INTERRUPTED = "its doctor was interrupted there"
#: So ``HostReport.lost`` begins for a host whose answers are invalid.
INVALID_ANSWER = "its answer makes no sense"


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
        if _SUSPECT.search(line):
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


def keep_packets_small(listener: socket.socket) -> None:
    """Let the rendezvous pass where large packets are dropped: a listener's connections have small packets both ways."""
    with suppress(OSError, AttributeError):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT_BYTES)


def explain(error: OSError) -> str:
    """Return the system's words for an error."""
    return error.strerror or str(error) or type(error).__name__


Side = Literal["coordinator", "peer"]


def make_nonce() -> str:
    """Return a number that is used once."""
    return secrets.token_hex(16)


def mark(token: str) -> str:
    """Return what identifies a rendezvous in public; empty without a token."""
    return _sign(token, "rendezvous") if token else ""


def prove(token: str, side: Side, peer_nonce: str, coordinator_nonce: str) -> str:
    """Return the proof for these two nonces, which only who knows the token can compute, for one side of the connection."""
    return _sign(token, side, peer_nonce, coordinator_nonce)


def is_proof(proof: str, token: str, side: Side, peer_nonce: str, coordinator_nonce: str) -> bool:
    """Return whether the other side knows the token."""
    return hmac.compare_digest(proof.encode(), prove(token, side, peer_nonce, coordinator_nonce).encode())


def _sign(token: str, *words: str) -> str:
    return hmac.new(token.encode(), "\n".join(words).encode(), hashlib.sha256).hexdigest()


#: A line of JSON without these bytes has nothing unseemly: most lines, and the long ones are worth the look.
_SUSPECT = re.compile(rb"\\[bfru]|[^\x20-\x7e]")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.:@ ()#-]")
_NOT_IN_HOST_NAMES = re.compile(r"[^A-Za-z0-9_.-]")
_MOST_NAME, _MOST_DEEP, _MOST_LINE = 80, 24, 2000


def clean(value: Fact, depth: int = _MOST_DEEP) -> Fact:
    """Return what was sent, without the characters that a terminal would obey; ValueError: it is a list of lists of lists … that nobody needs."""
    if not depth:
        raise ValueError("it sends lists nested without end")
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, list):
        return [clean(one, depth - 1) for one in value]
    if isinstance(value, dict):
        return {clean_text(key): clean(one, depth - 1) for key, one in value.items()}
    return value


def one_line(message: str, most: int = _MOST_LINE) -> str:
    """Return a text as one line, that can't look like anything but what it stands in."""
    return " ".join(clean_text(message).split())[:most]


def clean_name(message: str) -> str:
    """Return a host's or an interface's name, of letters that mean nothing to a terminal or in a comment of a shell; may be empty."""
    return _NOT_IN_NAMES.sub("-", message)[:_MOST_NAME].strip()


def clean_host_name(message: str) -> str:
    """Return a name as it stands in /etc/hosts; what stands in a command must be no more than a word."""
    return _NOT_IN_HOST_NAMES.sub("-", message)[:_MOST_NAME].lstrip("-")
