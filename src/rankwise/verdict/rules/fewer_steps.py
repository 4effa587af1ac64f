"""Ranks wait in a backward pass for one that has made fewer of them: it left the loop or skipped a step (D14, D15, D16, X10)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.explain import explain_absence, find_fewer, put_at
from rankwise.verdict.uneven_steps import advise_even_steps, are_in_step, explain_fewer, explain_uneven
from rankwise.verdict.wording import is_gradient, is_in_backward, is_sharded_pass

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.verdict.finding import JobFinding
    from rankwise.verdict.scene_view import Absence, SceneView

RULE = "fewer_steps"


def find(view: SceneView) -> Iterator[JobFinding]:
    """Yield the findings of it: not while those that are missing may still come."""
    for absence in view.absences:
        is_sharded = absence.op is not None and is_sharded_pass(absence.op)
        if not all(_is_backward(one.wait, absence) for one in absence.waiting) and not (
            is_sharded and view.have_ended(absence)
        ):
            continue
        if view.may_any_come(absence) or not _did_before(view, absence):
            continue
        first = absence.waiting[0]
        explained = explain_fewer(view, first.site, first.rank, absence.missing)
        if explained is None and _is_held_up(view, absence):
            continue
        class_id, fix, where = explained or (
            "D14",
            f"{advise_even_steps(view, first.rank, first.site, is_sharded=is_sharded)}; to stop early or skip a step, agree on it first (all_reduce the flag)",
            None,
        )
        finding = explain_absence(view, absence, rule=RULE, class_id=class_id, fix=fix, culprits=find_fewer(absence))
        waiting = [one.rank for one in absence.waiting]
        yield (
            put_at(finding, where) if explained else explain_uneven(view, finding, absence.missing, waiting, first.site)
        )


def _is_held_up(view: SceneView, absence: Absence) -> bool:
    """Tell whether a lock, a download or the like in the middle of a step keeps a rank: that says nothing of how many it makes."""
    first, sources = absence.waiting[0], view.scene.sources
    is_paused = any(rank in view.local_waits for rank in absence.missing)
    return (is_paused and not sources) or are_in_step(view, first.site, first.rank, absence.missing, any_loop=is_paused)


def _is_backward(wait: str | None, absence: Absence) -> bool:
    return wait == "backward" or (
        absence.op is not None
        and (is_gradient(absence.op) or (is_sharded_pass(absence.op) and is_in_backward(absence.op)))
    )


def _did_before(view: SceneView, absence: Absence) -> bool:
    """Tell whether all that are missing are known to have trained along: by their records, or by their steps."""
    evidences = [view.by_rank[rank].evidence for rank in absence.missing]
    return absence.have_been_here or all(one is not None and one.steps > 0 for one in evidences)
