"""At which address Gloo will listen on this host, by the rules of torch 2.13 (ProcessGroupGloo.cpp, gloo/transport/tcp/device.cc)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.doctor.network.names import is_loopback_address

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.doctor.host import Host
    from rankwise.doctor.network.interfaces import Interface

#: Where Gloo listens if the host's name leads to none of its addresses; torch says so in a warning.
FALLBACK = "127.0.0.1"


def split_names(value: str) -> tuple[str, ...]:
    """Return the interfaces that a value of GLOO_SOCKET_IFNAME names, letter by letter as torch splits it; none if torch ignores it."""
    # torch ignores values of one letter, and an empty name at the end.
    return tuple(value.removesuffix(",").split(",")) if len(value) > 1 else ()


def find_gloo_address(host: Host, interfaces: Sequence[Interface]) -> str:
    """Return the address at which Gloo will listen here; empty if it finds none, and fails.

    It is the first address of the (first) interface that GLOO_SOCKET_IFNAME names. Without that variable it is the first address
    of the host's name that a socket can be bound to, and the loopback address if there is none.
    """
    named = split_names(host.env.get("GLOO_SOCKET_IFNAME", ""))
    if named:
        return next((one.addresses[0].ip for one in interfaces if one.name == named[0] and one.addresses), "")
    return next((ip for ip in host.lookup(host.name) if can_bind(ip, interfaces)), FALLBACK)


def can_bind(ip: str, interfaces: Sequence[Interface]) -> bool:
    """Return whether a socket here can be bound to an address: it is one of ours, or one of loopback."""
    own = {address.ip for one in interfaces for address in one.addresses}
    return ip in own or (ip.startswith("127.") and is_loopback_address(ip))


def find_interface(ip: str, interfaces: Sequence[Interface]) -> Interface | None:
    """Return the interface that has an address; that of loopback for any of its addresses."""
    for one in interfaces:
        if any(address.ip == ip for address in one.addresses):
            return one
    return (
        next((one for one in interfaces if one.kind == "loopback"), None) if is_loopback_address(ip) else None
    )
