"""Who left a job of several nodes with exit code 0 while ranks elsewhere still needed it.

Those lose their peer, and their node sees no more than that. But the records of all nodes together show who never came to a
collective that others had entered; no clock has to be compared for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.blame import find_blame
from rankwise.verdict.case import RankEnd, Waiting, name_ranks
from rankwise.verdict.sight import Sight
from rankwise.verdict.view import View
from rankwise.verdict.words import name_op, shorten, verb

if TYPE_CHECKING:
    from collections.abc import Collection

    from rankwise.evidence.facts import Op, Scene


def find_leavers(scene: Scene, stopped: Collection[int]) -> Sight | None:
    """Return the sight of ranks that have left early.

    Args:
        scene: All ranks of the job, after their end.
        stopped: Those that a launcher has stopped; how they ended tells nothing.

    Returns:
        None if a rank has failed by itself, which its own node tells, or if nobody left too early by the records.
    """
    by_themselves = [facts for facts in scene.ranks if facts.rank not in stopped or facts.fault is not None]
    failed = {facts.rank: facts for facts in by_themselves if facts.code != 0}
    ends = [
        RankEnd(rank=facts.rank, local_rank=0, code=facts.code, fault=facts.fault)
        for facts in failed.values()
    ]
    if not scene.is_whole or any(find_blame(end) != "peer" for end in ends):
        return None
    view = View(scene)
    left = {facts.rank for facts in by_themselves if facts.code == 0 and facts.evidence is not None}
    all_left = [facts for facts in scene.ranks if facts.code == 0]
    missed: dict[int, Op] = {}
    gone: set[int] = set()
    for lane in view.lanes:
        for rank in failed.keys() & lane.ops.keys():
            op = lane.ops[rank][lane.last(rank)]
            # What C++ issued at the last is not known of each; but if only one has left, it is who is missed.
            is_sure = op.source == "python" or len(all_left) == 1
            behind = {
                one
                for one in left & set(lane.ranks)
                if lane.is_behind(one, op.seq) and (is_sure or view.is_fresh(one))
            }
            if behind:
                missed[rank] = op
                gone |= behind
    return _tell(tuple(sorted(gone)), missed) if gone else None


def _tell(gone: tuple[int, ...], missed: dict[int, Op]) -> Sight:
    first = min(missed)
    at, who = shorten(missed[first].site), name_ranks(gone)
    return Sight(
        kind="hang",
        certainty="proof",
        rule="member_ended",
        culprits=gone,
        class_id="R6",
        where=missed[first].site,
        waiting=tuple(Waiting(rank=rank, where=op.site, op=op.name) for rank, op in sorted(missed.items())),
        message=f"{who} {verb(gone, 'have', 'has')} ended with exit code 0; {name_ranks(tuple(missed))} "
        f"still needed {'them' if len(gone) > 1 else 'it'} in {name_op(missed[first])} from {at}",
        fix=f"let {who} come to {at} as often as the others: the same number of steps and collectives on all ranks, "
        "and a barrier before destroy_process_group",
        key=f"left {who}",
        doing="ended",
    )
