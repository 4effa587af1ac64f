"""The address of the rendezvous, and the interface of this host that the ranks should use."""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from rankwise.base.host import is_loopback, is_unspecified
from rankwise.doctor.network.interfaces import choose_best
from rankwise.doctor.network.names import is_loopback_address

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.doctor.host import Host
    from rankwise.doctor.network.interfaces import Interface

#: Above this, one name is taken for a slip of the other one.
_ALIKE = 0.6


def find_master(host: Host) -> tuple[str, int | None]:
    """Return the name and the port of the rendezvous: the job's, else those of the environment; empty and None if not told."""
    # Launchers' flags may have an IPv6 address in brackets; what else is wrong with a name, the probe of the address tells.
    text = host.env.get("MASTER_PORT", "").strip()
    port = host.job.master_port or (int(text) if text.isascii() and text.isdecimal() else None)
    return (host.job.master_addr or host.env.get("MASTER_ADDR", "")).strip().strip("[]"), port


def has_several_hosts(host: Host) -> bool:
    """Return whether the job runs on more hosts than this one."""
    return host.job.num_nodes > 1


def suggest_interface(host: Host, interfaces: Sequence[Interface]) -> Interface | None:
    """Return the interface on which the ranks should meet here, best one in the master's network; None if there is none."""
    name, _ = find_master(host)
    near = () if not name or is_loopback(name) or is_unspecified(name) else host.lookup(name)
    return choose_best(interfaces, near=[ip for ip in near if not is_loopback_address(ip)])


def suggest_name(host: Host, interfaces: Sequence[Interface], near: str = "") -> str:
    """Return the name of the interface to take; of those that are alike to what was typed, if something was; empty if there is none."""
    best = suggest_interface(host, interfaces)
    typed = near.strip("^= \t'\"")
    usable = [
        one for one in interfaces if one.is_up and one.addresses and one.kind not in {"loopback", "container"}
    ]
    ordered = [best.name] if best else []
    ordered += [one.name for one in usable if one is not best]
    scores = {name: SequenceMatcher(None, typed, name).ratio() for name in ordered}
    alike = [
        name for name, score in scores.items() if typed and score == max(scores.values()) and score >= _ALIKE
    ]
    return next(iter([*alike, *(ordered if best else [])]), "")


def describe_interface(one: Interface) -> str:
    """Name an interface with its first address and its kind: ``docker0 (172.17.0.1, container)``."""
    addresses = one.reachable or one.addresses
    info = [addresses[0].ip] if addresses else ["no address"]
    if one.kind != "ethernet":
        info.append("VPN" if one.kind == "vpn" else one.kind)
    return f"{one.name} ({', '.join(info)})"
