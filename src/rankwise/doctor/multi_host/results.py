"""What the coordinator has gathered so far: the answers of the hosts, validated."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias, final, get_args

from rankwise.doctor.multi_host import wire
from rankwise.doctor.multi_host.cluster_report import (
    ClusterReport,
    HostReport,
    Link,
    Measure,
    NameLookup,
    Outcome,
    Plane,
)
from rankwise.doctor.multi_host.peer import Peer
from rankwise.doctor.multi_host.wire import BadMessageError, Message
from rankwise.doctor.probe import Fact, Reading

_PLANES: tuple[Plane, ...] = get_args(Plane)
_OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
Claims: TypeAlias = Sequence[tuple[str, str, int]]
#: A host has no more of these than that: a stranger could name thousands, and all others would try them.
_MOST_PLANES, _MOST_PORTS, _MOST_INTERFACES, _MOST_READINGS = 8, 16, 4096, 4096
_MOST_DETAIL, _MOST_FIX = 300, 8000
_CLASS, _PROBE = re.compile(r"[A-Z]\d{1,3}"), re.compile(r"[a-z0-9-]{1,60}")


@final
class Results:
    """All that the hosts have answered: an answer is checked as a whole first, and of an invalid one nothing is kept.

    What takes an answer raises BadMessageError where no doctor would send this.
    """

    def __init__(self, peers: Sequence[Peer] = (), missing: Sequence[str] = (), doubled: Claims = ()) -> None:
        self.peers, self._missing, self._doubled = peers, tuple(missing), tuple(doubled)
        #: By the number of the host: what it says of its torch.
        self.torch: dict[int, Message] = {}
        self._hosts = [
            HostReport(name=one.name, address=one.address, node_rank=one.node_rank, num_hosts=one.num_hosts)
            for one in peers
        ]
        self._planes: dict[int, list[Fact]] = {}
        self._links: list[Link] = []
        #: By the numbers of two hosts: where the first one reaches the other.
        self.open_at: dict[tuple[int, int], tuple[str, int]] = {}
        self._names: list[NameLookup] = []
        self._measures: dict[tuple[int, int], Measure] = {}

    def take_opened(self, peer: Peer, message: Message) -> None:
        """Take where a host listens."""
        pairs = ((wire.text(one, "name"), one.get("ip")) for one in wire.parts(message, "interfaces"))
        interfaces = [(wire.clean_name(name), wire.read_address(ip)) for name, ip in pairs]
        planes: list[Fact] = [_read_plane_ports(one) for one in wire.parts(message, "planes")[:_MOST_PLANES]]
        self._hosts[peer.number] = replace(
            self._hosts[peer.number], address=wire.read_address(message.get("reached_at")) or peer.address, interfaces=tuple(interfaces[:_MOST_INTERFACES]),
            gloo_address=wire.read_address(message.get("gloo")), nccl_address=wire.read_address(message.get("nccl")), own_name=wire.clean_host_name(wire.text(message, "own_name")),
            private=tuple(wire.read_address(one) for one in wire.entries(message, "private")[:_MOST_INTERFACES]),
        )  # fmt: skip
        self._planes[peer.number] = planes

    def take_clock(self, peer: Peer, ahead_s: float, error_s: float) -> None:
        """Take by how much a host's clock is ahead, and how far off that may be."""
        host = self._hosts[peer.number]
        self._hosts[peer.number] = replace(host, clock_ahead_s=ahead_s, clock_error_s=error_s)

    def list_peers(self, here: Sequence[Peer]) -> list[Fact]:
        """Return where all hosts can be reached, for all of them."""
        known = ((one.number, self._hosts[one.number]) for one in here if one.number in self._planes)
        return [
            {
                "number": at, "name": host.own_name, "planes": self._planes[at], "address": host.address,
                "addresses": [ip for _, ip in host.interfaces],
            }
            for at, host in known
        ]  # fmt: skip

    def take_links(self, peer: Peer, message: Message) -> None:
        """Take what a host has tried, and what names mean to it."""
        links = list[tuple[int, Link]]()
        for one in wire.parts(message, "links"):
            target = wire.read_number(one.get("number"), len(self.peers), peer.number)
            links.append((target, read_link(one, peer.name, self.peers[target].name)))
        self._names += [self._read_name(peer, one) for one in wire.parts(message, "names")]
        for target, link in links:
            self._links.append(link)
            if link.outcome == "ok":
                self.open_at.setdefault((peer.number, target), (link.address, link.port))

    def _read_name(self, peer: Peer, message: Message) -> NameLookup:
        target = self.peers[wire.read_number(message.get("to"), len(self.peers), peer.number)]
        return NameLookup(
            source=peer.name, name=wire.clean_host_name(wire.text(message, "name")), target=target.name,
            got=tuple(wire.read_address(one) for one in wire.entries(message, "got")), is_written=bool(message.get("is_written")),
        )  # fmt: skip

    def take_readings(self, peer: Peer, message: Message) -> None:
        """Take what the probes have found on a host."""
        self._hosts[peer.number] = replace(self._hosts[peer.number], readings=read_readings(message, peer.name))
        self.torch[peer.number] = next(iter(wire.parts(message, "torch")), {})

    def take_measure(self, peer: Peer, message: Message) -> None:
        """Take a measure; of several of one way, the best of each."""
        target = wire.read_number(message.get("target"), len(self.peers), peer.number)
        if wire.text(message, "why"):
            return
        new = Measure(
            source=peer.name, target=self.peers[target].name, latency_s=wire.number(message, "latency"), bytes_per_s=wire.number(message, "speed"),
            resent=wire.number(message, "resent") if isinstance(message.get("resent"), float) else None,
        )  # fmt: skip
        if min(new.latency_s, new.bytes_per_s, new.resent or 0.0) < 0:
            raise BadMessageError("a measured value is negative")
        old = self._measures.get((peer.number, target), new)
        lost = [one for one in (old.resent, new.resent) if one is not None]
        self._measures[peer.number, target] = replace(
            new, tries=old.tries + ((peer.number, target) in self._measures), latency_s=min(old.latency_s, new.latency_s), bytes_per_s=max(old.bytes_per_s, new.bytes_per_s),
            resent=min(lost) if lost else None,
        )  # fmt: skip

    def number_of(self, name: str) -> int:
        """Return the number of a host."""
        return next(one.number for one in self.peers if one.name == name)

    def to_report(self) -> ClusterReport:
        """Return all of it as plain facts; nothing is judged yet."""
        measures = tuple(self._measures[key] for key in sorted(self._measures))
        stalled = {one.way for one in measures if not one.bytes_per_s}
        links = list(self._links)
        for at, one in enumerate(links):
            if one.outcome == "ok" and one.plane == "gloo" and one.way in stalled:
                detail = "small messages pass, but a stream does not"
                links[at] = replace(one, outcome="stalled", detail=detail)
        both = zip(self._hosts, self.peers, strict=True)
        hosts = tuple(replace(host, lost=wire.one_line(peer.lost)) for host, peer in both)
        return ClusterReport(
            hosts=hosts, missing=self._missing, links=tuple(links), measures=measures, names=tuple(self._names), doubled=self._doubled
        )  # fmt: skip


