"""What the holder has gathered so far: who is who, and what each host has told."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast, final

from rankwise.doctor.meeting.together import HostCard, Link, Measure, NameLook, Outcome, Plane, Together
from rankwise.doctor.meeting.wire import entries, number, parts, text, texts, whole
from rankwise.doctor.reading import Reading

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.doctor.meeting.plan import Plan
    from rankwise.doctor.meeting.table import Seat
    from rankwise.doctor.meeting.wire import Message
    from rankwise.doctor.reading import Fact

_LAST = 1 << 30


def short_name(name: str) -> str:
    """Return a host's name without user and domain: ``node1`` of ``me@node1.cluster``; an address stays."""
    bare = name.rpartition("@")[2]
    return bare if bare.replace(".", "").isdigit() or ":" in bare else bare.partition(".")[0]


def _find_expected(seat: Seat, expected: Sequence[str]) -> int | None:
    own = {short_name(seat.name), seat.address}
    return next((index for index, name in enumerate(expected) if short_name(name) in own), None)


def order_seats(seats: Sequence[Seat], plan: Plan) -> list[Seat]:
    """Return the hosts in the order of their numbers: the holder, then by node rank, as they are expected, by name."""

    def key(seat: Seat) -> tuple[bool, int, int, str]:
        place = _find_expected(seat, plan.expected)
        rank = _LAST if seat.node_rank is None else seat.node_rank
        return (not seat.is_own, rank, _LAST if place is None else place, seat.name)

    found = sorted(seats, key=key)
    for index, seat in enumerate(found):
        seat.number = index
    return found


def make_names_distinct(seats: Sequence[Seat]) -> None:
    """Add the address to a name that several hosts have, and a number where that is the same, too."""
    names = [one.name for one in seats]
    for seat in seats:
        if names.count(seat.name) > 1:
            seat.name = f"{seat.name} ({seat.address})"
    taken: set[str] = set()
    for seat in seats:
        if seat.name in taken:
            seat.name = f"{seat.name} #{seat.number}"
        taken.add(seat.name)


def find_missing(here: Sequence[Seat], plan: Plan) -> tuple[str, ...]:
    """Return who has not come: by name, else by node rank, else how many."""
    wanted = plan.num_hosts or len(plan.expected) or max((one.num_hosts or 0 for one in here), default=0)
    absent = wanted - len(here)
    if absent <= 0:
        return ()
    met = {_find_expected(one, plan.expected) for one in here}
    names = tuple(short_name(name) for index, name in enumerate(plan.expected) if index not in met)
    if len(names) == absent:
        return names
    ranks = {one.node_rank for one in here}
    free = [rank for rank in range(wanted) if rank not in ranks]
    if None not in ranks and len(free) == absent:
        return tuple(f"node rank {rank}" for rank in free)
    return (f"{absent} of {wanted} hosts",)


