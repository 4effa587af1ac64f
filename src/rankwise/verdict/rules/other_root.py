"""Ranks of one group named different roots for one collective (C8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.case import name_ranks
from rankwise.verdict.telling import tell_parting
from rankwise.verdict.words import shorten

if TYPE_CHECKING:
    from rankwise.verdict.sight import Sight
    from rankwise.verdict.view import View

RULE = "other_root"


def find(view: View) -> tuple[Sight, ...]:
    """Return the sights of it."""
    sights = []
    for parting in view.partings:
        if parting.respect == "root":
            roots = ", ".join(f"{name_ranks(ranks)} named rank {op.root}" for ranks, op in parting.sides[:3])
            sights.append(
                tell_parting(
                    view, parting, rule=RULE, class_id="C8", told=f"the ranks disagree about the source or destination ({roots})",
                    fix=f"pass the same src or dst on all ranks at {shorten(parting.sides[0][1].site)}: it is the rank that all others "
                    "get the data from, not one's own",
                )
            )  # fmt: skip
    return tuple(sights)
