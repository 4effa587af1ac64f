"""Gradients of some ranks met another collective of others: a rank made more backward passes, or a collective alone (D14, D15, D16, X10; C1, C26)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.conditional_call import find_conditional_call
from rankwise.verdict.explain import explain_mismatch, put_at
from rankwise.verdict.uneven_steps import explain_fewer, explain_uneven, say_even
from rankwise.verdict.wording import is_gradient

if TYPE_CHECKING:
    from rankwise.verdict.finding import JobFinding
    from rankwise.verdict.mismatch import Mismatch
    from rankwise.verdict.scene_view import SceneView

RULE = "gradients_met"


def find(view: SceneView) -> tuple[JobFinding, ...]:
    """Return the findings of it."""
    return tuple(
        _tell(view, mismatch)
        for mismatch in view.mismatches
        if len({is_gradient(op) for _, op in mismatch.sides}) == 2 and mismatch.respect != "order"
    )


def _has_trained(view: SceneView, rank: int) -> bool:
    """Tell whether a rank made optimizer steps: what C++ issued before them may not be known of one that aborted."""
    evidence = view.by_rank[rank].evidence if rank in view.by_rank else None
    return evidence is not None and evidence.steps > 0


def _tell(view: SceneView, mismatch: Mismatch) -> JobFinding:
    stepping, gradients = next((ranks[0], op) for ranks, op in mismatch.sides if is_gradient(op))
    others = [rank for side, op in mismatch.sides if not is_gradient(op) for rank in side]
    places = [op.site for _, op in mismatch.sides if not is_gradient(op)]
    were_there = all(
        mismatch.sequence.has_been_at(rank, gradients.site) or _has_trained(view, rank) for rank in others
    )
    alone = find_conditional_call(view, mismatch)
    if alone is not None and not is_gradient(alone.op):
        return explain_mismatch(
            view, mismatch, rule=RULE, text="a collective that only some ranks called was paired with a DDP gradient all-reduce",
            class_id=alone.class_id, fix=alone.fix, culprits=alone.ranks, lead=alone.op,
        )  # fmt: skip
    known = explain_fewer(view, gradients.site, stepping, others, places)
    class_id, fix, where = known or (
        "D14", say_even(view, stepping, gradients.site, is_sharded=False), None,
    )  # fmt: skip
    finding = explain_mismatch(
        view,
        mismatch,
        rule=RULE,
        text="a DDP gradient all-reduce was paired with a different collective",
        class_id=class_id if were_there else None,
        fix=fix,
        # Who left a step out is known then, and it is not who stands in backward.
        culprits=tuple(sorted(others)) if known and were_there else (),
        lead=next(op for _, op in mismatch.sides if not is_gradient(op)) if known else None,
    )
    finding = put_at(finding, where if were_there else None)
    return (
        explain_uneven(view, finding, sorted(others), [stepping], gradients.site)
        if were_there and known is None
        else finding
    )
