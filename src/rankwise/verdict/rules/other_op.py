"""Ranks of one group made different collectives under one number (C8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.telling import find_guarded, tell_parting
from rankwise.verdict.words import shorten

if TYPE_CHECKING:
    from rankwise.verdict.parting import Parting
    from rankwise.verdict.sight import Sight
    from rankwise.verdict.view import View

RULE = "other_op"


def find(view: View) -> tuple[Sight, ...]:
    """Return the sights of it."""
    return tuple(
        tell_parting(
            view, parting, rule=RULE, class_id="C8", told="the ranks made different collectives at the same time", fix=_fix(view, parting),
        )
        for parting in view.partings
        if parting.respect in {"op", "model check"}
    )  # fmt: skip


def _fix(view: View, parting: Parting) -> str:
    guarded = find_guarded(view, parting)
    told = "all ranks of the group must make the same collectives in the same order"
    if len(guarded) == 1:
        ranks, op = guarded[0]
        test = next(guard for guard in view.guards_where(ranks[0], op.site) if guard.is_rank_test)
        return f"{told}: take the collective at {shorten(op.site)} out of the rank test at line {test.line}"
    places = dict.fromkeys(shorten(op.site) for _, op in parting.sides[:3])
    return f"{told}: look at the branches that lead to {' and '.join(places)}"
