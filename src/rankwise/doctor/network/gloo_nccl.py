"""Where Gloo and NCCL will listen on this host, by the rules of torch 2.13 (ProcessGroupGloo.cpp, gloo/transport/tcp) and NCCL 2.30 (misc/socket.cc)."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rankwise.doctor.gpu.nvidia import query_nvidia
from rankwise.doctor.network.names import is_loopback_address

if TYPE_CHECKING:
    from rankwise.doctor.host import Host
    from rankwise.doctor.network.interfaces import Address, Interface
    from rankwise.doctor.probe import Verdict

    #: Interfaces, each with the address that NCCL takes there.
    Chosen = list[tuple[Interface, Address]]

#: NCCL keeps no more.
_MOST_INTERFACES = 16
#: What it tries without NCCL_SOCKET_IFNAME, one after the other.
_BY_ITSELF = ("^docker,lo,virbr", "docker", "lo", "virbr")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A variable of NCCL, letter by letter, and the file it stands in; empty for the environment."""

    value: str
    source: str = ""

    @property
    def place(self) -> str:
        """Where it stands, for a sentence: `` (in /etc/nccl.conf)``; empty for the environment."""
        return f" (in {self.source})" if self.source else ""


def read_settings(host: Host) -> dict[str, Setting]:
    """Return the variables of NCCL by name: those of the environment, then of the user's file, then of /etc/nccl.conf."""
    home = host.env.get("HOME", "")
    files = [host.env.get("NCCL_CONF_FILE") or (f"{home}/.nccl.conf" if home else ""), "/etc/nccl.conf"]
    found = {name: Setting(value=value) for name, value in host.env.items()}
    for path in filter(None, files):
        for line in host.read(path).splitlines():
            name, equals, value = line.partition("=")
            if equals and not line.startswith("#"):
                found.setdefault(name, Setting(value=value, source=path))
    return found


def uses_nccl(host: Host) -> bool:
    """Return whether ranks here will use NCCL: they ask for it, or there are GPUs and they ask for nothing else."""
    if host.job.backend:
        return "nccl" in host.job.backend
    # WSL has no such folder, and a library of Windows' driver. Where no file tells, nvidia-smi does, or is missing, at
    # once.
    is_wsl = host.has("/dev/dxg") and host.has("/usr/lib/wsl/lib/libcuda.so.1")
    # A container without GPUs sees those of its host in /proc, and has no devices.
    is_nvidia = bool(host.names("/proc/driver/nvidia/gpus")) and host.has("/dev/nvidiactl")
    return is_nvidia or is_wsl or host.has("/dev/kfd") or bool(host.ask(query_nvidia).gpus)


def rate_mistake(host: Host, library: Literal["gloo", "nccl"]) -> Verdict:
    """Return how bad a mistake about a library is: it fails the ranks that use it, and does no harm yet where they use the other one."""
    return "fail" if uses_nccl(host) == (library == "nccl") else "warn"


def list_rdma_devices(host: Host) -> list[str]:
    """Return the devices of InfiniBand and RoCE; Amazon's EFA, which NCCL reaches by a plugin only, is none of them."""
    return [name for name in host.names("/sys/class/infiniband") if not name.startswith(("efa", "rdmap"))]


def choose_nccl_interfaces(host: Host, interfaces: Sequence[Interface]) -> Chosen:
    """Return the interfaces that NCCL will take, the first one for its bootstrap, and where it listens there; none if it finds none, and fails.

    NCCL_SOCKET_IFNAME chooses by beginnings of names. Without it, interfaces that begin with ``ib`` are taken; if there
    are none, those in the network of NCCL_COMM_ID; then all but docker's, virbr and lo; then these.
    """
    settings = read_settings(host)

    def value(name: str) -> str:
        info = settings.get(name)
        return info.value if info and len(info.value) > 1 else ""

    found = _list_running(interfaces, value("NCCL_SOCKET_FAMILY"))
    if named := value("NCCL_SOCKET_IFNAME"):
        return _pick(found, named)
    ways = (
        _pick(found, "ib"),
        _match_network(host, found, value("NCCL_COMM_ID")),
        *(_pick(found, one) for one in _BY_ITSELF),
    )
    return next(filter(None, ways), [])


