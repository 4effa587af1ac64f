"""Ranks wait for each other in a circle: both send first, or two groups are used in different order (C9)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.case import name_ranks
from rankwise.verdict.sight import Sight
from rankwise.verdict.words import join_clauses, name_op, shorten, verb

if TYPE_CHECKING:
    from rankwise.evidence.facts import Op
    from rankwise.verdict.standing import Standing
    from rankwise.verdict.view import View

RULE = "circle"
#: Two ranks are not looked at in one moment: what moves is no circle.
_STILL_S = 1.0


def find(view: View) -> tuple[Sight, ...]:
    """Return the sights of it."""
    ranks = view.deadlocked
    standings = [view.standings[rank] for rank in ranks]
    ops = [one.op for one in standings if one.op is not None]
    if not ranks or len(ops) < len(ranks):
        return ()
    if any(view.by_rank[rank].still_s < _STILL_S for rank in ranks):
        return ()
    if not all(op.is_message or view.is_fresh(rank) for rank, op in zip(ranks, ops, strict=True)):
        return ()
    groups: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
    for one in standings:
        lane = view.lane_of(one.rank, one.op) if one.op else None
        name = name_op(one.op) + (f" among {lane.name}" if lane else "")
        told = (name, shorten(one.site), tuple(sorted(view.awaited[one.rank])))
        groups.setdefault(told, []).append(one.rank)
    clauses = [
        f"{name_ranks(some)} {verb(some, 'wait')} in {name} at {place} for {name_ranks(awaited)}"
        for (name, place, awaited), some in groups.items()
    ]
    outside = [
        view.standings[rank]
        for rank, awaited in view.awaited.items()
        if rank not in ranks and awaited & {*ranks}
    ]
    return (
        Sight(
            kind="hang", certainty="proof", rule=RULE, culprits=ranks, class_id=_name(ops), where=standings[0].site,
            waiting=view.list_waiting([*standings, *outside]), fix=_fix(view, standings), doing="in a collective", since_s=view.since(standings),
            key=f"circle {name_ranks(ranks)} {ops[0].name} #{ops[0].seq}",
            message=f"the ranks wait for each other in a circle: {join_clauses(clauses)}",
        ),
    )  # fmt: skip


def _name(ops: list[Op]) -> str | None:
    return "C9" if all(op.is_message for op in ops) else None


def _fix(view: View, standings: list[Standing]) -> str:
    ops = [one.op for one in standings if one.op is not None]
    mismet = [
        one for one in standings if one.op is not None and one.op.is_message and _goes_astray(view, one.op)
    ]
    if mismet or (any(op.is_message for op in ops) and not all(op.is_message for op in ops)):
        clauses = [_tell_message(one) for one in standings if one.op is not None and one.op.is_message]
        return f"give each send its receive, and each receive its send, on the rank that it names: {join_clauses(clauses)}"
    if all(op.is_message for op in ops):
        return (
            "let one side send first while the other receives (by the parity of the rank), or give all messages to "
            "torch.distributed.batch_isend_irecv"
        )
    return "use the groups in the same order on all ranks that belong to both"


def _goes_astray(view: View, op: Op) -> bool:
    """Tell whether the rank that a message names waits in no message itself: it is no turn that both want to have first."""
    peer = view.standings.get(op.peer) if op.peer is not None else None
    return peer is not None and peer.op is not None and not peer.op.is_message


def _tell_message(one: Standing) -> str:
    op = one.op
    if op is None:
        return ""
    doing = "sends to" if op.name in {"send", "isend"} else "expects from"
    return f"rank {one.rank} {doing} rank {op.peer} at {shorten(one.site)}"
