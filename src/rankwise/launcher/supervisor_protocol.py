"""What the parent tells the supervisor: one request, one datagram, with descriptors beside it."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

#: Larger than any request; the environment travels only as what differs from ours.
DATAGRAM_BYTES = 1 << 20


@dataclass(slots=True, kw_only=True)
class Request:
    """One request, with the descriptors that came with it."""

    op: str
    tag: str = ""
    argv: list[str] = field(default_factory=list)
    env: dict[str, str | None] = field(default_factory=dict)
    # Descriptors: the first three become the standard streams, each of the others keeps the number given here.
    fds: list[int] = field(default_factory=list)
    number: int = 0
    tree: bool = False
    grace_s: float = 0.0
    # Started deaf to the signals that end jobs: only we decide when it goes.
    deaf: bool = False
    # How the warm server may stand in for a fresh process: "script", "main", or not at all.
    forks: str = ""
    # The request proper is in a memory file, as the last descriptor: too long for a datagram.
    payload: bool = False


def make_supervisor_socket() -> tuple[socket.socket, socket.socket]:
    """Return the parent's and the supervisor's end of a socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, DATAGRAM_BYTES)
    return ours, theirs
