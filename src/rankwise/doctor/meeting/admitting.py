"""Who may sit at the table: hosts that come in time, each with a node rank of its own."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, final

from rankwise.doctor.meeting.gathering import find_missing
from rankwise.doctor.meeting.table import Seat, refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.base.clock import Clock
    from rankwise.doctor.meeting.plan import Plan
    from rankwise.doctor.meeting.wire import Message

#: So many that were sent away are told of: more than that are no hosts of one job.
_MOST_SENT_AWAY = 64
#: So many hosts that say no node rank are let in where nobody knows how many are to come.
_MOST_WITHOUT_RANK = 4096
_FULL = "{wanted} hosts without a node rank have joined already, and no more are expected"


@final
class Admission:
    """Decides who is let in, and remembers who was rejected.

    Args:
        name: What the holder's host calls itself.
        plan: The plan.
        here: Tells who is here.
        clock: Where the time comes from.
    """

    def __init__(self, name: str, plan: Plan, here: Callable[[], Sequence[Seat]], clock: Clock) -> None:
        self._name, self._plan, self._here, self._clock = name, plan, here, clock
        self._begin_s = clock.monotonic()
        self._sent_away: set[tuple[str, str]] = set()
        #: Known in this process only: by it our own host is known, and our own meeting, if we reach it from outside.
        self.secret = secrets.token_hex(16)
        #: Whether hosts are still waited for.
        self.is_open = True
        #: Hosts that claimed one node rank: see `together.Together`.
        self.doubled: list[tuple[str, str, int]] = []

    def admit(self, seat: Seat) -> Message | None:
        """Return why a host is sent away; None if it is welcome."""
        plan = self._plan
        if seat.rival:
            # It holds a meeting of its own, as node 0, and asks whether there is another one at its master's address.
            is_own = seat.rival == self.secret
            return (
                refuse("this is your own rendezvous", "")
                if is_own
                else self._send_away(seat, self._name, seat.met_at, 0)
            )
        if not self.is_open:
            late_s = self._clock.monotonic() - self._begin_s
            return refuse(
                f"the rendezvous at {plan.endpoint} has started without {seat.name}, which arrived {late_s:.0f} s after it was opened",
                "start it on all hosts at the same time, or allow more time: --arrival-timeout 120", "I1",
            )  # fmt: skip
        if seat.is_own:
            return None
        if seat.node_rank is None:
            wanted = plan.num_hosts or len(plan.expected) or _MOST_WITHOUT_RANK
            without = sum(one.node_rank is None and not one.is_own for one in self._here())
            return (
                refuse(_FULL.format(wanted=wanted), "give each host its --node-rank, from 0")
                if without >= wanted
                else None
            )
        same = [(one.name, one.address) for one in self._here() if one.node_rank == seat.node_rank]
        # Our own host may come later than others do; its place is its own all the same.
        if not same and plan.node_rank == seat.node_rank:
            same = [(self._name, seat.met_at)]
        return self._send_away(seat, *same[0], seat.node_rank) if same else None

    def list_missing(self, here: Sequence[Seat]) -> tuple[str, ...]:
        """Return who has not come; who was rejected has, and so has who came again with another rank."""
        away = self._sent_away - {(one.name, one.address) for one in here}
        return find_missing(here, self._plan, len(away))

    def describe_vacancy(self) -> str:
        """Return who is waited for, where all that are missing were sent away."""
        names = [name for _, name, _ in self.doubled]
        return f"{', '.join(names)}, sent away, with another node rank" if names else "others"

    def _send_away(self, seat: Seat, name: str, address: str, rank: int) -> Message:
        who = (seat.name, seat.address)
        if who not in self._sent_away and len(self._sent_away) < _MOST_SENT_AWAY:
            self._sent_away.add(who)
            self.doubled.append((name, seat.name, rank))
        return refuse(
            f"{name} ({address}) and {seat.name} ({seat.address}) both claim node rank {rank}",
            "give each host a --node-rank of its own, from 0", "I10",
        )  # fmt: skip
