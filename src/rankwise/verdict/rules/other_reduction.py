"""Ranks reduced with different operators under one number: the sum of some is the maximum of others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.telling import tell_parting
from rankwise.verdict.words import shorten

if TYPE_CHECKING:
    from rankwise.verdict.sight import Sight
    from rankwise.verdict.view import View

RULE = "other_reduction"


def find(view: View) -> tuple[Sight, ...]:
    """Return the sights of it."""
    sights = []
    for parting in view.partings:
        if parting.respect == "reduce op":
            used = " and ".join(dict.fromkeys(str(op.reduce_op) for _, op in parting.sides))
            sights.append(
                tell_parting(
                    view, parting, rule=RULE, class_id=None, told=f"the ranks reduced with different operators ({used})",
                    fix=f"pass the same ReduceOp on all ranks at {shorten(parting.sides[0][1].site)}",
                )
            )  # fmt: skip
    return tuple(sights)
