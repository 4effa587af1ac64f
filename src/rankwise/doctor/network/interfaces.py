"""The host's network interfaces, what each is, and on which of them the ranks should meet."""

from __future__ import annotations

import ipaddress
import re
import socket
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Literal, TypeAlias

from rankwise.base.host import is_loopback, is_unspecified
from rankwise.doctor.network.names import is_loopback_address

if TYPE_CHECKING:
    from rankwise.doctor.host import Host

Kind = Literal["loopback", "ethernet", "infiniband", "wireless", "bridge", "container", "vpn", "virtual"]

_IFF_UP = 1
_LOOPBACK, _INFINIBAND, _TUNNELS = "772", "32", {"768", "769", "776", "778", "65534"}
#: docker and podman call their networks by hexadecimal numbers; ``br-ex`` and the like are bridges of the host itself.
_CONTAINER = re.compile(
    r"docker|veth|cni|flannel|cali|cilium|weave|antrea|virbr|vmnet|vboxnet|lxc|lxdbr|incusbr|podman|kube|nodelocaldns|vxlan\.|br-[0-9a-f]{12}$"
)
_VPN = re.compile(r"tun\d|tap\d|wg|tailscale|zt|ppp|utun|ipsec|vpn|nordlynx")
_SOLID = ("ethernet", "infiniband", "bridge", "wireless", "virtual")


#: An address of an interface, and the network in which it stands.
Address: TypeAlias = ipaddress.IPv4Interface | ipaddress.IPv6Interface


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """A network interface; its addresses of IPv4 come first.

    ``kind``: ``container`` is docker0, veth and their kin, ``vpn`` a tunnel, ``virtual`` anything else without
    hardware.
    """

    name: str
    kind: Kind
    addresses: tuple[Address, ...] = ()
    is_up: bool = True

    @property
    def reachable(self) -> tuple[Address, ...]:
        """Those of its addresses that other hosts may reach: not of loopback, and not for its cable only."""
        if self.kind == "loopback":
            return ()
        return tuple(one for one in self.addresses if not one.is_link_local)

    @property
    def networks(self) -> tuple[str, ...]:
        """The networks in which other hosts may be: those of IPv4, or of IPv6 where it has nothing else."""
        found = [one for one in self.reachable if one.version == 4] or self.reachable
        return tuple(str(one.network) for one in found)

    @property
    def is_candidate(self) -> bool:
        """Whether ranks of several hosts may meet on it: it is up, has an address, and is neither a container's nor a VPN's."""
        return self.is_up and self.kind in _SOLID and bool(self.reachable)


def read_interfaces(host: Host) -> tuple[Interface, ...]:
    """Query the system for all interfaces; those with an address of IPv4 come first, by their numbers."""
    import psutil  # noqa: PLC0415 - most runs never ask

    stats = psutil.net_if_stats()
    found = []
    for name, info in psutil.net_if_addrs().items():
        shown = [one for one in info if one.family in {socket.AF_INET, socket.AF_INET6}]
        addresses = [
            ipaddress.ip_interface(
                (one.address.split("%")[0], int(ipaddress.ip_address(one.netmask or "::")).bit_count())
            )
            for one in shown
        ]
        about = stats.get(name)
        # Only Linux has files that say so, and other systems call it lo0 or by a whole sentence.
        is_own = any(one.is_loopback for one in addresses)
        found.append(
            Interface(
                name=name, kind="loopback" if is_own else find_kind(host, name), addresses=tuple(sorted(addresses, key=lambda one: one.version)),
                is_up=about is not None and _is_up(host, name, about.flags, is_running=about.isup),
            )
        )  # fmt: skip
    return tuple(found)