def _read_plane_ports(message: Message) -> Fact:
    """Read where a host listens for one plane; it is sent to the others as it is."""
    plane, address = read_plane(message), wire.read_address(message.get("address"))
    if not address:
        raise BadMessageError("it listens at no address")
    ports = [wire.read_port(one) for one in wire.entries(message, "ports")[:_MOST_PORTS]]
    return {"plane": plane, "address": address, "ports": [*ports]}


def read_plane(message: Message) -> Plane:
    """Read for whom a place is; BadMessageError: there is no such plane."""
    known = next((one for one in _PLANES if one == message.get("plane")), None)
    if known is None:
        raise BadMessageError(f"{message.get('plane')!r:.60} is not a kind of port")
    return known


def read_link(message: Message, source: str, target: str) -> Link:
    """Read how a connection from one host (which sends the message) to another went; BadMessageError: no doctor would send this."""
    outcome = next((one for one in _OUTCOMES if one == message.get("outcome")), None)
    if outcome is None:
        raise BadMessageError(f"{message.get('outcome')!r:.60} is not an outcome of a connection")
    return Link(
        source=source, target=target, plane=read_plane(message), address=wire.read_address(message.get("address")), port=wire.read_port(message.get("port")),
        outcome=outcome, detail=wire.one_line(wire.text(message, "detail"), _MOST_DETAIL),
    )  # fmt: skip


def read_readings(message: Message, source: str) -> tuple[Reading, ...]:
    """Read what probes have found on a host: the readings are of the host that sends them, whatever they say; BadMessageError: they are no readings."""
    try:
        found = [Reading.from_json(one) for one in wire.parts(message, "readings")[:_MOST_READINGS]]
    except ValueError as error:
        raise BadMessageError(f"it sent something that is not a reading: {error}") from error
    return tuple(
        replace(
            one, hosts=(source,), what=wire.one_line(one.what), why=wire.one_line(one.why), fix=one.fix[:_MOST_FIX],
            class_id=one.class_id if _CLASS.fullmatch(one.class_id) else "", probe=one.probe if _PROBE.fullmatch(one.probe) else "",
        )
        for one in found
    )  # fmt: skip