def match_names(value: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names that a list of NCCL's form chooses: ``eth``, ``=eth0,eth1``, ``^docker``, ``^=docker0``."""
    is_not, rest = value.startswith("^"), value.removeprefix("^")
    is_exact, rest = rest.startswith("="), rest.removeprefix("=")
    wanted = [one.partition(":")[0] for one in rest.split(",") if one]

    def is_meant(name: str) -> bool:
        return not wanted or any(name == one if is_exact else name.startswith(one) for one in wanted)

    return tuple(name for name in names if is_meant(name) != is_not)


def _pick(found: Chosen, names: str) -> Chosen:
    chosen = match_names(names, [interface.name for interface, _ in found])
    return [one for one in found if one[0].name in chosen][:_MOST_INTERFACES]


def _list_running(interfaces: Sequence[Interface], family: str) -> Chosen:
    """List interfaces with the address that NCCL would take: the first one of its family; those of IPv4 come first."""
    found: dict[str, tuple[Interface, Address]] = {}
    for version in {"AF_INET": (4,), "AF_INET6": (6,)}.get(family, (4, 6)):
        for one in interfaces:
            fitting = [at for at in one.addresses if at.version == version and str(at.ip) != "::1"]
            if one.is_up and fitting:
                found.setdefault(one.name, (one, fitting[0]))
    return list(found.values())


def _match_network(host: Host, found: Chosen, comm_id: str) -> Chosen:
    name = comm_id[1:].partition("]")[0] if comm_id.startswith("[") else comm_id.rpartition(":")[0]
    ips = [ipaddress.ip_address(ip) for ip in host.lookup(name)[:1]] if name else []
    return [one for one in found if any(ip in one[1].network for ip in ips)]


#: Where Gloo listens if the host's name leads to none of its addresses; torch says so in a warning.
FALLBACK = "127.0.0.1"


def split_names(value: str) -> tuple[str, ...]:
    """Return the interfaces that a value of GLOO_SOCKET_IFNAME names, letter by letter as torch splits it; none if torch ignores it."""
    # torch ignores values of one letter, and an empty name at the end.
    return tuple(value.removesuffix(",").split(",")) if len(value) > 1 else ()


def find_gloo_address(host: Host, interfaces: Sequence[Interface]) -> str:
    """Return the address at which Gloo will listen here; empty if it finds none, and fails.

    It is the first address of the (first) interface that GLOO_SOCKET_IFNAME names. Without that variable it is the
    first address of the host's name that a socket can be bound to, and the loopback address if there is none.
    """
    named = split_names(host.env.get("GLOO_SOCKET_IFNAME", ""))
    if named:
        return next((str(one.addresses[0].ip) for one in interfaces if one.name == named[0] and one.addresses), "")
    return next((ip for ip in host.lookup(host.name) if can_bind(ip, interfaces)), FALLBACK)


def can_bind(ip: str, interfaces: Sequence[Interface]) -> bool:
    """Return whether a socket here can be bound to an address: it is one of ours, or one of loopback."""
    own = {str(address.ip) for one in interfaces for address in one.addresses}
    return ip in own or (ip.startswith("127.") and is_loopback_address(ip))


def find_interface(ip: str, interfaces: Sequence[Interface]) -> Interface | None:
    """Return the interface that has an address; that of loopback for any of its addresses."""
    for one in interfaces:
        if any(str(address.ip) == ip for address in one.addresses):
            return one
    return next((one for one in interfaces if one.kind == "loopback" and is_loopback_address(ip)), None)
