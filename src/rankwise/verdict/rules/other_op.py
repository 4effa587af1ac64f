"""Ranks of one group made different collectives under one number (C8; C1 and C26 where a condition shows whose is one too many; D15 and D16 where a loop does)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.conditional_call import find_conditional_call
from rankwise.verdict.explain import explain_mismatch, put_at
from rankwise.verdict.uneven_steps import explain_divergence
from rankwise.verdict.wording import shorten

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.verdict.finding import JobFinding
    from rankwise.verdict.mismatch import Mismatch
    from rankwise.verdict.scene_view import SceneView

RULE = "other_op"


def find(view: SceneView) -> Iterator[JobFinding]:
    """Yield the findings of it."""
    for mismatch in view.mismatches:
        if mismatch.respect in {"op", "model check"}:
            yield explain_two(view, mismatch, rule=RULE)


def explain_two(view: SceneView, mismatch: Mismatch, *, rule: str) -> JobFinding:
    """Return the finding of ranks that made two collectives where one was due; ``rule`` has found it."""
    alone = find_conditional_call(view, mismatch)
    text = "the ranks called different collectives at the same time"
    if alone is None and (left := explain_divergence(view, mismatch)):
        (class_id, fix, where), gone, instead = left
        finding = explain_mismatch(
            view, mismatch, rule=rule, text=text, class_id=class_id, fix=fix, culprits=gone, lead=instead
        )
        return put_at(finding, where)
    places = dict.fromkeys(shorten(op.site) for _, op in mismatch.sides[:3])
    return explain_mismatch(
        view, mismatch, rule=rule, text=text,
        class_id=alone.class_id if alone else "C8", lead=alone.op if alone else None,
        fix=alone.fix if alone else (
            "all ranks of the group must call the same collectives in the same order: "
            f"look at the branches that lead to {' and '.join(places)}"
        ),
    )  # fmt: skip
