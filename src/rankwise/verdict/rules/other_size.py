"""Ranks gave tensors of different sizes to a collective that demands equal ones (C5, C20)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.lanes import find_family
from rankwise.verdict.telling import tell_parting
from rankwise.verdict.words import shorten

if TYPE_CHECKING:
    from rankwise.verdict.parting import Parting
    from rankwise.verdict.sight import Sight
    from rankwise.verdict.view import View

RULE = "other_size"


def find(view: View) -> tuple[Sight, ...]:
    """Return the sights of it."""
    return tuple(_tell(view, parting) for parting in view.partings if parting.respect == "size")


def _tell(view: View, parting: Parting) -> Sight:
    op = parting.sides[0][1]
    at = shorten(op.site)
    if "broadcast_object_list" in op.inside:
        class_id = "C20"
        fix = f"at {at} the lists must be equally long on all ranks: [None] * n on those that receive"
    elif find_family(op) == "all_gather":
        class_id = "C5"
        fix = f"at {at} gather the lengths first and pad to the longest, or use all_gather_object"
    else:
        class_id = "C5"
        fix = f"all ranks must give tensors of the same shape at {at}, and make their collectives in the same order"
    return tell_parting(
        view, parting, rule=RULE, class_id=class_id, fix=fix, told="the ranks gave tensors of different sizes"
    )
