"""Ranks of one group named different roots for one collective (C8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.base.rank_names import name_ranks
from rankwise.verdict.explain import explain_mismatch
from rankwise.verdict.wording import shorten

if TYPE_CHECKING:
    from rankwise.verdict.finding import JobFinding
    from rankwise.verdict.scene_view import SceneView

RULE = "other_root"


def find(view: SceneView) -> tuple[JobFinding, ...]:
    """Return the findings of it."""
    findings = []
    for mismatch in view.mismatches:
        if mismatch.respect == "root":
            roots = ", ".join(f"{name_ranks(ranks)} named rank {op.root}" for ranks, op in mismatch.sides[:3])
            findings.append(
                explain_mismatch(
                    view, mismatch, rule=RULE, class_id="C8", text=f"the ranks disagree about the source or destination ({roots})",
                    fix=f"pass the same src or dst on all ranks at {shorten(mismatch.sides[0][1].site)}: it is the rank that all others "
                    "get the data from, not one's own",
                )
            )  # fmt: skip
    return tuple(findings)
