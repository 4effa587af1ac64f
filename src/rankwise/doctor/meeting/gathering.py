"""What the holder has gathered so far: who is who, and what each host has told."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, final

from rankwise.doctor.meeting.border import (
    BadMessageError,
    clean_host_name,
    one_line,
    read_address,
    read_number,
)
from rankwise.doctor.meeting.opened import Opened, read_link, read_opened, read_readings
from rankwise.doctor.meeting.together import HostCard, Link, Measure, NameLook, Together
from rankwise.doctor.meeting.wire import entries, number, parts, text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.doctor.meeting.plan import Plan
    from rankwise.doctor.meeting.table import Seat
    from rankwise.doctor.meeting.wire import Message
    from rankwise.doctor.reading import Fact, Reading

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


def find_missing(here: Sequence[Seat], plan: Plan, sent_away: int = 0) -> tuple[str, ...]:
    """Return who has not come: by name, else by node rank, else how many.

    Args:
        here: Who has come.
        plan: The plan.
        sent_away: How many have come and were sent away: they are told of elsewhere.
    """
    wanted = plan.num_hosts or len(plan.expected) or max((one.num_hosts or 0 for one in here), default=0)
    absent = wanted - len(here) - sent_away
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
    """All that was told. What is taken is looked at as a whole first: of an answer that makes no sense nothing stays.

    Attributes:
        seats: The hosts by number.
        missing: Who has not come.
        doubled: Pairs of hosts that claimed one node rank, and the rank.
        clocks: By number: ahead by, off by at most.
        openings: By number: how its firewall is opened for what comes in, and for what goes out.
        torch: By number: what it says of its torch.
    """

    seats: list[Seat] = field(default_factory=list)
    missing: tuple[str, ...] = ()
    doubled: list[tuple[str, str, int]] = field(default_factory=list)
    clocks: dict[int, tuple[float, float]] = field(default_factory=dict)
    openings: dict[int, tuple[str, str]] = field(default_factory=dict)
    torch: dict[int, Message] = field(default_factory=dict)
    _opened: dict[int, Opened] = field(default_factory=dict)
    _links: list[Link] = field(default_factory=list)
    _open_at: dict[tuple[int, int], tuple[str, int]] = field(default_factory=dict)
    _names: list[NameLook] = field(default_factory=list)
    _readings: dict[int, tuple[Reading, ...]] = field(default_factory=dict)
    _measures: dict[tuple[int, int], Measure] = field(default_factory=dict)

    def take_opened(self, seat: Seat, told: Message) -> None:
        """Take where a host listens.

        Raises:
            BadMessageError: No doctor would tell this; the same holds for all that is taken.
        """
        self._opened[seat.number] = read_opened(told)

    def list_peers(self, here: Sequence[Seat]) -> list[Fact]:
        """Return where all hosts can be reached, for all of them."""
        return [
            {
                "number": one.number, "name": told.own_name, "planes": told.planes_to_json(), "address": self.address_of(one),
                "addresses": [ip for _, ip in told.interfaces],
            }
            for one in here
            if (told := self._opened.get(one.number)) is not None
        ]  # fmt: skip

    def address_of(self, seat: Seat) -> str:
        """Return the address by which others reach a host."""
        told = self._opened.get(seat.number)
        return (told.reached_at if told else "") or seat.address

    def take_links(self, seat: Seat, told: Message) -> None:
        """Take what a host has tried, and what names mean to it.

        Raises:
            BadMessageError: See `take_opened`.
        """
        links = [
            (target, read_link(one, seat.name, self.seats[target].name))
            for one in parts(told, "links")
            for target in (read_number(one.get("to"), len(self.seats), seat.number),)
        ]
        names = [self._read_name(seat, one) for one in parts(told, "names")]
        for target, link in links:
            self._links.append(link)
            if link.outcome == "ok" and link.plane != "master":
                self._open_at.setdefault((seat.number, target), (link.address, link.port))
        self._names += names

    def _read_name(self, seat: Seat, told: Message) -> NameLook:
        place = told.get("to")
        target = (
            self.seats[read_number(place, len(self.seats), seat.number)].name if place is not None else ""
        )
        return NameLook(
            source=seat.name, name=clean_host_name(text(told, "name")), target=target,
            got=tuple(read_address(one) for one in entries(told, "got")), is_written=bool(told.get("is_written")),
        )  # fmt: skip

    def take_readings(self, seat: Seat, told: Message) -> None:
        """Take what the probes have read on a host.

        Raises:
            BadMessageError: See `take_opened`.
        """
        self._readings[seat.number] = read_readings(told, seat.name)
        self.torch[seat.number] = next(iter(parts(told, "torch")), {})

    def take_measure(self, seat: Seat, told: Message) -> None:
        """Take a measure; of several of one way, the best of each.

        Raises:
            BadMessageError: See `take_opened`.
        """
        target = read_number(told.get("target"), len(self.seats), seat.number)
        if text(told, "why"):
            return
        new = Measure(
            source=seat.name, target=self.seats[target].name, latency_s=number(told, "latency"), bytes_per_s=number(told, "speed"),
            resent=number(told, "resent") if isinstance(told.get("resent"), float) else None,
        )  # fmt: skip
        if min(new.latency_s, new.bytes_per_s, new.resent or 0.0) < 0:
            raise BadMessageError("it has measured less than nothing")
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
            replace(one, outcome="stalled", detail="small messages pass, but a stream does not")
            if one.outcome == "ok" and one.plane == "gloo" and (one.source, one.target) in stalled
            else one
            for one in self._links
        )
        return Together(
            hosts=tuple(self._make_card(one) for one in self.seats), missing=self.missing, links=links, measures=measures,
            names=tuple(self._names), doubled=tuple(self.doubled),
        )  # fmt: skip

    def _make_card(self, seat: Seat) -> HostCard:
        told = self._opened.get(seat.number, Opened())
        ahead_s, error_s = self.clocks.get(seat.number, (None, 0.0))
        return HostCard(
            name=seat.name, address=self.address_of(seat), readings=self._readings.get(seat.number, ()), clock_ahead_s=ahead_s,
            clock_error_s=error_s, lost=one_line(seat.lost), node_rank=seat.node_rank, num_hosts=seat.num_hosts, interfaces=told.interfaces,
            gloo_address=told.gloo, nccl_address=told.nccl, own_name=told.own_name, private=told.private,
            opening=self.openings.get(seat.number, ("", ""))[0], opening_out=self.openings.get(seat.number, ("", ""))[1],
        )  # fmt: skip
