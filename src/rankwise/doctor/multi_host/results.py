"""What the coordinator has gathered so far: the answers of the hosts, validated."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, final

from rankwise.doctor.json_records import from_json
from rankwise.doctor.multi_host import wire
from rankwise.doctor.multi_host.cluster_report import ClusterReport, HostReport, Link, Measure, NameLookup, Way
from rankwise.doctor.multi_host.peer import Peer
from rankwise.doctor.multi_host.wire import Message
from rankwise.doctor.probe import Reading

Claims: TypeAlias = Sequence[tuple[str, str, int]]
#: A host has no more of these than that: a stranger could name thousands, and all others would try them.
_MOST_PORTS, _MOST_INTERFACES, _MOST_READINGS = 64, 4096, 4096
_MOST_DETAIL, _MOST_FIX = 300, 8000
_CLASS, _PROBE = re.compile(r"[A-Z]\d{1,3}"), re.compile(r"[a-z0-9-]{1,60}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What a host has tried, and what names mean to it."""

    links: tuple[Link, ...] = ()
    names: tuple[NameLookup, ...] = ()


@final
class Results:
    """All that the hosts have answered: an answer is checked as a whole first, and of an invalid one nothing is kept.

    What takes an answer raises ValueError where no doctor would send this.
    """

    def __init__(self, peers: Sequence[Peer] = (), missing: Sequence[str] = (), doubled: Claims = ()) -> None:
        self._peers, self._missing, self._doubled = peers, tuple(missing), tuple(doubled)
        #: By the name of the host: what is known of it, and what it says of its torch.
        self.hosts = {
            one.name: HostReport(name=one.name, address=one.address, node_rank=one.node_rank, num_hosts=one.num_hosts)
            for one in peers
        }
        self.torch: dict[str, Message] = {}
        #: Where the first host of a way reaches the other one.
        self.open_at: dict[Way, tuple[str, int]] = {}
        self._links: list[Link] = []
        self._names: list[NameLookup] = []
        self._measures: dict[Way, Measure] = {}

    def take_opened(self, peer: Peer, message: Message) -> None:
        """Take where a host listens, and what it says of its network."""
        report, own = from_json(HostReport, message.get("host")), self.hosts[peer.name]
        if sum(len(one.ports) for one in report.listening) > _MOST_PORTS:
            raise ValueError("it listens at too many ports")
        self.hosts[peer.name] = replace(
            report, name=own.name, address=report.address or own.address, node_rank=own.node_rank, num_hosts=own.num_hosts, readings=(), lost="",
            clock_ahead_s=None, clock_error_s=0.0, interfaces=report.interfaces[:_MOST_INTERFACES], private=report.private[:_MOST_INTERFACES],
        )  # fmt: skip

    def take_links(self, peer: Peer, message: Message) -> None:
        """Take what a host has tried, and what names mean to it."""
        tried = from_json(Tried, message.get("tried"))
        for way in [(one.source, one.target) for one in tried.names] + [one.way for one in tried.links]:
            self._check_way(peer, *way)
        self._names += tried.names
        self._links += [replace(one, detail=wire.one_line(one.detail, _MOST_DETAIL)) for one in tried.links]
        for link in tried.links:
            if link.outcome == "ok":
                self.open_at.setdefault(link.way, (link.address, link.port))

    def take_readings(self, peer: Peer, message: Message) -> None:
        """Take what the probes have found on a host."""
        self.hosts[peer.name] = replace(self.hosts[peer.name], readings=read_readings(message, peer.name))
        self.torch[peer.name] = next(iter(wire.parts(message, "torch")), {})

    def take_measure(self, peer: Peer, message: Message) -> None:
        """Take a measure; of several of one way, the best of each."""
        if message.get("measure") is None:
            return
        new = from_json(Measure, message["measure"])
        self._check_way(peer, *new.way)
        if min(new.latency_s, new.bytes_per_s, new.resent or 0.0) < 0:
            raise ValueError("a measured value is negative")
        old = self._measures.get(new.way, replace(new, tries=0))
        lost = [one for one in (old.resent, new.resent) if one is not None]
        self._measures[new.way] = replace(
            new, tries=old.tries + 1, latency_s=min(old.latency_s, new.latency_s), bytes_per_s=max(old.bytes_per_s, new.bytes_per_s),
            resent=min(lost) if lost else None,
        )  # fmt: skip

    def _check_way(self, peer: Peer, source: str, target: str) -> None:
        if source != peer.name or target == source or target not in self.hosts:
            raise ValueError(f"it has no way from {source!r:.60} to {target!r:.60}")

    def to_report(self) -> ClusterReport:
        """Return all of it as plain facts; nothing is judged yet."""
        order = {name: number for number, name in enumerate(self.hosts)}
        measures = tuple(sorted(self._measures.values(), key=lambda one: [order[name] for name in one.way]))
        stalled = {one.way for one in measures if not one.bytes_per_s}
        links = list(self._links)
        for at, one in enumerate(links):
            if one.outcome == "ok" and one.plane == "gloo" and one.way in stalled:
                detail = "small messages pass, but a stream does not"
                links[at] = replace(one, outcome="stalled", detail=detail)
        hosts = tuple(
            replace(
                self.hosts[one.name], lost=wire.one_line(one.lost), clock_ahead_s=one.clock_ahead_s,
                clock_error_s=one.clock_error_s if one.clock_ahead_s is not None else 0.0,
            )
            for one in self._peers
        )  # fmt: skip
        return ClusterReport(
            hosts=hosts, missing=self._missing, links=tuple(links), measures=measures, names=tuple(self._names), doubled=self._doubled
        )  # fmt: skip


def read_readings(message: Message, source: str) -> tuple[Reading, ...]:
    """Read what probes have found on a host: the readings are of the host that sends them, whatever they say; ValueError: they are no readings."""
    found = [Reading.from_json(one) for one in wire.parts(message, "readings")[:_MOST_READINGS]]
    return tuple(
        replace(
            one, hosts=(source,), what=wire.one_line(one.what), why=wire.one_line(one.why), fix=one.fix[:_MOST_FIX],
            class_id=one.class_id if _CLASS.fullmatch(one.class_id) else "", probe=one.probe if _PROBE.fullmatch(one.probe) else "",
        )
        for one in found
    )  # fmt: skip
