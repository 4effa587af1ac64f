"""Two collectives were made in opposite order: alike, they were paired wrongly without a word; else they can't end (C3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.explain import explain_mismatch
from rankwise.verdict.group_sequences import find_family
from rankwise.verdict.mismatch import is_swap
from rankwise.verdict.wording import is_gradient, shorten

if TYPE_CHECKING:
    from rankwise.evidence.reader.scene import Op
    from rankwise.verdict.finding import JobFinding
    from rankwise.verdict.mismatch import Mismatch
    from rankwise.verdict.scene_view import SceneView

RULE = "swapped_order"


def find(view: SceneView) -> tuple[JobFinding, ...]:
    """Return the findings of it."""
    return tuple(
        explain_mismatch(
            view, mismatch, rule=RULE, class_id="C3",
            text="the ranks called two collectives in opposite order",
            fix=f"call them in the same order on all ranks, at {' and '.join(dict.fromkeys(shorten(op.site) for _, op in mismatch.sides[:3]))}; "
            "iterate in sorted() order over names that come from a set or a dict",
        )
        for mismatch in view.mismatches
        if (mismatch.respect == "order" and _is_meant(view, mismatch)) or (mismatch.respect in {"op", "size", "dtype"} and _is_swapped(mismatch))
    )  # fmt: skip


def _is_meant(view: SceneView, mismatch: Mismatch) -> bool:
    """Tell whether the two lines are two collectives, and not one that is written twice: for the root and for the others, for data and for none."""
    (some, here), (others, there) = mismatch.sides
    following = (
        mismatch.sequence.ops[some[0]].get(mismatch.seq + 1),
        mismatch.sequence.ops[others[0]].get(mismatch.seq + 1),
    )
    if len({op.root for op in (here, there, *following) if op is not None}) > 1:
        return False
    if (here.site or "").rpartition(":")[0] not in view.scene.sources:
        return False  # nobody can tell
    # What they make behind the two tells whether they are in step again.
    last = max(mismatch.sequence.last(some[0]), mismatch.sequence.last(others[0]))
    has_come = last >= mismatch.seq + 2 or all(
        view.by_rank[rank].state == "ended" or view.is_settled(rank) for rank in (some[0], others[0])
    )
    return has_come and not view.are_alternatives(here.site, there.site)


def _is_swapped(mismatch: Mismatch) -> bool:
    """Tell whether of two ranks each made next what the other made now."""
    if len(mismatch.sides) != 2 or any(is_gradient(op) for _, op in mismatch.sides):
        return False
    (some, here), (others, there) = mismatch.sides
    following = mismatch.sequence.ops[some[0]].get(mismatch.seq + 1)
    crossed = mismatch.sequence.ops[others[0]].get(mismatch.seq + 1)
    return (
        following is not None
        and crossed is not None
        and _what(following) == _what(there)
        and _what(crossed) == _what(here)
        and is_swap(mismatch.sequence, mismatch.seq, some[0], others[0])
    )


def _what(op: Op) -> tuple[object, ...]:
    return find_family(op), op.num_elements, op.dtypes
