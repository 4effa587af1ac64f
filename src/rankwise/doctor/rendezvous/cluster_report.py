"""The result of several hosts that check each other: facts, and the findings from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rankwise.doctor.reading import Reading

#: Where the target listens: at the address and on the kind of ports that Gloo, or NCCL, will take there; at the master's port.
Plane = Literal["gloo", "nccl", "master"]
#: How a connection went. ``no route``: the source's kernel has no route there. ``other host``: another host answers at that address.
#: ``stalled``: it opened, and large data did not pass.
Outcome = Literal[
    "ok", "refused", "timeout", "unreachable", "no route", "reset", "other host", "stalled", "not tried"
]

#: So ``HostCard.lost`` begins for a host whose answers are invalid.
NO_SENSE = "its answer makes no sense"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCard:
    """One host of the set.

    Attributes:
        name: Its name; made distinct by its address where two hosts have the same.
        address: Where the rendezvous saw it come from.
        readings: What the probes have read there.
        clock_ahead_s: By how much its clock is ahead of the first host's, in seconds; None if it was not measured.
        clock_error_s: How far off that may be: half of the round trip.
        lost: Why it could not be looked at to the end; empty for all well.
        node_rank: Which node it says it is; None if it does not say.
        num_hosts: Of how many; None if it does not say.
        interfaces: Its interfaces, each with one of its addresses.
        gloo_address: Where Gloo will listen there; ``nccl_address``: the same for NCCL, empty where it is not used.
        opening: The commands that open its firewall for what comes from the others; empty if it was not asked for.
        opening_out: The same for what goes to the others.
        private: Those of its addresses that mean another place on each host: of containers' bridges.
        own_name: What it calls itself; ``name`` where that is its alone.
    """

    name: str
    address: str = ""
    readings: tuple[Reading, ...] = ()
    clock_ahead_s: float | None = None
    clock_error_s: float = 0.0
    lost: str = ""
    node_rank: int | None = None
    num_hosts: int | None = None
    interfaces: tuple[tuple[str, str], ...] = ()
    gloo_address: str = ""
    nccl_address: str = ""
    opening: str = ""
    opening_out: str = ""
    private: tuple[str, ...] = ()
    own_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NameLook:
    """What a host gets for the name of another one.

    Attributes:
        source: The host that looked.
        name: The name that it looked up.
        target: The host whose name that is; empty for the master's address.
        got: The addresses that it got; none if the name has none there.
        is_written: Whether the name stands in its ``/etc/hosts``.
    """

    source: str
    name: str
    target: str = ""
    got: tuple[str, ...] = ()
    is_written: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection that one host has tried to another: the target listens.

    Attributes:
        source, target: Names of hosts.
        address, port: Where it was tried.
        detail: The system's words, where it failed.
        connect_s: How long it took to open.
    """

    source: str
    target: str
    plane: Plane
    address: str
    port: int
    outcome: Outcome
    detail: str = ""
    connect_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """How fast the link from one host to another is, measured alone, without torch.

    Attributes:
        latency_s: A round trip of a few bytes, the median.
        bytes_per_s: One stream, from source to target; 0 if it stalled.
        resent: Which share of the packets the kernel had to send again, 0 to 1; None where it does not tell.
        tries: How often it was measured: what seems bad is measured again, and the best of all is told.
    """

    source: str
    target: str
    latency_s: float
    bytes_per_s: float
    resent: float | None = None
    tries: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """An all-reduce by torch over all hosts, or why there was none.

    Attributes:
        backend: ``gloo`` or ``nccl``.
        num_ranks: Ranks that took part.
        latency_s: Of 4 bytes, the median.
        bytes_per_s: Of a large tensor: its bytes over the time, the median (the "algorithm bandwidth" of nccl-tests).
        size_bytes: How large that was.
        waited_s: By host: for how long the others waited for it, the median over the rounds, where it came late.
        why: Why it did not happen; empty if it did.
        class_id: The failure class of that.
    """

    backend: str = ""
    num_ranks: int = 0
    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    size_bytes: int = 0
    waited_s: tuple[tuple[str, float], ...] = ()
    why: str = ""
    class_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterReport:
    """All of it.

    Attributes:
        hosts: Those that came, in the order of their numbers; the first one held the rendezvous.
        missing: Those that did not come, by the name that they were expected by, or as ``node rank 2``, or as ``1 of 4 hosts``.
        names: What the hosts got for each other's names.
        doubled: Hosts that claimed one node rank: the first one, the second one, who was refused, and the rank.
        links: All that was tried.
        measures: All that was measured.
        readings: What was judged from comparing hosts, links and measures; those of single hosts stand with these.
        took_s: How long it all took.
    """

    hosts: tuple[HostCard, ...]
    missing: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()
    measures: tuple[Measure, ...] = ()
    all_reduce: AllReduce | None = None
    readings: tuple[Reading, ...] = ()
    took_s: float = 0.0
    names: tuple[NameLook, ...] = ()
    doubled: tuple[tuple[str, str, int], ...] = ()


def find_interface(card: HostCard, address: str) -> str:
    """Return the interface of a host that has an address; empty if none has."""
    return next((name for name, ip in card.interfaces if ip == address), "")
