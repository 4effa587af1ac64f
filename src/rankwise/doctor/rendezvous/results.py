"""What the coordinator has gathered so far: the answers of the hosts, validated."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, final, get_args

from rankwise.doctor.probe import Reading
from rankwise.doctor.rendezvous.cluster_report import (
    ClusterReport,
    HostReport,
    Link,
    Measure,
    NameLookup,
    Outcome,
    Plane,
)
from rankwise.doctor.rendezvous.sanitize import (
    BadMessageError,
    clean_host_name,
    clean_name,
    one_line,
    read_address,
    read_number,
    read_port,
)
from rankwise.doctor.rendezvous.wire import entries, number, parts, text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.doctor.probe import Fact
    from rankwise.doctor.rendezvous.peer import Peer
    from rankwise.doctor.rendezvous.wire import Message


@final
@dataclass(slots=True, kw_only=True)
class Results:
    """All that the hosts have answered, by the number of the host. An answer is checked as a whole first: of an invalid one nothing is kept.

    ``clocks`` are ahead by, and off by at most; ``openings`` open its firewall for what comes in, and for what goes out.
    """

    peers: list[Peer] = field(default_factory=list)
    missing: tuple[str, ...] = ()
    doubled: list[tuple[str, str, int]] = field(default_factory=list)
    clocks: dict[int, tuple[float, float]] = field(default_factory=dict)
    openings: dict[int, tuple[str, str]] = field(default_factory=dict)
    torch: dict[int, Message] = field(default_factory=dict)
    _opened: dict[int, ListenAnswer] = field(default_factory=dict)
    _links: list[Link] = field(default_factory=list)
    _open_at: dict[tuple[int, int], tuple[str, int]] = field(default_factory=dict)
    _names: list[NameLookup] = field(default_factory=list)
    _readings: dict[int, tuple[Reading, ...]] = field(default_factory=dict)
    _measures: dict[tuple[int, int], Measure] = field(default_factory=dict)

    def take_opened(self, peer: Peer, message: Message) -> None:
        """Take where a host listens; as all that takes an answer, it raises BadMessageError where no doctor would send this."""
        self._opened[peer.number] = read_opened(message)

    def list_peers(self, here: Sequence[Peer]) -> list[Fact]:
        """Return where all hosts can be reached, for all of them."""
        return [
            {
                "number": one.number, "name": message.own_name, "planes": message.planes_to_json(), "address": self.address_of(one),
                "addresses": [ip for _, ip in message.interfaces],
            }
            for one in here
            if (message := self._opened.get(one.number)) is not None
        ]  # fmt: skip

    def address_of(self, peer: Peer) -> str:
        """Return the address by which others reach a host."""
        message = self._opened.get(peer.number)
        return (message.reached_at if message else "") or peer.address

    def take_links(self, peer: Peer, message: Message) -> None:
        """Take what a host has tried, and what names mean to it."""
        targets = [
            read_number(one.get("to"), len(self.peers), peer.number) for one in parts(message, "links")
        ]
        links = [
            read_link(one, peer.name, self.peers[target].name)
            for target, one in zip(targets, parts(message, "links"), strict=True)
        ]
        names = [self._read_name(peer, one) for one in parts(message, "names")]
        for target, link in zip(targets, links, strict=True):
            self._links.append(link)
            if link.outcome == "ok" and link.plane != "master":
                self._open_at.setdefault((peer.number, target), (link.address, link.port))
        self._names += names

    def _read_name(self, peer: Peer, message: Message) -> NameLookup:
        place = message.get("to")
        target = (
            self.peers[read_number(place, len(self.peers), peer.number)].name if place is not None else ""
        )
        return NameLookup(
            source=peer.name, name=clean_host_name(text(message, "name")), target=target,
            got=tuple(read_address(one) for one in entries(message, "got")), is_written=bool(message.get("is_written")),
        )  # fmt: skip

    def take_readings(self, peer: Peer, message: Message) -> None:
        """Take what the probes have found on a host."""
        self._readings[peer.number] = read_readings(message, peer.name)
        self.torch[peer.number] = next(iter(parts(message, "torch")), {})

    def take_measure(self, peer: Peer, message: Message) -> None:
        """Take a measure; of several of one way, the best of each."""
        target = read_number(message.get("target"), len(self.peers), peer.number)
        if text(message, "why"):
            return
        new = Measure(
            source=peer.name, target=self.peers[target].name, latency_s=number(message, "latency"), bytes_per_s=number(message, "speed"),
            resent=number(message, "resent") if isinstance(message.get("resent"), float) else None,
        )  # fmt: skip
        if min(new.latency_s, new.bytes_per_s, new.resent or 0.0) < 0:
            raise BadMessageError("a measured value is negative")
        old = self._measures.get((peer.number, target), new)
        lost = [one for one in (old.resent, new.resent) if one is not None]
        self._measures[peer.number, target] = replace(
            new, tries=old.tries + ((peer.number, target) in self._measures), latency_s=min(old.latency_s, new.latency_s), bytes_per_s=max(old.bytes_per_s, new.bytes_per_s),
            resent=min(lost) if lost else None,
        )  # fmt: skip

    def find_open(self, source: int, target: int) -> tuple[str, int] | None:
        """Return where a host reaches another one; None if nowhere."""
        return self._open_at.get((source, target))

    def number_of(self, name: str) -> int:
        """Return the number of a host."""
        return next(one.number for one in self.peers if one.name == name)

    def to_report(self) -> ClusterReport:
        """Return all of it as plain facts; nothing is judged yet."""
        measures = tuple(self._measures[key] for key in sorted(self._measures))
        stalled = {(one.source, one.target) for one in measures if not one.bytes_per_s}
        links = list(self._links)
        for at, one in enumerate(links):
            if one.outcome == "ok" and one.plane == "gloo" and (one.source, one.target) in stalled:
                links[at] = replace(
                    one, outcome="stalled", detail="small messages pass, but a stream does not"
                )
        return ClusterReport(
            hosts=tuple(self._make_host_report(one) for one in self.peers), missing=self.missing, links=tuple(links), measures=measures,
            names=tuple(self._names), doubled=tuple(self.doubled),
        )  # fmt: skip

    def _make_host_report(self, peer: Peer) -> HostReport:
        message = self._opened.get(peer.number, ListenAnswer())
        ahead_s, error_s = self.clocks.get(peer.number, (None, 0.0))
        return HostReport(
            name=peer.name, address=self.address_of(peer), readings=self._readings.get(peer.number, ()), clock_ahead_s=ahead_s,
            clock_error_s=error_s, lost=one_line(peer.lost), node_rank=peer.node_rank, num_hosts=peer.num_hosts, interfaces=message.interfaces,
            gloo_address=message.gloo, nccl_address=message.nccl, own_name=message.own_name, private=message.private,
            opening=self.openings.get(peer.number, ("", ""))[0], opening_out=self.openings.get(peer.number, ("", ""))[1],
        )  # fmt: skip


_PLANES: tuple[Plane, ...] = get_args(Plane)
_OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
#: A host has no more of these than that: a stranger could name thousands, and all others would try them.
_MOST_PLACES, _MOST_PORTS, _MOST_INTERFACES, _MOST_READINGS = 8, 16, 4096, 4096
_MOST_DETAIL, _MOST_FIX = 300, 8000
_CLASS, _PROBE = re.compile(r"[A-Z]\d{1,3}"), re.compile(r"[a-z0-9-]{1,60}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a host listens for one plane."""

    plane: Plane
    address: str
    ports: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenAnswer:
    """Where a host listens; the fields of `cluster_report.HostReport` have the same meanings."""

    planes: tuple[Place, ...] = ()
    interfaces: tuple[tuple[str, str], ...] = ()
    gloo: str = ""
    nccl: str = ""
    reached_at: str = ""
    own_name: str = ""
    private: tuple[str, ...] = ()

    def planes_to_json(self) -> list[Fact]:
        """Return the places as they are sent to the other hosts."""
        return [{"plane": one.plane, "address": one.address, "ports": list(one.ports)} for one in self.planes]


