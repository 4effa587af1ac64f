"""Ranks gave tensors of different sizes to a collective that demands equal ones (C5, C20), or made two where one was due (C1, C26, C8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.alone import find_alone
from rankwise.verdict.lanes import find_family
from rankwise.verdict.rules import other_op
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
    if _are_two(view, parting):
        return other_op.tell(view, parting, rule=RULE)
    at = shorten(op.site)
    if "broadcast_object_list" in op.inside:
        class_id = "C20"
        fix = f"at {at} the lists must have the same length on all ranks: [None] * n on those that receive"
    elif find_family(op) == "all_gather":
        class_id = "C5"
        fix = f"at {at} gather the lengths first and pad to the longest, or use all_gather_object"
    else:
        class_id = "C5"
        fix = f"all ranks must pass tensors of the same shape at {at}, and call their collectives in the same order"
    return tell_parting(
        view,
        parting,
        rule=RULE,
        class_id=class_id,
        fix=fix,
        told="the ranks passed tensors of different sizes",
    )


def _are_two(view: View, parting: Parting) -> bool:
    """Tell whether the sizes differ because the collectives are two: their lines do, or one was made under a condition of its own."""
    sites = {op.site for _, op in parting.sides}
    if None in sites:
        return False
    first = parting.sides[0][1].site
    are_apart = len(sites) > 1 and not any(view.are_alternatives(first, site) for site in sites)
    return are_apart or find_alone(view, parting) is not None
