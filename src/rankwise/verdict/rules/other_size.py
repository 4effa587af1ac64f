"""Ranks gave tensors of different sizes to a collective that demands equal ones (C5, C20), or made two where one was due (C1, C26, C8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.conditional_call import find_conditional_call
from rankwise.verdict.explain import explain_mismatch
from rankwise.verdict.group_sequences import find_family
from rankwise.verdict.rules import other_op
from rankwise.verdict.wording import shorten

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.verdict.finding import JobFinding
    from rankwise.verdict.mismatch import Mismatch
    from rankwise.verdict.scene_view import SceneView

RULE = "other_size"


def find(view: SceneView) -> Iterator[JobFinding]:
    """Yield the findings of it."""
    for mismatch in view.mismatches:
        if mismatch.respect == "size" and _are_two(view, mismatch):
            yield other_op.explain_two(view, mismatch, rule=RULE)
        elif mismatch.respect == "size":
            class_id, fix = _judge(mismatch)
            text = "the ranks passed tensors of different sizes"
            yield explain_mismatch(view, mismatch, rule=RULE, class_id=class_id, fix=fix, text=text)


def _judge(mismatch: Mismatch) -> tuple[str, str]:
    op = mismatch.sides[0][1]
    at = shorten(op.site)
    if "broadcast_object_list" in op.inside:
        fix = f"at {at} the lists must have the same length on all ranks: [None] * n on those that receive"
        return "C20", fix
    if find_family(op) == "all_gather":
        return "C5", f"at {at} gather the lengths first and pad to the longest, or use all_gather_object"
    fix = f"all ranks must pass tensors of the same shape at {at}, and call their collectives in the same order"
    return "C5", fix


def _are_two(view: SceneView, mismatch: Mismatch) -> bool:
    """Tell whether the sizes differ because the collectives are two: their lines do, or one was made under a condition of its own."""
    sites = {op.site for _, op in mismatch.sides}
    if None in sites:
        return False
    first = mismatch.sides[0][1].site
    are_apart = len(sites) > 1 and not any(view.source.are_alternatives(first, site) for site in sites)
    return are_apart or find_conditional_call(view, mismatch) is not None
