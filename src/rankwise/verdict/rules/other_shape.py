"""Tensors of as many elements, but of another shape, went into one collective: their elements were mixed up (C6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.telling import tell_parting
from rankwise.verdict.words import shorten

if TYPE_CHECKING:
    from rankwise.verdict.sight import Sight
    from rankwise.verdict.view import View

RULE = "other_shape"


def find(view: View) -> tuple[Sight, ...]:
    """Return the sights of it."""
    return tuple(
        tell_parting(
            view, parting, rule=RULE, class_id="C6",
            told="the ranks passed tensors with the same number of elements but different shapes",
            fix=f"transpose or reshape to the same shape on all ranks before {shorten(parting.sides[0][1].site)}",
        )
        for parting in view.partings
        if parting.respect == "shape"
    )  # fmt: skip
