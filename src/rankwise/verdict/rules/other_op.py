"""Ranks of one group made different collectives under one number (C8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.telling import tell_parting
from rankwise.verdict.words import shorten

if TYPE_CHECKING:
    from rankwise.verdict.sight import Sight
    from rankwise.verdict.view import View

RULE = "other_op"


def find(view: View) -> tuple[Sight, ...]:
    """Return the sights of it."""
    return tuple(
        tell_parting(
            view, parting, rule=RULE, class_id="C8", told="the ranks made different collectives at the same time",
            fix=f"all ranks of the group must make the same collectives in the same order: look at the branches that lead to "
            f"{' and '.join(dict.fromkeys(shorten(op.site) for _, op in parting.sides[:3]))}",
        )
        for parting in view.partings
        if parting.respect == "op"
    )  # fmt: skip
