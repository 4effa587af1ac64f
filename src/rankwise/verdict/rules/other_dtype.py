"""Ranks gave tensors of different types to one collective, which adds up their bytes as if they were alike (C7)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.explain import explain_mismatch
from rankwise.verdict.wording import shorten

if TYPE_CHECKING:
    from rankwise.verdict.finding import JobFinding
    from rankwise.verdict.scene_view import SceneView

RULE = "other_dtype"


def find(view: SceneView) -> tuple[JobFinding, ...]:
    """Return the findings of it."""
    return tuple(
        explain_mismatch(
            view, mismatch, rule=RULE, class_id="C7", text="the ranks passed tensors of different dtypes",
            fix=f"convert to one dtype on all ranks before {shorten(mismatch.sides[0][1].site)}, as in tensor.to(torch.float32)",
        )
        for mismatch in view.mismatches
        if mismatch.respect == "dtype"
    )  # fmt: skip
