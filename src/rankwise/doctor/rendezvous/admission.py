"""Which hosts may take part: those that arrive in time, each with a node rank of its own."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, final

from rankwise.doctor.rendezvous.peer import find_missing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.base.clock import Clock
    from rankwise.doctor.rendezvous.peer import Peer
    from rankwise.doctor.rendezvous.plan import Plan
    from rankwise.doctor.rendezvous.wire import Message

#: So many rejected hosts are reported: more than that are no hosts of one job.
_MOST_REJECTED = 64
#: So many hosts without a node rank are admitted where nobody knows how many are to come.
_MOST_WITHOUT_RANK = 4096


def refuse(why: str, hint: str, class_id: str = "") -> Message:
    """Return the message that refuses a host."""
    return {"no": why, "hint": hint, "class": class_id}


@final
class Admission:
    """Decides who is admitted, and remembers who was rejected.

    Args:
        name: What the coordinator's host calls itself.
        plan: The plan.
        here: Returns who is here.
        clock: Where the time comes from.
    """

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
            return own if peer.rival == self.secret else self._reject(peer, self._name, peer.met_at, 0)
        if not self.is_open:
            late_s = self._clock.monotonic() - self._begin_s
            return refuse(
                f"the rendezvous at {plan.endpoint} has started without {peer.name}, which arrived {late_s:.0f} s after it was opened",
                "start it on all hosts at the same time, or allow more time: --arrival-timeout 120", "I1",
            )  # fmt: skip
        if peer.is_own:
            return None
        if peer.node_rank is None:
            return self._admit_without_rank()
        same = [(one.name, one.address) for one in self._here() if one.node_rank == peer.node_rank]
        # Our own host may arrive later than others do; its place is its own all the same.
        if not same and plan.node_rank == peer.node_rank:
            same = [(self._name, peer.met_at)]
        return self._reject(peer, *same[0], peer.node_rank) if same else None

    def _admit_without_rank(self) -> Message | None:
        wanted = self._plan.num_hosts or len(self._plan.expected) or _MOST_WITHOUT_RANK
        if sum(one.node_rank is None and not one.is_own for one in self._here()) < wanted:
            return None
        full = f"{wanted} hosts without a node rank have joined already, and no more are expected"
        return refuse(full, "give each host its --node-rank, from 0")

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
