"""Ranks wait in a collective for one that has ended without it (R6, D14, C27)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.base.rank_names import name_ranks
from rankwise.verdict.explain import explain_absence, find_deviating, have_been_here
from rankwise.verdict.uneven_steps import explain_uneven, say_even
from rankwise.verdict.wording import is_gradient, shorten

if TYPE_CHECKING:
    from rankwise.verdict.finding import JobFinding
    from rankwise.verdict.scene_view import Absence, SceneView

RULE = "member_ended"


def find(view: SceneView) -> tuple[JobFinding, ...]:
    """Return the findings of it."""
    findings = []
    for absence in view.absences:
        gone = view.find_ended(absence)
        if gone:
            class_id, first = _name(view, absence, gone), absence.waiting[0]
            is_uneven = class_id == "D14" and gone == absence.missing
            finding = explain_absence(
                view, absence, rule=RULE, class_id=class_id, certainty="proof", fix=say_even(view, first.rank, first.site, is_sharded=False) if is_uneven else _fix(absence, gone),
                culprits=gone if len(gone) < len(absence.missing) else find_deviating(absence),
            )  # fmt: skip
            waiting = [one.rank for one in absence.waiting]
            findings.append(
                explain_uneven(view, finding, gone, waiting, first.site) if is_uneven else finding
            )
    return tuple(findings)


def _name(view: SceneView, absence: Absence, gone: tuple[int, ...]) -> str | None:
    if any(view.by_rank[rank].code for rank in gone):
        return None  # it failed, and that is told by its own error
    if absence.op is not None and is_gradient(absence.op):
        return "D14" if have_been_here(absence) else None
    return "R6"


def _fix(absence: Absence, gone: tuple[int, ...]) -> str:
    at = shorten(absence.waiting[0].site)
    return (
        f"make {name_ranks(gone)} reach {at} as often as the others: run the same number of steps and collectives on all ranks, "
        "and a barrier before destroy_process_group"
    )
