"""Ranks gave tensors of different types to one collective, which adds up their bytes as if they were alike (C7)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.telling import tell_parting
from rankwise.verdict.words import shorten

if TYPE_CHECKING:
    from rankwise.verdict.sight import Sight
    from rankwise.verdict.view import View

RULE = "other_dtype"


def find(view: View) -> tuple[Sight, ...]:
    """Return the sights of it."""
    return tuple(
        tell_parting(
            view, parting, rule=RULE, class_id="C7", told="the ranks passed tensors of different dtypes",
            fix=f"convert to one dtype on all ranks before {shorten(parting.sides[0][1].site)}, as in tensor.to(torch.float32)",
        )
        for parting in view.partings
        if parting.respect == "dtype"
    )  # fmt: skip
