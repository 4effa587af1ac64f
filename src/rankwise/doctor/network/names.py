"""What is an address, what a name, and what only looks like one; what ``/etc/hosts`` must say."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from typing import final

from rankwise.base.deadline import OverdueError, call_within
from rankwise.engine.node_addresses import is_here


def is_own(name: str) -> bool:
    """Return whether a name's address is one of ours: only then can it be bound."""
    try:
        found = call_within(5.0, lambda: socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError, OverdueError):
        return False
    return any(map(is_here, found))


def is_loopback_address(ip: str) -> bool:
    """Return whether an address means the host that uses it; False for what is no address."""
    return is_address(ip) and ipaddress.ip_address(ip.partition("%")[0]).is_loopback


def is_address(text: str) -> bool:
    """Return whether a text is an address and no name."""
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True


def is_plain(text: str) -> bool:
    """Return whether a text has only signs that names and addresses of hosts have: what else there is must not come into a command."""
    return re.fullmatch(r"[\w.:][\w.:%-]*", text) is not None


def map_name(name: str, address: str) -> str:
    """Return, for a fix, what makes a name lead to an address, and nowhere else."""
    if not is_plain(f"{name}{address}"):
        whose = name if is_plain(name) else "this host's own name"
        return f"# in /etc/hosts: {address} is the address of {whose}"
    return f"# in /etc/hosts, {name} must stand in one line only: {address} {name}"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AddressMistake:
    """A text that is more than a host's name: a port, a scheme, blanks or brackets beside it. No rank finds a host by it.

    Attributes:
        what: The text, and that it is no name.
        host: The host that is meant; empty if it is not known.
        port: The port that stands in the text; None if there is none.
    """

    what: str
    host: str
    port: int | None = None


def find_mistake(text: str) -> AddressMistake | None:
    """Return what a text is beside the name or address of a host; None if nothing."""
    if not text or _is_host(text):
        return None
    bare, port = text.strip(), None
    if not _is_host(bare):
        found = re.fullmatch(r"(?:\w+://)?\[?([\w.:-]+?)\]?(?::(\d*))?/?", bare, re.ASCII)
        bare, port = (found[1], int((found[2] or "").lstrip("0")[:6] or 0)) if found else ("", None)
    host = bare if _is_host(bare) else ""
    # Nobody sees a blank at an end.
    shown = text if text.isprintable() and " " not in text else repr(text)
    says = "is more than the name of a host" if host else "is not a host name"
    return AddressMistake(what=f"{shown} {says}", host=host, port=port if port and port < 1 << 16 else None)


def _is_host(text: str) -> bool:
    return is_address(text) or re.fullmatch(r"[\w.][\w.-]*", text) is not None


def write_remedy(mistake: AddressMistake, port: int | None) -> str:
    """Return the command that sets MASTER_ADDR right, and MASTER_PORT (which is ``port`` now) where the port stood in the address alone."""
    if not mistake.host:
        return "export MASTER_ADDR=…  # the name or an address of the first host"
    command = f"export MASTER_ADDR={mistake.host}"
    if mistake.port is None:
        return command
    if port is None:
        return f"{command} MASTER_PORT={mistake.port}  # a port belongs in MASTER_PORT"
    if port == mistake.port:
        return f"{command}  # its port is in MASTER_PORT"
    return f"{command}  # MASTER_PORT is {port}; if {mistake.port} is meant: export MASTER_PORT={mistake.port}"
