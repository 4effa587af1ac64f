"""One host of the rendezvous, as its coordinator sees it; how hosts are numbered and named, and which are missing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rankwise.doctor.units import join_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rankwise.doctor.rendezvous.connection import Connection
    from rankwise.doctor.rendezvous.plan import Plan
    from rankwise.doctor.rendezvous.wire import Message

_LAST = 1 << 30


@dataclass(eq=False, slots=True, kw_only=True)
class Peer:
    """A host.

    Attributes:
        name: Its name, fit for a terminal and for a command's comment; made distinct when all are there.
        address: Where it comes from; ``met_at``: at which of our addresses.
        is_own: Whether it is the coordinator's own host.
        rival: What another coordinator calls itself, which asks whether this is it; empty for all others.
        lost: Why it is not here any more; empty while it is.
        answers: The last answer to each kind of order.
    """

    connection: Connection
    address: str = ""
    met_at: str = ""
    name: str = ""
    node_rank: int | None = None
    num_hosts: int | None = None
    is_own: bool = False
    rival: str = ""
    number: int = -1
    lost: str = ""
    answers: dict[str, Message] = field(default_factory=dict)

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
