"""The host's network interfaces: what each is, and which of them Gloo and NCCL will take."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rankwise.base.deadline import OverdueError, call_within

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.doctor.host import Host

Kind = Literal["loopback", "ethernet", "infiniband", "wireless", "bridge", "container", "vpn", "virtual"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """An address of an interface: ``10.0.0.7``, in a network of ``prefix`` bits."""

    ip: str
    prefix: int

    @property
    def is_ipv4(self) -> bool:
        """Whether it is one of IPv4."""
        return ":" not in self.ip

    @property
    def is_link_local(self) -> bool:
        """Whether it holds for its cable only."""
        return ipaddress.ip_address(self.ip).is_link_local

    @property
    def network(self) -> str:
        """The network that it stands in: ``10.0.0.0/24``."""
        return str(ipaddress.ip_interface(f"{self.ip}/{self.prefix}").network)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """A network interface.

    Attributes:
        name: ``eth0``.
        kind: What it is: ``container`` is docker0, veth and their kin, ``vpn`` a tunnel, ``virtual`` anything else without hardware.
        addresses: Its addresses; those of IPv4 first.
        mtu: The largest packet in bytes; 0 if it is not told.
        is_up: Whether it carries traffic.
        speed_mbit: As the driver tells; 0 if it does not.
    """

    name: str
    kind: Kind
    addresses: tuple[Address, ...] = ()
    mtu: int = 0
    is_up: bool = True
    speed_mbit: int = 0


def list_interfaces(host: Host) -> tuple[Interface, ...]:
    """Return all interfaces of the host."""
    import psutil  # noqa: PLC0415 - most runs never ask

    stats = psutil.net_if_stats()
    found = []
    for name, told in psutil.net_if_addrs().items():
        addresses = [
            Address(ip=one.address.partition("%")[0], prefix=_count_bits(one.netmask))
            for one in told
            if one.family in {socket.AF_INET, socket.AF_INET6}
        ]
        about = stats.get(name)
        found.append(
            Interface(
                name=name, kind=find_kind(host, name), addresses=tuple(sorted(addresses, key=lambda one: not one.is_ipv4)),
                mtu=about.mtu if about else 0, is_up=bool(about and about.isup), speed_mbit=about.speed if about else 0,
            )
        )  # fmt: skip
    return tuple(found)


def find_kind(host: Host, name: str) -> Kind:
    """Tell what an interface is, by what the kernel says of it, and by the names that programs give theirs."""
    folder = f"/sys/class/net/{name}"
    number = host.read(f"{folder}/type")
    if number == "772" or name == "lo":
        return "loopback"
    if number == "32":
        return "infiniband"
    if name.startswith(
        (
            "docker",
            "veth",
            "cni",
            "flannel",
            "cali",
            "virbr",
            "lxc",
            "lxdbr",
            "podman",
            "br-",
            "kube",
            "nodelocaldns",
        )
    ):
        return "container"
    if host.has(f"{folder}/tun_flags") or name.startswith(
        ("tun", "tap", "wg", "tailscale", "zt", "ppp", "utun", "ipsec", "vpn", "nordlynx")
    ):
        return "vpn"
    if host.has(f"{folder}/bridge"):
        return "bridge"
    if host.has(f"{folder}/wireless") or host.has(f"{folder}/phy80211"):
        return "wireless"
    if number and not host.has(f"{folder}/device"):
        return "virtual"
    return "ethernet"


def find_gloo_address(host: Host, interfaces: Sequence[Interface]) -> str:
    """Return the address at which Gloo will listen here: GLOO_SOCKET_IFNAME's, else that of the host's name, else loopback."""
    named = host.env.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip()
    if named:
        return next((one.addresses[0].ip for one in interfaces if one.name == named and one.addresses), "")
    own = {address.ip for one in interfaces for address in one.addresses}
    return next((ip for ip in resolve(host.name) if ip in own or ip.startswith("127.")), "127.0.0.1")


def resolve(name: str, *, timeout_s: float = 5.0) -> tuple[str, ...]:
    """Return the addresses of a name as a rank gets them, in their order; none if it has none, or no name server answers."""

    def ask() -> tuple[str, ...]:
        told = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return tuple(dict.fromkeys(str(one[4][0]).partition("%")[0] for one in told))

    try:
        return call_within(timeout_s, ask)
    except (OSError, UnicodeError, OverdueError):
        return ()


def _count_bits(netmask: str | None) -> int:
    if not netmask:
        return 0
    return int(ipaddress.ip_address(netmask)).bit_count()
