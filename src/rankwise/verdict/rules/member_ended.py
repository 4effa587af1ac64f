"""Ranks wait in a collective for one that has ended without it (R6, D14, C27)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.case import name_ranks
from rankwise.verdict.telling import find_deviating, have_been_here, tell_absence
from rankwise.verdict.uneven import say_even, tell_uneven
from rankwise.verdict.words import is_gradient, shorten

if TYPE_CHECKING:
    from rankwise.verdict.sight import Sight
    from rankwise.verdict.view import Absence, View

RULE = "member_ended"


def find(view: View) -> tuple[Sight, ...]:
    """Return the sights of it."""
    sights = []
    for absence in view.absences:
        gone = view.find_ended(absence)
        if gone:
            class_id, first = _name(view, absence, gone), absence.waiting[0]
            is_uneven = class_id == "D14" and gone == absence.missing
            sight = tell_absence(
                view, absence, rule=RULE, class_id=class_id, certainty="proof", fix=say_even(view, first.rank, first.site, is_sharded=False) if is_uneven else _fix(absence, gone),
                culprits=gone if len(gone) < len(absence.missing) else find_deviating(absence),
            )  # fmt: skip
            waiting = [one.rank for one in absence.waiting]
            sights.append(tell_uneven(view, sight, gone, waiting, first.site) if is_uneven else sight)
    return tuple(sights)


def _name(view: View, absence: Absence, gone: tuple[int, ...]) -> str | None:
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
