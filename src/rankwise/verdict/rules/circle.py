"""Ranks wait for each other in a circle: both send first, or two groups are used in different order (C9)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.base.rank_names import name_ranks
from rankwise.evidence.reader.scene import STILL_S
from rankwise.verdict.explain import explain_waiting
from rankwise.verdict.finding import JobFinding
from rankwise.verdict.uneven_steps import explain_fewer
from rankwise.verdict.wording import join_clauses, name_op, name_stages, shorten, verb

if TYPE_CHECKING:
    from rankwise.evidence.reader.scene import Op
    from rankwise.verdict.case import Waiting
    from rankwise.verdict.rank_state import RankState
    from rankwise.verdict.scene_view import SceneView

RULE = "circle"


def find(view: SceneView) -> tuple[JobFinding, ...]:
    """Return the findings of it."""
    ranks = view.deadlocked
    rank_states = [view.rank_states[rank] for rank in ranks]
    ops = [one.op for one in rank_states if one.op is not None]
    if not ranks or len(ops) < len(ranks) or view.crossing is not None:
        return ()
    if any(view.by_rank[rank].still_s < STILL_S for rank in ranks):
        return ()
    if not all(op.is_message or view.is_fresh(rank) for rank, op in zip(ranks, ops, strict=True)):
        return ()
    groups: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
    for one in rank_states:
        sequence = view.sequence_of(one.rank, one.op) if one.op else None
        name = name_op(one.op) + (f" among {sequence.name}" if sequence else "")
        found = (name, shorten(one.site), tuple(sorted(view.awaited[one.rank])))
        groups.setdefault(found, []).append(one.rank)
    clauses = [
        f"{name_ranks(some)} {verb(some, 'wait')} in {name} at {place} for {name_ranks(awaited)}"
        for (name, place, awaited), some in groups.items()
    ]
    outside = [
        view.rank_states[rank]
        for rank, awaited in view.awaited.items()
        if rank not in ranks and awaited & {*ranks}
    ]
    lost = _find_lost(view, rank_states)
    waiting = view.list_waiting([*rank_states, *outside])
    if lost and (parted := _find_diverged(view, rank_states)):
        return (_explain_diverged(view, rank_states, parted, waiting),)
    if lost:
        culprits = tuple(sorted({rank for pair in lost for rank in pair}))
        first = view.rank_states[lost[0][0]]
        return (
            JobFinding(
                kind="hang", certainty="proof", rule=RULE, culprits=culprits, class_id=_name_lost(view, lost), where=first.site,
                waiting=tuple(one for one in waiting if one.rank not in culprits), doing="in a collective", since_s=view.since(rank_states),
                key=f"circle {name_ranks(ranks, None)} {ops[0].name} #{ops[0].seq}",
                message=_tell_lost(view, lost, [one for one in rank_states if one.rank not in culprits]), fix=_fix_lost(view, lost),
            ),
        )  # fmt: skip
    return (
        JobFinding(
            kind="hang", certainty="proof", rule=RULE, culprits=ranks, class_id=_name(ops), where=rank_states[0].site,
            waiting=waiting, fix=_fix(ops), doing="in a collective", since_s=view.since(rank_states),
            key=f"circle {name_ranks(ranks, None)} {ops[0].name} #{ops[0].seq}",
            message=f"the ranks wait for each other in a circle: {join_clauses(clauses)}",
        ),
    )  # fmt: skip


def _name(ops: list[Op]) -> str | None:
    return "C9" if all(op.is_message for op in ops) else None


def _fix(ops: list[Op]) -> str:
    if all(op.is_message for op in ops):
        return (
            "let one side send first while the other receives (by the parity of the rank), or give all messages to "
            "torch.distributed.batch_isend_irecv"
        )
    return "use the groups in the same order on all ranks that belong to both"


# ------------------------------------------------------------ messages that have no counterpart


def _find_lost(view: SceneView, rank_states: list[RankState]) -> list[tuple[int, int]]:
    """Return the messages that their peer does not answer: the rank that waits in one, and its peer.

    A peer that waits in a message with the other one only wants to be first. One that waits in a collective, or in a message
    with a third one, has something else in mind.
    """
    if all(_is_message(one) for one in rank_states):
        return []  # nobody may have come too far: then it is their order
    lost = []
    for one in rank_states:
        peer = view.rank_states.get(one.op.peer) if one.op is not None and one.op.peer is not None else None
        if one.op is None or not one.op.is_message or peer is None or peer.op is None:
            continue
        is_crossed = peer.op.peer != one.rank and _is_send(peer.op) != _is_send(one.op)
        if not peer.op.is_message or is_crossed:
            lost.append((one.rank, peer.rank))
    # Of a send and a receive that would fit each other, but for one of their numbers, nobody else has a share; unless one was
    # answered before by the rank that it names, which may have left its part out.
    near = [pair for pair in lost if _is_message(view.rank_states[pair[1]])]
    return near if near and not any(_has_met(view, rank) for pair in near for rank in pair) else lost


# ------------------------------------------------------ a stage that does something else


def _find_diverged(view: SceneView, rank_states: list[RankState]) -> tuple[int, ...]:
    """Return the ranks that have left a pipeline's schedule, in which all others of the circle wait; none if it is not that."""
    inside = {one.rank for one in rank_states if one.op is not None and one.op.flow is not None}
    parted = tuple(one.rank for one in rank_states if one.rank not in inside)
    return parted if inside and all(rank in view.stages for rank in parted) else ()


