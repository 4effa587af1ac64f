"""Ranks wait in a collective for one that has ended without it (R6, D14, C27)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.base.rank_names import name_ranks
from rankwise.verdict.explain import explain_absence, find_deviating
from rankwise.verdict.uneven_steps import advise_even_steps, explain_uneven
from rankwise.verdict.wording import is_gradient, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rankwise.verdict.finding import JobFinding
    from rankwise.verdict.scene_view import Absence, SceneView

RULE = "member_ended"


def find(view: SceneView) -> Iterator[JobFinding]:
    """Yield the findings of it."""
    for absence in view.absences:
        gone = view.find_ended(absence)
        if gone:
            class_id, first = _name(view, absence, gone), absence.waiting[0]
            is_uneven = class_id == "D14" and gone == absence.missing
            finding = explain_absence(
                view, absence, rule=RULE, class_id=class_id, certainty="proof",
                fix=advise_even_steps(view, first.rank, first.site, is_sharded=False) if is_uneven else fix_fewer(gone, first.site),
                culprits=gone if len(gone) < len(absence.missing) else find_deviating(absence),
            )  # fmt: skip
            waiting = [one.rank for one in absence.waiting]
            yield explain_uneven(view, finding, gone, waiting, first.site) if is_uneven else finding


def _name(view: SceneView, absence: Absence, gone: tuple[int, ...]) -> str | None:
    if any(view.by_rank[rank].code for rank in gone):
        return None  # it failed, and that is told by its own error
    if absence.op is not None and is_gradient(absence.op):
        return "D14" if absence.have_been_here else None
    return "R6"


def fix_fewer(gone: Sequence[int], site: str | None) -> str:
    """Return what to do about ranks that have ended before a collective of the others."""
    return (
        f"make {name_ranks(gone)} reach {shorten(site)} as often as the others: run the same number of steps and collectives on all ranks, "
        "and a barrier before destroy_process_group"
    )
