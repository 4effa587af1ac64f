"""Two collectives were made in opposite order: alike, they were paired wrongly without a word; else they can't end (C3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.lanes import find_family
from rankwise.verdict.parting import is_swap
from rankwise.verdict.telling import tell_parting
from rankwise.verdict.words import is_gradient, shorten

if TYPE_CHECKING:
    from rankwise.evidence.facts import Op
    from rankwise.verdict.parting import Parting
    from rankwise.verdict.sight import Sight
    from rankwise.verdict.view import View

RULE = "swapped_order"


def find(view: View) -> tuple[Sight, ...]:
    """Return the sights of it."""
    return tuple(
        tell_parting(
            view, parting, rule=RULE, class_id="C3",
            told="the ranks called two collectives in opposite order",
            fix=f"call them in the same order on all ranks, at {' and '.join(dict.fromkeys(shorten(op.site) for _, op in parting.sides[:3]))}; "
            "iterate in sorted() order over names that come from a set or a dict",
        )
        for parting in view.partings
        if (parting.respect == "order" and _is_meant(view, parting)) or (parting.respect in {"op", "size", "dtype"} and _is_swapped(parting))
    )  # fmt: skip


def _is_meant(view: View, parting: Parting) -> bool:
    """Tell whether the two lines are two collectives, and not one that is written twice: for the root and for the others, for data and for none."""
    (some, here), (others, there) = parting.sides
    following = (
        parting.lane.ops[some[0]].get(parting.seq + 1),
        parting.lane.ops[others[0]].get(parting.seq + 1),
    )
    if len({op.root for op in (here, there, *following) if op is not None}) > 1:
        return False
    if (here.site or "").rpartition(":")[0] not in view.scene.sources:
        return False  # nobody can tell
    # What they make behind the two tells whether they are in step again.
    last = max(parting.lane.last(some[0]), parting.lane.last(others[0]))
    has_come = last >= parting.seq + 2 or all(
        view.by_rank[rank].state == "ended" or view.is_settled(rank) for rank in (some[0], others[0])
    )
    return has_come and not view.are_alternatives(here.site, there.site)


def _is_swapped(parting: Parting) -> bool:
    """Tell whether of two ranks each made next what the other made now."""
    if len(parting.sides) != 2 or any(is_gradient(op) for _, op in parting.sides):
        return False
    (some, here), (others, there) = parting.sides
    following = parting.lane.ops[some[0]].get(parting.seq + 1)
    crossed = parting.lane.ops[others[0]].get(parting.seq + 1)
    return (
        following is not None
        and crossed is not None
        and _what(following) == _what(there)
        and _what(crossed) == _what(here)
        and is_swap(parting.lane, parting.seq, some[0], others[0])
    )


def _what(op: Op) -> tuple[object, ...]:
    return find_family(op), op.num_elements, op.dtypes