def _is_up(host: Host, name: str, flags: str, *, is_running: bool) -> bool:
    """Return whether an interface was put up and has a carrier; the system's "running" comes up to a second after both."""
    info = host.read(f"/sys/class/net/{name}/flags")
    if info.startswith("0x"):
        return bool(int(info, 16) & _IFF_UP) and host.read(f"/sys/class/net/{name}/carrier") != "0"
    # A network namespace has no such files until /sys is mounted anew in it.
    return is_running or (sys.platform == "linux" and "up" in flags.split(","))


def find_kind(host: Host, name: str) -> Kind:
    """Report what an interface is, by what the kernel says of it, and by the names that programs give theirs."""
    folder = f"/sys/class/net/{name}"
    number = host.read(f"{folder}/type")
    signs: tuple[tuple[Kind, bool], ...] = (
        ("loopback", number == _LOOPBACK or name == "lo"),
        ("infiniband", number == _INFINIBAND),
        ("container", _CONTAINER.match(name) is not None),
        ("vpn", number in _TUNNELS or host.has(f"{folder}/tun_flags") or _VPN.match(name) is not None),
        ("bridge", host.has(f"{folder}/bridge")),
        ("wireless", host.has(f"{folder}/wireless") or host.has(f"{folder}/phy80211")),
        ("virtual", bool(number) and not host.has(f"{folder}/device")),
    )
    return next((kind for kind, is_so in signs if is_so), "ethernet")


def choose_best(interfaces: Iterable[Interface], near: Iterable[str] = ()) -> Interface | None:
    """Return the interface on which the hosts of a job should meet, best one in the network of a ``near`` address; None if there is none."""
    others = [ipaddress.ip_address(ip) for ip in near]

    def rank(one: Interface) -> tuple[bool, int, bool]:
        is_near = any(ip in address.network for ip in others for address in one.reachable)
        return not is_near, _SOLID.index(one.kind), not any(address.version == 4 for address in one.reachable)

    return min((one for one in interfaces if one.is_candidate), key=rank, default=None)


#: Above this, one name is taken for a slip of the other one.
_ALIKE = 0.6


def find_master(host: Host) -> tuple[str, int | None]:
    """Return the name and the port of the rendezvous: the job's, else those of the environment; empty and None if not told."""
    # Launchers' flags may have an IPv6 address in brackets; what else is wrong with a name, the probe of the address
    # tells.
    text = host.env.get("MASTER_PORT", "").strip()
    port = host.job.master_port or (int(text) if text.isascii() and text.isdecimal() else None)
    return (host.job.master_addr or host.env.get("MASTER_ADDR", "")).strip().strip("[]"), port


def suggest_interface(host: Host, interfaces: Sequence[Interface]) -> Interface | None:
    """Return the interface on which the ranks should meet here, best one in the master's network; None if there is none."""
    name, _ = find_master(host)
    near = () if not name or is_loopback(name) or is_unspecified(name) else host.lookup(name)
    return choose_best(interfaces, near=[ip for ip in near if not is_loopback_address(ip)])


def suggest_name(host: Host, interfaces: Sequence[Interface], near: str = "") -> str:
    """Return the name of the interface to take; the one that is most like what was typed, if one is; empty if there is none."""
    best, typed = suggest_interface(host, interfaces), near.strip("^= \t'\"")
    own = [best.name] if best else []
    usable = (one for one in interfaces if one.is_up and one.addresses and one.kind not in {"loopback", "container"})
    scores = {name: SequenceMatcher(None, typed, name).ratio() for name in [*own, *(one.name for one in usable)]}
    alike = [name for name, score in scores.items() if score >= _ALIKE]
    return max(alike or own, key=lambda name: scores[name], default="")


def describe_interface(one: Interface) -> str:
    """Name an interface with its first address and its kind: ``docker0 (172.17.0.1, container)``."""
    addresses = one.reachable or one.addresses
    info = [str(addresses[0].ip)] if addresses else ["no address"]
    if one.kind != "ethernet":
        info.append("VPN" if one.kind == "vpn" else one.kind)
    return f"{one.name} ({', '.join(info)})"
