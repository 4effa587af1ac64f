"""Ranks reduced with different operators under one number: the sum of some is the maximum of others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.explain import explain_mismatch
from rankwise.verdict.wording import shorten

if TYPE_CHECKING:
    from rankwise.verdict.finding import JobFinding
    from rankwise.verdict.scene_view import SceneView

RULE = "other_reduction"


def find(view: SceneView) -> tuple[JobFinding, ...]:
    """Return the findings of it."""
    findings = []
    for mismatch in view.mismatches:
        if mismatch.respect == "reduce op":
            used = " and ".join(dict.fromkeys(str(op.reduce_op) for _, op in mismatch.sides))
            findings.append(
                explain_mismatch(
                    view, mismatch, rule=RULE, class_id=None, text=f"the ranks reduced with different operators ({used})",
                    fix=f"pass the same ReduceOp on all ranks at {shorten(mismatch.sides[0][1].site)}",
                )
            )  # fmt: skip
    return tuple(findings)