@final
@dataclass(slots=True, kw_only=True)
class Gathered:
    """All that was told.

    Attributes:
        seats: The hosts by number.
        missing: Who has not come.
        doubled: Pairs of hosts that claimed one node rank, and the rank.
        clocks: By number: ahead by, off by at most.
        openings: By number: how its firewall is opened.
        torch: By number: what it says of its torch.
    """

    seats: list[Seat] = field(default_factory=list)
    missing: tuple[str, ...] = ()
    doubled: list[tuple[str, str, int]] = field(default_factory=list)
    clocks: dict[int, tuple[float, float]] = field(default_factory=dict)
    openings: dict[int, str] = field(default_factory=dict)
    torch: dict[int, Message] = field(default_factory=dict)
    _opened: dict[int, Message] = field(default_factory=dict)
    _links: list[Link] = field(default_factory=list)
    _open_at: dict[tuple[int, int], tuple[str, int]] = field(default_factory=dict)
    _names: list[NameLook] = field(default_factory=list)
    _readings: dict[int, tuple[Reading, ...]] = field(default_factory=dict)
    _measures: dict[tuple[int, int], Measure] = field(default_factory=dict)

    def take_opened(self, seat: Seat, told: Message) -> None:
        """Take where a host listens."""
        self._opened[seat.number] = told

    def list_peers(self, here: Sequence[Seat]) -> list[Fact]:
        """Return where all hosts can be reached, for all of them."""
        return [
            {
                "number": one.number, "name": text(told, "own_name"), "planes": entries(told, "planes"), "address": self.address_of(one),
                "addresses": [cast("Fact", ip) for _, ip in self._interfaces(one)],
            }
            for one in here
            if (told := self._opened.get(one.number)) is not None
        ]  # fmt: skip

    def address_of(self, seat: Seat) -> str:
        """Return the address by which others reach a host."""
        return text(self._opened.get(seat.number, {}), "reached_at") or seat.address

    def take_links(self, seat: Seat, told: Message) -> None:
        """Take what a host has tried, and what names mean to it."""
        for one in parts(told, "links"):
            target, plane, outcome = (
                whole(one, "to") or 0,
                cast("Plane", text(one, "plane")),
                cast("Outcome", text(one, "outcome")),
            )
            link = Link(
                source=seat.name, target=self.seats[target].name, plane=plane, address=text(one, "address"), port=whole(one, "port") or 0,
                outcome=outcome, detail=text(one, "detail"), connect_s=number(one, "s"),
            )  # fmt: skip
            self._links.append(link)
            if outcome == "ok" and plane != "master":
                self._open_at.setdefault((seat.number, target), (link.address, link.port))
        for one in parts(told, "names"):
            place = whole(one, "to")
            self._names.append(
                NameLook(
                    source=seat.name, name=text(one, "name"), target=self.seats[place].name if place is not None else "",
                    got=texts(one, "got"), is_written=bool(one.get("is_written")),
                )
            )  # fmt: skip

    def take_readings(self, seat: Seat, told: Message) -> None:
        """Take what the probes have read on a host."""
        self._readings[seat.number] = tuple(
            replace(Reading.from_json(one), hosts=(seat.name,)) for one in parts(told, "readings")
        )
        self.torch[seat.number] = next(iter(parts(told, "torch")), {})

    def take_measure(self, seat: Seat, told: Message) -> None:
        """Take a measure; of several of one way, the best of each."""
        target = whole(told, "target")
        if target is None or text(told, "why"):
            return
        resent = told.get("resent")
        new = Measure(
            source=seat.name, target=self.seats[target].name, latency_s=number(told, "latency"), bytes_per_s=number(told, "speed"),
            resent=resent if isinstance(resent, float) else None,
        )  # fmt: skip
        old = self._measures.get((seat.number, target), new)
        lost = [one for one in (old.resent, new.resent) if one is not None]
        self._measures[seat.number, target] = replace(
            new, tries=old.tries + ((seat.number, target) in self._measures), latency_s=min(old.latency_s, new.latency_s), bytes_per_s=max(old.bytes_per_s, new.bytes_per_s),
            resent=min(lost) if lost else None,
        )  # fmt: skip

    def find_open(self, source: int, target: int) -> tuple[str, int] | None:
        """Return where a host reaches another one; None if nowhere."""
        return self._open_at.get((source, target))

    def number_of(self, name: str) -> int:
        """Return the number of a host."""
        return next(one.number for one in self.seats if one.name == name)

    def to_together(self) -> Together:
        """Return all of it as plain facts; nothing is judged yet."""
        measures = tuple(self._measures[key] for key in sorted(self._measures))
        stalled = {(one.source, one.target) for one in measures if not one.bytes_per_s}
        links = tuple(
            replace(one, outcome="stalled", detail="small messages pass, a stream does not")
            if one.outcome == "ok" and one.plane == "gloo" and (one.source, one.target) in stalled
            else one
            for one in self._links
        )
        return Together(
            hosts=tuple(self._make_card(one) for one in self.seats), missing=self.missing, links=links, measures=measures,
            names=tuple(self._names), doubled=tuple(self.doubled),
        )  # fmt: skip

    def _make_card(self, seat: Seat) -> HostCard:
        told = self._opened.get(seat.number, {})
        ahead_s, error_s = self.clocks.get(seat.number, (None, 0.0))
        return HostCard(
            name=seat.name, address=self.address_of(seat), readings=self._readings.get(seat.number, ()), clock_ahead_s=ahead_s,
            clock_error_s=error_s, lost=seat.lost, node_rank=seat.node_rank, num_hosts=seat.num_hosts, interfaces=self._interfaces(seat),
            gloo_address=text(told, "gloo"), nccl_address=text(told, "nccl"), opening=self.openings.get(seat.number, ""),
            own_name=text(told, "own_name"),
        )  # fmt: skip

    def _interfaces(self, seat: Seat) -> tuple[tuple[str, str], ...]:
        told = parts(self._opened.get(seat.number, {}), "interfaces")
        return tuple((text(one, "name"), text(one, "ip")) for one in told)
