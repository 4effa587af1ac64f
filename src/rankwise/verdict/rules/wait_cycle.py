"""Ranks wait for each other in a circle: both send first, or two groups are used in different order (C9)."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, NamedTuple

from rankwise.base.rank_names import name_ranks
from rankwise.evidence.reader.scene import STILL_S
from rankwise.verdict.explain import explain_waiting
from rankwise.verdict.finding import JobFinding
from rankwise.verdict.source_text import find_path, list_imported, list_names, name_of, split_site
from rankwise.verdict.uneven_steps import explain_fewer
from rankwise.verdict.wording import join_clauses, name_op, name_stages, shorten, verb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.evidence.reader.scene import Op
    from rankwise.verdict.rank_state import RankState
    from rankwise.verdict.scene_view import SceneView

RULE = "wait_cycle"
_ORDER = (
    "let one side send first while the other receives (by the parity of the rank), or give all messages to "
    "torch.distributed.batch_isend_irecv"
)
_GROUPS = "use the groups in the same order on all ranks that belong to both"


class _Cause(NamedTuple):
    """Who is to blame for the circle, and why."""

    culprits: tuple[int, ...]
    class_id: str | None
    where: str | None
    message: str
    fix: str
    key: str = ""


def find(view: SceneView) -> Iterator[JobFinding]:
    """Yield the findings of it."""
    ranks = view.deadlocked
    rank_states = [view.rank_states[rank] for rank in ranks]
    ops = [one.op for one in rank_states if one.op is not None]
    if not ranks:
        yield from _find_undelivered(view)
    if not ranks or len(ops) < len(ranks) or view.crossing is not None:
        return
    if any(view.by_rank[rank].still_s < STILL_S for rank in ranks):
        return
    if not all(op.is_message or view.is_fresh(rank) for rank, op in zip(ranks, ops, strict=True)):
        return
    outside = [
        view.rank_states[rank] for rank, awaited in view.awaited.items() if rank not in ranks and awaited & {*ranks}
    ]
    waiting = view.list_waiting([*rank_states, *outside])
    lost = _find_lost(view, rank_states)
    if lost:
        cause = _explain_diverged(view, rank_states) or _explain_lost(view, rank_states, lost)
        waiting = tuple(one for one in waiting if one.rank not in cause.culprits)
    else:
        cause = _explain_circle(view, rank_states, ops)
    yield JobFinding(
        kind="hang", certainty="proof", rule=RULE, culprits=cause.culprits, class_id=cause.class_id, where=cause.where,
        message=cause.message, fix=cause.fix, waiting=waiting, doing="in a collective", since_s=view.since(rank_states),
        key=cause.key or f"circle {name_ranks(ranks, None)} {ops[0].name} #{ops[0].seq}",
    )  # fmt: skip


def _find_undelivered(view: SceneView) -> Iterator[JobFinding]:
    """Yield messages over Gloo that do not come although their sender has begun to send them: it has discarded the handle, and waits for its peer.

    Since when, their records tell: Gloo's own thread may be busy with what is left of a discarded handle.
    """
    for one in view.rank_states.values():
        op, peer = one.op, view.rank_states.get(one.op.peer) if one.op and one.op.peer is not None else None
        awaited = None if peer is None else peer.op
        # Who sends next may only be slow.
        if (
            op is None
            or peer is None
            or awaited is None
            or {op.name, awaited.name} - {"recv", "irecv"}
            or awaited.peer != one.rank
        ):
            continue
        members = view.members_of(one.rank, op)
        issued = [
            it
            for it in view.by_rank[peer.rank].ops
            if (it.peer, it.seq, it.is_over) == (one.rank, op.seq, False) and view.members_of(peer.rank, it) == members
        ]
        sent = next((it for it in issued if _is_discarded(view, it, op)), None)
        began_s = max(float("inf") if it.entered_s is None else it.entered_s for it in (op, awaited))
        if sent is None or members[1] != "gloo" or view.scene.now_s - began_s < STILL_S:
            continue
        yield JobFinding(
            kind="hang", certainty="suspicion", rule=RULE, culprits=(peer.rank,), class_id="C12", where=sent.site, is_stuck=False,
            message=f"rank {one.rank} waits in {name_op(op)} at {shorten(one.site)}; rank {peer.rank} has called {sent.name} for it at "
            f"{shorten(sent.site)} and discarded what that returns, and waits in {name_op(awaited)} at {shorten(peer.site)}",
            fix=f"keep what {sent.name} returns at {shorten(sent.site)}, and wait() for it: what a discarded handle sends may never arrive",
            key=f"undelivered {one.rank} {peer.rank} {sent.seq}", waiting=view.list_waiting([one]), doing="in a collective", since_s=began_s,
        )  # fmt: skip


def _is_discarded(view: SceneView, sent: Op, awaited: Op) -> bool:
    """Tell whether the line of a message is torch's call alone, so that nobody can wait for its handle; not with tags, which may differ."""
    paths = [find_path(view.source.text_of(file), line) for file, line in map(split_site, (sent.site, awaited.site))]
    lines = [path[-1].node for path in paths if path]
    call = lines[0].value if len(lines) == 2 and isinstance(lines[0], ast.Expr) else None
    if not sent.is_send or not isinstance(call, ast.Call) or name_of(call) != sent.name:
        return False
    words = {one.arg for line in lines for one in ast.walk(line) if isinstance(one, ast.keyword)}
    torchs = list_imported(view.source.text_of(split_site(sent.site)[0]), "torch")
    return "tag" not in words and not torchs.isdisjoint(list_names(call.func))


