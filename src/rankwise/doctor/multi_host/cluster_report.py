"""The result of several hosts that check each other: facts, and the findings from them; as JSON and back."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from rankwise.doctor import json_records
from rankwise.doctor.multi_host.wire import clean, clean_host_name, clean_name
from rankwise.doctor.network.names import is_address
from rankwise.doctor.probe import Facts, Reading
from rankwise.doctor.units import format_rate, format_seconds

#: Where the target listens: at the address and on the kind of ports that Gloo, or NCCL, will take there.
Plane = Literal["gloo", "nccl"]
#: What listens on a plane, and the variable that chooses its interface.
LIBRARIES: dict[Plane, tuple[str, str]] = {
    "gloo": ("Gloo", "GLOO_SOCKET_IFNAME"),
    "nccl": ("NCCL", "NCCL_SOCKET_IFNAME"),
}
#: How a connection went. ``no route``: the source's kernel has no route there. ``other host``: another host answers at
#: that address. ``stalled``: it opened, and large data did not pass.
Outcome = Literal["ok", "refused", "timeout", "unreachable", "no route", "reset", "other host", "stalled", "not tried"]

#: What stands in commands and in comments of a shell is no more than that.
HostName: TypeAlias = Annotated[str, lambda text: clean_host_name(text) == text]
InterfaceName: TypeAlias = Annotated[str, lambda text: clean_name(text) == text]
_ADDRESS = re.compile(r"[0-9A-Fa-f.:]{2,45}(%[A-Za-z0-9._-]{1,15})?")
Address: TypeAlias = Annotated[str, lambda text: is_address(text) and _ADDRESS.fullmatch(text)]
#: Empty: it has none, or has not said it.
MaybeAddress: TypeAlias = Annotated[str, lambda text: not text or (is_address(text) and _ADDRESS.fullmatch(text))]
Port: TypeAlias = Annotated[int, lambda number: 0 < number < 1 << 16]
#: A link in one direction: from which host to which.
Way: TypeAlias = "tuple[str, str]"
#: From this share of packets on that were sent again, a link is lossy.
LOSSY = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Where a host listens for one plane while the links are tried."""

    plane: Plane
    address: Address
    ports: tuple[Port, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """One host of the set; what it did not say, or was not measured, is None.

    Attributes:
        name: Its name; made distinct by its address where two hosts have the same: ``own_name`` is what it calls
            itself.
        address: Where the rendezvous saw it come from.
        clock_ahead_s: By how much its clock is ahead of the first host's; ``clock_error_s``: how far off that may be.
        lost: Why it could not be looked at to the end; empty for all well.
        interfaces: Its interfaces, each with one of its addresses.
        gloo_address: Where Gloo will listen there; ``nccl_address``: the same for NCCL, empty where it is not used.
        private: Those of its addresses that mean another place on each host: of containers' bridges.
        listening: Where the others have tried to reach it.
    """

    name: str
    address: MaybeAddress = ""
    readings: tuple[Reading, ...] = ()
    clock_ahead_s: float | None = None
    clock_error_s: float = 0.0
    lost: str = ""
    node_rank: int | None = None
    num_hosts: int | None = None
    interfaces: tuple[tuple[InterfaceName, Address], ...] = ()
    gloo_address: MaybeAddress = ""
    nccl_address: MaybeAddress = ""
    private: tuple[Address, ...] = ()
    own_name: HostName = ""
    listening: tuple[Listening, ...] = ()

    def find_interface(self, *addresses: str) -> str:
        """Return its first interface that has one of some addresses; empty if none has."""
        return next((name for name, ip in self.interfaces if ip in addresses), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class NameLookup:
    """What a host gets for the name of another one; ``is_written``: it stands in its ``/etc/hosts``."""

    source: str
    name: HostName
    target: str
    got: tuple[Address, ...] = ()
    is_written: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection that one host has tried to another, which listens; ``detail`` has the system's words, where it failed."""

    source: str
    target: str
    plane: Plane
    address: Address
    port: Port
    outcome: Outcome = "not tried"
    detail: str = ""

    @property
    def way(self) -> Way:
        """From which host to which."""
        return self.source, self.target


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """How fast the link from one host to another is, measured alone, without torch.

    Attributes:
        latency_s: A round trip of a few bytes, the median.
        bytes_per_s: One stream, from source to target; 0 if it stalled.
        resent: Which share of the packets the kernel had to send again, 0 to 1; None where it does not tell.
        tries: How often it was measured: what seems bad is measured again, and the best of all is reported.
    """

    source: str
    target: str
    latency_s: float
    bytes_per_s: float
    resent: float | None = None
    tries: int = 1

    @property
    def way(self) -> Way:
        """From which host to which."""
        return self.source, self.target

    @property
    def is_lossy(self) -> bool:
        """Whether packets get lost, as far as the kernel tells."""
        return self.resent is None or self.resent > LOSSY


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """An all-reduce by torch over all hosts, or why there was none.

    Attributes:
        latency_s: Of 4 bytes, the median.
        bytes_per_s: Of a large tensor: its bytes over the time, the median (the "algorithm bandwidth" of nccl-tests).
        waited_s: By host: for how long the others waited for it, the median over the rounds, where it came late.
    """

    backend: str = ""
    num_ranks: int = 0
    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    size_bytes: int = 0
    waited_s: tuple[tuple[str, float], ...] = ()
    why: str = ""
    class_id: str = ""

    @property
    def summary(self) -> str:
        """Who reduced, and how fast: for a sentence."""
        speeds = f"{format_seconds(self.latency_s)} for 4 bytes, {format_rate(self.bytes_per_s)} for {self.size_bytes >> 20} MiB"
        return f"({self.backend}, {self.num_ranks} ranks): {speeds}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterReport:
    """All of it.

    Attributes:
        hosts: Those that came, in the order of their numbers; the first one held the rendezvous.
        missing: Those that did not come, by the name that they were expected by, or as ``node rank 2``, or as ``1 of 4
            hosts``.
        doubled: Hosts that claimed one node rank: the first one, the second one, who was refused, and the rank.
        readings: What was judged from comparing hosts, links and measures; those of single hosts stand with these.
    """

    hosts: tuple[HostReport, ...]
    missing: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()
    measures: tuple[Measure, ...] = ()
    all_reduce: AllReduce | None = None
    readings: tuple[Reading, ...] = ()
    took_s: float = 0.0
    names: tuple[NameLookup, ...] = ()
    doubled: tuple[tuple[str, str, int], ...] = ()


def from_json(message: Facts) -> ClusterReport:
    """Read it again from a host's message; what is missing has its usual value; ValueError: it is something else."""
    return json_records.from_json(ClusterReport, clean(dict(message)))