def read_opened(message: Message) -> ListenAnswer:
    """Read where a host listens; BadMessageError: no doctor would tell this."""
    interfaces = [
        (clean_name(text(one, "name")), read_address(one.get("ip"))) for one in parts(message, "interfaces")
    ]
    return ListenAnswer(
        planes=tuple(_read_place(one) for one in parts(message, "planes")[:_MOST_PLACES]), interfaces=tuple(interfaces[:_MOST_INTERFACES]),
        gloo=read_address(message.get("gloo")), nccl=read_address(message.get("nccl")), reached_at=read_address(message.get("reached_at")),
        own_name=clean_host_name(text(message, "own_name")),
        private=tuple(read_address(one) for one in entries(message, "private")[:_MOST_INTERFACES]),
    )  # fmt: skip


def _read_place(message: Message) -> Place:
    plane = read_plane(message)
    # The master's address is mostly a name, which each host looks up for itself.
    address = text(message, "address")
    address = clean_host_name(address) if plane == "master" and ":" not in address else read_address(address)
    ports = tuple(read_port(one) for one in entries(message, "ports")[:_MOST_PORTS])
    if not address:
        raise BadMessageError("it listens at no address")
    return Place(plane=plane, address=address, ports=ports)


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
        source=source, target=target, plane=read_plane(message), address=read_address(message.get("address")), port=read_port(message.get("port")),
        outcome=outcome, detail=one_line(text(message, "detail"), _MOST_DETAIL), connect_s=max(0.0, number(message, "s")),
    )  # fmt: skip


def read_readings(message: Message, source: str) -> tuple[Reading, ...]:
    """Read what probes have found on a host: the readings are of the host that sends them, whatever they say; BadMessageError: they are no readings."""
    try:
        found = [Reading.from_json(one) for one in parts(message, "readings")[:_MOST_READINGS]]
    except ValueError as error:
        raise BadMessageError(f"it sent something that is not a reading: {error}") from error
    return tuple(
        replace(
            one, hosts=(source,), what=one_line(one.what), why=one_line(one.why), fix=one.fix[:_MOST_FIX],
            class_id=one.class_id if _CLASS.fullmatch(one.class_id) else "", probe=one.probe if _PROBE.fullmatch(one.probe) else "",
        )
        for one in found
    )  # fmt: skip
