"""Addresses of this host, and towards others; the helper process loads this file by its path."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

#: torch's, where the endpoint names none.
_DEFAULT_PORT = 29400


def split(endpoint: str) -> tuple[str, str]:
    """Return a host and its port; ``[fe80::1]:29500`` is one of IPv6, and the port may be left out."""
    host, separator, port = endpoint.rpartition(":")
    return (host.strip("[]"), port) if separator and port.isdecimal() else (endpoint.strip("[]"), "")


def locate(endpoint: str) -> tuple[str, int]:
    """Return the host and port of a rendezvous; torch's port where the endpoint names none."""
    host, port = split(endpoint)
    return host, int(port or _DEFAULT_PORT)


def look_up(host: str, port: str = "") -> list[Any]:
    """Return what getaddrinfo knows of a host; nothing if it knows none."""
    try:
        return socket.getaddrinfo(host, int(port) if port.isdecimal() else None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return []


def find_address_towards(found: list[Any]) -> str | None:
    """Return the address of this host from which it would send to the first that can be reached of those that were found."""
    for family, kind, _, _, address in found:
        with socket.socket(family, kind) as probe:  # connecting sends nothing; it asks the routing table
            try:
                probe.connect(address)
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return None


def is_here(found: Any) -> bool:
    """Tell whether an address that was found is this host's."""
    family, kind, _, _, address = found
    try:
        with socket.socket(family, kind) as probe:  # a host without IPv6 has no such socket
            probe.bind((address[0], 0, *address[2:]))
    except OSError:
        return False
    return True


def listens_at(port: int) -> bool:
    """Tell whether this very process listens at a port; False where the system does not tell."""
    sockets = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                sockets.add(f"socket:[{fields[9]}]")
    return any(_read_link(one) in sockets for one in Path("/proc/self/fd").glob("*")) if sockets else False


def list_own(orders: dict[str, Any]) -> list[str]:
    """Return the addresses at which other nodes may reach this one: that by which it reaches the endpoint, and its name's."""
    host, port = split(orders["endpoint"])
    own = orders["local_addr"] or (find_address_towards(look_up(host, port)) if host else None)
    return list(dict.fromkeys(one for one in (own, socket.gethostname()) if one))


def is_served_here(orders: dict[str, Any]) -> bool:
    """Tell whether this process serves the store of the rendezvous: of several launchers on one host one does."""
    if "serving_node" in orders:
        return bool(orders["serving_node"])
    return listens_at(locate(orders["endpoint"])[1])


def _read_link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""
