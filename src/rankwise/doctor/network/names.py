"""The addresses of a name, as a rank gets them, within a bound: a name server that does not answer blocks for half a minute."""

from __future__ import annotations

import ipaddress
import re
import socket

from rankwise.base.deadline import OverdueError, call_within


def resolve(name: str, *, timeout_s: float = 5.0) -> tuple[str, ...]:
    """Return the addresses of a name as a rank gets them, in their order; none if it has none, or no name server answers."""

    def ask() -> tuple[str, ...]:
        info = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return tuple(dict.fromkeys(str(one[4][0]).partition("%")[0] for one in info))

    try:
        return call_within(timeout_s, ask)
    except (OSError, UnicodeError, OverdueError):
        return ()


def is_loopback_address(ip: str) -> bool:
    """Return whether an address means the host that uses it; False for what is no address."""
    try:
        return ipaddress.ip_address(ip.partition("%")[0]).is_loopback
    except ValueError:
        return False


def is_host_name(text: str) -> bool:
    """Return whether a text has only signs that names and addresses of hosts have: what else there is must not come into a command."""
    return re.fullmatch(r"(?!-)[\w.:%\[\]-]+", text) is not None