def _explain_diverged(view: SceneView, rank_states: list[RankState], parted: tuple[int, ...], waiting: tuple[Waiting, ...]) -> JobFinding:  # fmt: skip
    inside = [one for one in rank_states if one.rank not in parted]
    away = [view.rank_states[rank] for rank in parted]
    class_id, fix, where = explain_fewer(view, inside[0].site, inside[0].rank, parted, [one.site for one in away]) or (
        "D14",
        f"let all stages make the same number of steps: {name_ranks(parted)} reached {shorten(away[0].site)} without that of the others at "
        f"{shorten(inside[0].site)}; skipping a step needs one decision for all (all_reduce the flag first)",
        away[0].site,
    )  # fmt: skip
    lines = [
        f"{name_stages(view.stages[one.rank])} (rank {one.rank}) is in {name_op(one.op)} at {shorten(one.site)}"
        for one in away
    ]
    return JobFinding(
        kind="hang", certainty="proof", rule=RULE, culprits=parted, class_id=class_id, where=where, fix=fix,
        waiting=tuple(one for one in waiting if one.rank not in parted), doing="in a collective", since_s=view.since(rank_states),
        key=f"parted {name_ranks(parted, None)} {away[0].op.name if away[0].op else ''}",
        message=f"{join_clauses(lines)}; {explain_waiting(inside)}",
    )  # fmt: skip


def _has_met(view: SceneView, rank: int) -> bool:
    """Tell whether a rank has had a message before with the rank that it now waits for."""
    op, evidence = view.rank_states[rank].op, view.by_rank[rank].evidence
    return (
        op is not None
        and evidence is not None
        and any(one.is_message and one.is_over and one.peer == op.peer for one in evidence.ops)
    )


def _is_send(op: Op) -> bool:
    return op.name in {"send", "isend"}


def _name_lost(view: SceneView, lost: list[tuple[int, int]]) -> str | None:
    return "C9" if all(_is_message(view.rank_states[rank]) for pair in lost for rank in pair) else None


def _is_message(one: RankState) -> bool:
    return one.op is not None and one.op.is_message


def _tell_lost(view: SceneView, lost: list[tuple[int, int]], others: list[RankState]) -> str:
    lines = []
    for rank, peer in lost:
        there = view.rank_states[peer]
        away = (
            _tell_message(there)
            if _is_message(there)
            else f"rank {peer} waits in {name_op(there.op)} at {shorten(there.site)}"
        )
        lines.append(f"{_tell_message(view.rank_states[rank])}, and {away}")
    ranks = [one.rank for one in others]
    rest = (
        f"; {name_ranks(ranks)} {verb(ranks, 'wait')} for them in {name_op(others[0].op)} at {shorten(others[0].site)}"
        if others
        else ""
    )
    return f"a message has no counterpart, so the ranks wait for each other: {join_clauses(lines)}{rest}"


def _fix_lost(view: SceneView, lost: list[tuple[int, int]]) -> str:
    rank, peer = lost[0]
    one, there = view.rank_states[rank], view.rank_states[peer]
    if one.op is None:
        return ""
    answer = "recv" if _is_send(one.op) else "send"
    if _is_message(there):
        given, own = ("dst", "src") if _is_send(one.op) else ("src", "dst")
        return (
            f"let both name each other: {given}={peer} at {shorten(one.site)} needs {own}={rank} at {shorten(there.site)}, "
            "or another rank was meant"
        )
    return f"let rank {peer} make the {answer} that answers {shorten(one.site)} before it goes to {shorten(there.site)}, or leave that message out"


def _tell_message(one: RankState) -> str:
    op = one.op
    if op is None:
        return ""
    doing = "sends to" if _is_send(op) else "expects a message from"
    return f"rank {one.rank} {doing} rank {op.peer} at {shorten(one.site)}"
