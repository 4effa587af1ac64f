"""Two collectives were made in opposite order: alike, they were paired wrongly without a word; else they can't end (C3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.explain import explain_mismatch
from rankwise.verdict.group_sequences import find_family
from rankwise.verdict.mismatch import is_swap
from rankwise.verdict.source_text import split_site
from rankwise.verdict.wording import is_gradient, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.evidence.reader.scene import Op
    from rankwise.verdict.finding import JobFinding
    from rankwise.verdict.mismatch import Mismatch
    from rankwise.verdict.scene_view import SceneView

RULE = "swapped_order"


def find(view: SceneView) -> Iterator[JobFinding]:
    """Yield the findings of it."""
    for mismatch in view.mismatches:
        if (mismatch.respect == "order" and _is_meant(view, mismatch)) or (
            mismatch.may_be_two and _is_swapped(mismatch)
        ):
            places = " and ".join(dict.fromkeys(shorten(op.site) for _, op in mismatch.sides[:3]))
            yield explain_mismatch(
                view, mismatch, rule=RULE, class_id="C3",
                text="the ranks called two collectives in opposite order",
                fix=f"call them in the same order on all ranks, at {places}; "
                "iterate in sorted() order over names that come from a set or a dict",
            )  # fmt: skip


def _is_meant(view: SceneView, mismatch: Mismatch) -> bool:
    """Tell whether the two lines are two collectives, and not one that is written twice: for the root and for the others, for data and for none."""
    (some, here), (others, there) = mismatch.sides
    following = (mismatch.find_next(some[0]), mismatch.find_next(others[0]))
    if len({op.root for op in (here, there, *following) if op is not None}) > 1:
        return False
    if split_site(here.site)[0] not in view.scene.sources:
        return False  # nobody can tell
    # What they make behind the two tells whether they are in step again.
    last = max(mismatch.sequence.last(some[0]), mismatch.sequence.last(others[0]))
    has_come = last >= mismatch.seq + 2 or all(
        view.by_rank[rank].state == "ended" or view.is_settled(rank) for rank in (some[0], others[0])
    )
    return has_come and not view.source.are_alternatives(here.site, there.site)


def _is_swapped(mismatch: Mismatch) -> bool:
    """Tell whether of two ranks each made next what the other made now."""
    if len(mismatch.sides) != 2 or any(is_gradient(op) for _, op in mismatch.sides):
        return False
    (some, here), (others, there) = mismatch.sides
    following, crossed = mismatch.find_next(some[0]), mismatch.find_next(others[0])
    return (
        following is not None
        and crossed is not None
        and _what(following) == _what(there)
        and _what(crossed) == _what(here)
        and is_swap(mismatch.sequence, mismatch.seq, some[0], others[0])
    )


def _what(op: Op) -> tuple[object, ...]:
    return find_family(op), op.num_elements, op.dtypes
