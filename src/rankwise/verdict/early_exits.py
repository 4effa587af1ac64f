"""Who left a job with exit code 0 while other ranks still needed it, and why, by the records of what each of them has done.

The others lose their peer, and complain of no more than that. But the records show who never came to a collective that
others had entered; no clock has to be compared for it, and so it holds over several nodes, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.base.rank_names import name_ranks
from rankwise.verdict.case import end_of
from rankwise.verdict.error_origin import find_blame
from rankwise.verdict.exit_calls import find_exit_call, is_regular_end
from rankwise.verdict.finding import JobFinding, Waiting
from rankwise.verdict.rules.forward_on_some import fix_forward
from rankwise.verdict.rules.member_ended import fix_fewer
from rankwise.verdict.scene_view import SceneView
from rankwise.verdict.silent_exits import find_silent_exits
from rankwise.verdict.uneven_steps import Explained, advise_even_steps, explain_fewer, explain_uneven
from rankwise.verdict.wording import (
    is_buffers,
    is_gradient,
    is_sharded_pass,
    name_briefly,
    name_op,
    shorten,
    verb,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from rankwise.evidence.reader.scene import Op, Scene
    from rankwise.verdict.case import Case
    from rankwise.verdict.guards import Guard


def find_early_exits_here(case: Case) -> JobFinding | None:
    """Return the finding of ranks of one node that have left early; None if the records do not show it.

    Args:
        case: The attempt; its scene may be older than the last end.
    """
    if case.scene is None:
        return None
    # Who was stopped and yet complains lost its peer before.
    ends = {end.rank: end for end in case.ranks if end.code is not None and (end.stopped_s is None or end.fault)}
    ranks = tuple(
        replace(facts, state="ended", code=end.code, fault=end.fault, left_at=end.left_at)
        if (end := ends.get(facts.rank))
        else facts
        for facts in case.scene.ranks
    )
    lost = [end for end in ends.values() if end.code != 0 and end.left_s is not None]
    felt = min(lost, key=lambda end: end.left_s or 0.0, default=None)
    early = {end.rank for end in find_silent_exits(case, felt)}
    # Who ended with 0 after the first had lost its peer is not the one that it lost.
    late = {rank for rank, end in ends.items() if end.code == 0 and rank not in early}
    stopped = late | {facts.rank for facts in ranks if facts.rank not in ends}
    return find_early_exits(replace(case.scene, ranks=ranks), stopped)


def find_early_exits(scene: Scene, stopped: Collection[int]) -> JobFinding | None:
    """Return the finding of ranks that have left early.

    Args:
        scene: All ranks of the job, after their end.
        stopped: Those that a launcher has stopped; how they ended tells nothing.

    Returns:
        None if a rank has failed by itself, which its own node tells, or if nobody left too early by the records.
    """
    by_themselves = [facts for facts in scene.ranks if facts.rank not in stopped or facts.fault is not None]
    failed = {facts.rank: facts for facts in by_themselves if facts.code != 0}
    ends = [end_of(facts, scene.now_s) for facts in failed.values()]
    if not scene.is_whole or any(find_blame(end) != "peer" for end in ends):
        return None
    view = SceneView(scene)
    left = {facts.rank for facts in by_themselves if facts.code == 0 and facts.evidence is not None}
    all_left = [facts for facts in scene.ranks if facts.code == 0]
    missed: dict[int, Op] = {}
    gone: set[int] = set()
    for sequence in view.sequences:
        for rank in failed.keys() & sequence.ops.keys():
            op = sequence.ops[rank][sequence.last(rank)]
            # What C++ issued at the last is not known of each; but if only one has left, it is who is missed.
            is_sure = op.source == "python" or len(all_left) == 1
            behind = {
                one
                for one in left & set(sequence.ranks)
                if sequence.is_behind(one, op.seq) and (is_sure or view.is_fresh(one))
            }
            if behind:
                missed[rank] = op
                gone |= behind
    return _make_finding(view, tuple(sorted(gone)), missed) if gone else None


def _make_finding(view: SceneView, gone: tuple[int, ...], missed: dict[int, Op]) -> JobFinding:
    first = min(missed)
    at, who = shorten(missed[first].site), name_ranks(gone)
    # Who has been there before is not kept away by a test of the rank: it came less often.
    sequence = view.sequence_of(first, missed[first])
    were_there = sequence is not None and all(sequence.has_been_at(rank, missed[first].site) for rank in gone)
    is_sharded = were_there and is_sharded_pass(missed[first])
    trained = is_gradient(missed[first]) or is_sharded
    asked = next((one for one in view.source.guards_where(first, missed[first].site) if one.is_rank_test), None)
    if asked is not None and not were_there:
        return _describe_alone(asked, missed, gone)
    even = fix_fewer(gone, missed[first].site)
    explained = explain_fewer(view, missed[first].site, first, gone)
    noted = {view.by_rank[rank].left_at for rank in gone}
    left_at = find_exit_call(view.scene.sources, 0) if noted == {None} else None
    if len(noted) == 1 and (place := next(iter(noted))) and not is_regular_end(view.scene.sources, place):
        left_at = place
    if explained is None and left_at:
        fix = f"{who} {'may have left' if noted == {None} else 'left'} by the exit call at {shorten(left_at)}; {even}"
        explained = Explained("R6", fix, left_at)
    class_id, fix, where = explained or (
        "D14" if trained else "R6",
        advise_even_steps(view, first, missed[first].site, is_sharded=is_sharded) if trained else even,
        _find_last_place(view, gone) or missed[first].site,
    )
    finding = JobFinding(
        kind="failure",
        certainty="proof",
        rule="fewer_steps" if trained else "member_ended",
        culprits=gone,
        # Who stops before a collective that is no step of training has left early, whatever it asked for.
        class_id="R6" if class_id == "D16" and not trained else class_id,
        where=where,
        waiting=tuple(Waiting(rank=rank, where=op.site, op=name_briefly(op)) for rank, op in sorted(missed.items())),
        message=f"{who} {verb(gone, 'have', 'has')} ended with exit code 0; {name_ranks(tuple(missed))} "
        f"still needed {'them' if len(gone) > 1 else 'it'} in {name_op(missed[first])} from {at}",
        fix=fix,
        key=f"left {who}",
        doing="ended",
    )
    return (
        explain_uneven(view, finding, gone, sorted(missed), missed[first].site)
        if trained and not explained
        else finding
    )


def _find_last_place(view: SceneView, gone: Sequence[int]) -> str | None:
    """Return the line of the last collective of a rank that has ended: it left by itself at some line after that."""
    known = [view.by_rank[rank].ops for rank in gone if rank in view.by_rank]
    return next((ops[-1].site for ops in known if ops), None)


def _describe_alone(asked: Guard, missed: dict[int, Op], gone: tuple[int, ...]) -> JobFinding:
    """Return the finding of ranks that went on alone: their collective stands under a rank test, and those that ended had no part in it."""
    op, ranks = missed[min(missed)], tuple(sorted(missed))
    is_forward, who = is_buffers(op), name_ranks(gone)
    test = f"{shorten(asked.file)}:{asked.line}"
    return JobFinding(
        kind="failure",
        certainty="proof",
        rule="forward_on_some" if is_forward else "member_ended",
        culprits=ranks,
        class_id="D17" if is_forward else "C1",
        where=op.site,
        waiting=(),
        message=f"{name_ranks(ranks)} called {name_op(op)} from {shorten(op.site)} under the rank test at {test}; "
        f"{who}, which never {verb(gone, 'reach', 'reaches')} it, {verb(gone, 'have', 'has')} ended with exit code 0",
        fix=fix_forward(op, "D17")
        if is_forward
        else f"move the collective at {shorten(op.site)} out of the rank test at {test}: all ranks must call it; only what follows may differ",
        key=f"alone {name_ranks(ranks)}",
    )
