"""The hosts of the rendezvous, as its coordinator sees them: who may take part, how they are numbered and named, and which are missing."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import final

from rankwise.base.clock import Clock
from rankwise.doctor.multi_host.connection import Connection
from rankwise.doctor.multi_host.plan import Plan
from rankwise.doctor.multi_host.wire import Message
from rankwise.doctor.units import join_names

_LAST = 1 << 30


@dataclass(eq=False, slots=True, kw_only=True)
class Peer:
    """A host.

    Attributes:
        name: Fit for a terminal and for a command's comment; made distinct when all are there.
        arrived_at: At which of our addresses it arrived.
        rival: What another coordinator calls itself, which asks whether this is it; empty for all others.
        lost: Why it is not here any more; empty while it is.
        clock_ahead_s: By how much its clock is ahead of ours, if it has said so; ``clock_error_s``: how far off that may be.
        awaited: Which kind of order it has not answered, or has answered last; ``answer``: what it answered.
    """

    connection: Connection
    address: str = ""
    arrived_at: str = ""
    name: str = ""
    node_rank: int | None = None
    num_hosts: int | None = None
    is_own: bool = False
    rival: str = ""
    number: int = -1
    lost: str = ""
    clock_ahead_s: float | None = None
    clock_error_s: float = math.inf
    awaited: str = ""
    answer: Message | None = None

    @property
    def is_here(self) -> bool:
        """Whether it still answers."""
        return not self.lost


def short_name(name: str) -> str:
    """Return a host's name without user and domain: ``node1`` of ``me@node1.cluster``; an address stays."""
    bare = name.rpartition("@")[2]
    return bare if bare.replace(".", "").isdigit() or ":" in bare else bare.partition(".")[0]


def _find_expected(peer: Peer, expected: Sequence[str]) -> int | None:
    own = {short_name(peer.name), peer.address}
    return next((index for index, name in enumerate(expected) if short_name(name) in own), None)


def order_peers(peers: Sequence[Peer], plan: Plan) -> list[Peer]:
    """Number the hosts, and return them in this order: the coordinator's, then by node rank, as they are expected, by name."""

    def key(peer: Peer) -> tuple[bool, int, int, str]:
        place = _find_expected(peer, plan.expected)
        rank = _LAST if peer.node_rank is None else peer.node_rank
        return (not peer.is_own, rank, _LAST if place is None else place, peer.name)

    found = sorted(peers, key=key)
    for index, peer in enumerate(found):
        peer.number = index
    return found


def make_names_distinct(peers: Sequence[Peer]) -> None:
    """Add the address to a name that several hosts have, and a number where that is the same, too."""
    names = [one.name for one in peers]
    for peer in peers:
        if names.count(peer.name) > 1:
            peer.name = f"{peer.name} ({peer.address})"
    taken: set[str] = set()
    for peer in peers:
        if peer.name in taken:
            peer.name = f"{peer.name} #{peer.number}"
        taken.add(peer.name)


def find_missing(here: Sequence[Peer], plan: Plan, num_rejected: int = 0) -> tuple[str, ...]:
    """Return who has not arrived: by name, else by node rank, else how many; those that were rejected are reported elsewhere."""
    wanted = plan.num_hosts or len(plan.expected) or max((one.num_hosts or 0 for one in here), default=0)
    absent = wanted - len(here) - num_rejected
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


def list_names(peers: Iterable[Peer]) -> str:
    """Return the names of hosts in one line, by number; the first ones of many."""
    return join_names([one.name for one in sorted(peers, key=lambda one: (one.number, one.name))])


#: So many rejected hosts are reported: more than that are no hosts of one job.
_MOST_REJECTED = 64
#: No job has more.
_MOST_HOSTS = 4096


def refuse(why: str, hint: str, class_id: str = "") -> Message:
    """Return the message that refuses a host."""
    return {"no": why, "hint": hint, "class": class_id}


@final
class Admission:
    """Decides who is admitted, and remembers who was rejected; ``here`` returns who is here."""

    def __init__(self, name: str, plan: Plan, here: Callable[[], Sequence[Peer]], clock: Clock) -> None:
        self._name, self._plan, self._here, self._clock = name, plan, here, clock
        self._begin_s = clock.monotonic()
        self._rejected: set[tuple[str, str]] = set()
        #: Known in this process only: by it our own host is known, and our own rendezvous, if we reach it from outside.
        self.secret = secrets.token_hex(16)
        #: Whether hosts are still waited for.
        self.is_open = True
        #: Hosts that claimed one node rank: see `cluster_report.Together`.
        self.doubled: list[tuple[str, str, int]] = []

    def admit(self, peer: Peer) -> Message | None:
        """Return why a host is rejected; None if it is admitted."""
        plan = self._plan
        if peer.rival:
            # It is a coordinator itself, as node 0, and asks whether there is another one at its master's address.
            own = refuse("this is your own rendezvous", "")
            return own if peer.rival == self.secret else self._reject(peer, self._name, peer.arrived_at, 0)
        if not self.is_open:
            late_s = self._clock.monotonic() - self._begin_s
            return refuse(
                f"the rendezvous at {plan.endpoint} has started without {peer.name}, which arrived {late_s:.0f} s after it was opened",
                "start it on all hosts at the same time, or allow more time: --arrival-timeout 120", "I1",
            )  # fmt: skip
        if peer.is_own:
            return None
        if len(self._here()) >= _MOST_HOSTS:
            return refuse(f"{_MOST_HOSTS} hosts have joined already", "give each host its --node-rank, from 0")
        if peer.node_rank is None:
            return None
        same = [(one.name, one.address) for one in self._here() if one.node_rank == peer.node_rank]
        # Our own host may arrive later than others do; its place is its own all the same.
        if not same and plan.node_rank == peer.node_rank:
            same = [(self._name, peer.arrived_at)]
        return self._reject(peer, *same[0], peer.node_rank) if same else None

    def list_missing(self, here: Sequence[Peer]) -> tuple[str, ...]:
        """Return who has not arrived; a rejected host has, and so has one that came again with another rank."""
        away = self._rejected - {(one.name, one.address) for one in here}
        return find_missing(here, self._plan, len(away))

    def describe_vacancy(self) -> str:
        """Return who is waited for, where all that are missing were rejected."""
        names = [name for _, name, _ in self.doubled]
        return f"{', '.join(names)}, rejected, with another node rank" if names else "others"

    def _reject(self, peer: Peer, name: str, address: str, rank: int) -> Message:
        who = (peer.name, peer.address)
        if who not in self._rejected and len(self._rejected) < _MOST_REJECTED:
            self._rejected.add(who)
            self.doubled.append((name, peer.name, rank))
        return refuse(
            f"{name} ({address}) and {peer.name} ({peer.address}) both claim node rank {rank}",
            "give each host a --node-rank of its own, from 0", "I10",
        )  # fmt: skip
