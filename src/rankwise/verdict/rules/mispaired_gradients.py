"""Gradients of some ranks met another collective of others: a rank made more backward passes, or a collective alone (D14, D15, D16, X10; C1, C26)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.conditional_call import find_conditional_call
from rankwise.verdict.explain import explain_mismatch, put_at
from rankwise.verdict.uneven_steps import advise_even_steps, explain_fewer, explain_uneven
from rankwise.verdict.wording import is_gradient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.verdict.finding import JobFinding
    from rankwise.verdict.mismatch import Mismatch, Sides
    from rankwise.verdict.scene_view import SceneView

RULE = "mispaired_gradients"


def find(view: SceneView) -> Iterator[JobFinding]:
    """Yield the findings of it."""
    for mismatch in view.mismatches:
        stepping, others = mismatch.split(is_gradient)
        if stepping and others and mismatch.respect != "order":
            yield _make_finding(view, mismatch, stepping, others)


def _has_trained(view: SceneView, rank: int) -> bool:
    """Tell whether a rank made optimizer steps: what C++ issued before them may not be known of one that aborted."""
    evidence = view.by_rank[rank].evidence if rank in view.by_rank else None
    return evidence is not None and evidence.steps > 0


def _make_finding(view: SceneView, mismatch: Mismatch, stepping: Sides, others: Sides) -> JobFinding:
    waiting, site = stepping[0][0][0], stepping[0][1].site
    ranks = [rank for side, _ in others for rank in side]
    were_there = all(mismatch.sequence.has_been_at(rank, site) or _has_trained(view, rank) for rank in ranks)
    alone = find_conditional_call(view, mismatch)
    if alone is not None and not is_gradient(alone.op):
        return explain_mismatch(
            view, mismatch, rule=RULE, text="a collective that only some ranks called was paired with a DDP gradient all-reduce",
            class_id=alone.class_id, fix=alone.fix, culprits=alone.ranks, lead=alone.op,
        )  # fmt: skip
    known = explain_fewer(view, site, waiting, ranks, [op.site for _, op in others])
    class_id, fix, where = known or ("D14", advise_even_steps(view, waiting, site, is_sharded=False), None)
    finding = explain_mismatch(
        view,
        mismatch,
        rule=RULE,
        text="a DDP gradient all-reduce was paired with a different collective",
        class_id=class_id if were_there else None,
        fix=fix,
        # Who left a step out is known then, and it is not who stands in backward.
        culprits=tuple(sorted(ranks)) if known and were_there else (),
        lead=others[0][1] if known else None,
    )
    if not were_there:
        return finding
    finding = put_at(finding, where)
    return finding if known else explain_uneven(view, finding, sorted(ranks), [waiting], site)