def _explain_circle(view: SceneView, rank_states: list[RankState], ops: list[Op]) -> _Cause:
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
    class_id, fix = ("C9", _ORDER) if all(op.is_message for op in ops) else (None, _GROUPS)
    message = f"the ranks wait for each other in a circle: {join_clauses(clauses)}"
    return _Cause(tuple(one.rank for one in rank_states), class_id, rank_states[0].site, message, fix)


# ------------------------------------------------------------ messages that have no counterpart


def _find_lost(view: SceneView, rank_states: list[RankState]) -> list[tuple[int, int]]:
    """Return the messages that their peer does not answer: the rank that waits in one, and its peer.

    A peer that waits in a message with the other one only wants to be first. One that waits in a collective, or in a
    message with a third one, has something else in mind.
    """
    if all(_is_message(one) for one in rank_states):
        return []  # nobody may have come too far: then it is their order
    lost = []
    for one in rank_states:
        peer = view.rank_states.get(one.op.peer) if one.op is not None and one.op.peer is not None else None
        if one.op is None or not one.op.is_message or peer is None or peer.op is None:
            continue
        is_crossed = peer.op.peer != one.rank and peer.op.is_send != one.op.is_send
        if not peer.op.is_message or is_crossed:
            lost.append((one.rank, peer.rank))
    # Of a send and a receive that would fit each other, but for one of their numbers, nobody else has a share; unless
    # one was answered before by the rank that it names, which may have left its part out.
    near = [pair for pair in lost if _is_message(view.rank_states[pair[1]])]
    return near if near and not any(_has_met(view, rank) for pair in near for rank in pair) else lost


# ------------------------------------------------------ a stage that does something else


def _explain_diverged(view: SceneView, rank_states: list[RankState]) -> _Cause | None:
    """Return which ranks have left a pipeline's schedule, in which all others of the circle wait; None if it is not that."""
    inside = [one for one in rank_states if one.op is not None and one.op.flow is not None]
    away = [one for one in rank_states if one not in inside]
    parted = tuple(one.rank for one in away)
    if not inside or not parted or any(rank not in view.stages for rank in parted):
        return None
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
    key = f"parted {name_ranks(parted, None)} {away[0].op.name if away[0].op else ''}"
    return _Cause(parted, class_id, where, f"{join_clauses(lines)}; {explain_waiting(inside)}", fix, key)


def _has_met(view: SceneView, rank: int) -> bool:
    """Tell whether a rank has had a message before with the rank that it now waits for."""
    op = view.rank_states[rank].op
    return op is not None and any(
        one.is_message and one.is_over and one.peer == op.peer for one in view.by_rank[rank].ops
    )


def _is_message(one: RankState) -> bool:
    return one.op is not None and one.op.is_message


def _explain_lost(view: SceneView, rank_states: list[RankState], lost: list[tuple[int, int]]) -> _Cause:
    culprits = tuple(sorted({rank for pair in lost for rank in pair}))
    lines = []
    for rank, peer in lost:
        there = view.rank_states[peer]
        away = (
            _describe_message(there)
            if _is_message(there)
            else f"rank {peer} waits in {name_op(there.op)} at {shorten(there.site)}"
        )
        lines.append(f"{_describe_message(view.rank_states[rank])}, and {away}")
    others = [one for one in rank_states if one.rank not in culprits]
    ranks = [one.rank for one in others]
    rest = (
        f"; {name_ranks(ranks)} {verb(ranks, 'wait')} for them in {name_op(others[0].op)} at {shorten(others[0].site)}"
        if others
        else ""
    )
    return _Cause(
        culprits,
        "C9" if all(_is_message(view.rank_states[rank]) for rank in culprits) else None,
        view.rank_states[lost[0][0]].site,
        f"a message has no counterpart, so the ranks wait for each other: {join_clauses(lines)}{rest}",
        _fix_lost(view, lost),
    )


def _fix_lost(view: SceneView, lost: list[tuple[int, int]]) -> str:
    rank, peer = lost[0]
    one, there = view.rank_states[rank], view.rank_states[peer]
    if one.op is None:
        return ""
    answer = "recv" if one.op.is_send else "send"
    if _is_message(there):
        given, own = ("dst", "src") if one.op.is_send else ("src", "dst")
        return (
            f"let both name each other: {given}={peer} at {shorten(one.site)} needs {own}={rank} at {shorten(there.site)}, "
            "or another rank was meant"
        )
    return f"let rank {peer} make the {answer} that answers {shorten(one.site)} before it goes to {shorten(there.site)}, or leave that message out"


def _describe_message(one: RankState) -> str:
    op = one.op
    if op is None:
        return ""
    doing = "sends to" if op.is_send else "expects a message from"
    return f"rank {one.rank} {doing} rank {op.peer} at {shorten(one.site)}"
