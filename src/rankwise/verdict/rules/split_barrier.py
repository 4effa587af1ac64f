"""Some ranks made one barrier more than others: a barrier for "rank 0 first" that has no counterpart (C2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.explain import explain_absence, find_fewer
from rankwise.verdict.group_sequences import find_family
from rankwise.verdict.wording import shorten

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.verdict.finding import JobFinding
    from rankwise.verdict.scene_view import Absence, SceneView

RULE = "split_barrier"


def find(view: SceneView) -> Iterator[JobFinding]:
    """Yield the findings of it: not while those that are missing may still come."""
    for absence in view.absences:
        if _is_off_by_one(absence) and not view.may_any_come(absence):
            yield explain_absence(
                view, absence, rule=RULE, class_id="C2", culprits=find_fewer(absence),
                fix=f"the barrier at {shorten(absence.waiting[0].site)} was reached by no other rank: call barrier equally often on all ranks, "
                "as in `if rank != 0: barrier()` … `if rank == 0: barrier()`",
            )  # fmt: skip


def _is_off_by_one(absence: Absence) -> bool:
    """Tell whether those that are missing were at this very line one barrier earlier, when the others were at another one."""
    sequence, op = absence.sequence, absence.op
    if sequence is None or op is None or op.site is None or find_family(op) != "barrier":
        return False
    mine = sequence.ops[absence.waiting[0].rank].get(op.seq - 1)
    theirs = [sequence.ops.get(rank, {}).get(op.seq - 1) for rank in absence.missing]
    return (
        mine is not None
        and find_family(mine) == "barrier"
        and mine.site != op.site
        and all(one is not None and one.site == op.site for one in theirs)
    )
