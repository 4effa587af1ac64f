"""Ranks wait in init_process_group, or in new_group, for one that does not come (I1, C10)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.explain import explain_absence
from rankwise.verdict.scene_view import Absence
from rankwise.verdict.wording import shorten

if TYPE_CHECKING:
    from rankwise.verdict.finding import JobFinding
    from rankwise.verdict.rank_state import RankState
    from rankwise.verdict.scene_view import SceneView

RULE = "absent_from_meeting"


def find(view: SceneView) -> tuple[JobFinding, ...]:
    """Return the findings of it; none where not all ranks can be seen: who is missed may be on another node."""
    if not view.scene.is_whole:
        return ()
    waiting = [one for one in view.rank_states.values() if one.wait == "meeting"]
    strangers = [one for one in waiting if not view.has_joined(one.rank)]
    members = [one for one in waiting if view.has_joined(one.rank)]
    return (*_tell_init(view, strangers), *_tell_new_group(view, members))


def _tell_init(view: SceneView, waiting: list[RankState]) -> tuple[JobFinding, ...]:
    missing = tuple(
        rank
        for rank, rank_state in view.rank_states.items()
        if rank_state.wait is None and not view.has_joined(rank) and view.is_placed(rank)
    )
    if not waiting or not missing:
        return ()
    absence = Absence(op=None, sequence=None, waiting=tuple(waiting), missing=missing, is_known=True)
    has_ended = all(view.by_rank[rank].state == "ended" for rank in missing) and all(
        view.is_settled(one.rank) for one in waiting
    )
    at = shorten(waiting[0].site)
    return (
        explain_absence(
            view, absence, rule=RULE, class_id=None if any(map(view.may_come, missing)) else "I1", culprits=missing,
            certainty="proof" if has_ended else "suspicion",
            fix=f"let all ranks reach init_process_group (the others do at {at}): what takes long, or may fail, on one rank belongs after it",
        ),
    )  # fmt: skip


def _tell_new_group(view: SceneView, waiting: list[RankState]) -> tuple[JobFinding, ...]:
    missing = tuple(
        rank
        for rank, rank_state in view.rank_states.items()
        if rank_state.wait != "meeting" and view.is_placed(rank) and view.has_joined(rank)
    )
    if not waiting or not missing:
        return ()
    absence = Absence(op=None, sequence=None, waiting=tuple(waiting), missing=missing, is_known=True)
    # Who has ended does not come; nor does who waits in a collective for those that wait for it here.
    here = {one.rank for one in waiting}
    can_not_come = [
        rank
        for rank in missing
        if view.by_rank[rank].state == "ended"
        or (view.awaited.get(rank, frozenset()) & here and view.is_settled(rank))
    ]
    at = shorten(waiting[0].site)
    return (
        explain_absence(
            view, absence, rule=RULE, class_id=None if any(map(view.may_come, missing)) else "C10",
            certainty="proof" if can_not_come else "suspicion",
            fix=f"new_group is a collective of all ranks of the job: let all of them call it at {at}, members or not",
        ),
    )  # fmt: skip
