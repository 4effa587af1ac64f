"""Tensors of as many elements, but of another shape, went into one collective: their elements were mixed up (C6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.explain import explain_mismatch
from rankwise.verdict.wording import shorten

if TYPE_CHECKING:
    from rankwise.verdict.finding import JobFinding
    from rankwise.verdict.scene_view import SceneView

RULE = "other_shape"


def find(view: SceneView) -> tuple[JobFinding, ...]:
    """Return the findings of it."""
    return tuple(
        explain_mismatch(
            view, mismatch, rule=RULE, class_id="C6",
            text="the ranks passed tensors with the same number of elements but different shapes",
            fix=f"transpose or reshape to the same shape on all ranks before {shorten(mismatch.sides[0][1].site)}",
        )
        for mismatch in view.mismatches
        if mismatch.respect == "shape"
    )  # fmt: skip
