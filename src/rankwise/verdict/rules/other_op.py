"""Ranks of one group made different collectives under one number (C8; C1 and C26 where a condition shows whose is one too many)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.alone import find_alone
from rankwise.verdict.telling import tell_parting
from rankwise.verdict.words import shorten

if TYPE_CHECKING:
    from rankwise.verdict.parting import Parting
    from rankwise.verdict.sight import Sight
    from rankwise.verdict.view import View

RULE = "other_op"


def find(view: View) -> tuple[Sight, ...]:
    """Return the sights of it."""
    return tuple(
        tell(view, parting, rule=RULE)
        for parting in view.partings
        if parting.respect in {"op", "model check"}
    )


def tell(view: View, parting: Parting, *, rule: str) -> Sight:
    """Return the sight of ranks that made two collectives where one was due.

    Args:
        view: The scene.
        parting: Where they differ.
        rule: Which rule found it.
    """
    alone = find_alone(view, parting)
    places = dict.fromkeys(shorten(op.site) for _, op in parting.sides[:3])
    return tell_parting(
        view, parting, rule=rule, told="the ranks called different collectives at the same time",
        class_id=alone.class_id if alone else "C8", lead=alone.op if alone else None,
        fix=alone.fix if alone else (
            "all ranks of the group must call the same collectives in the same order: "
            f"look at the branches that lead to {' and '.join(places)}"
        ),
    )  # fmt: skip
