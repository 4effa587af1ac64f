"""Ranks of one group made different collectives under one number (C8; C1 and C26 where a condition shows whose is one too many; D15 and D16 where a loop does)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.alone import find_alone
from rankwise.verdict.telling import put_at, tell_parting
from rankwise.verdict.uneven import explain_parting
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
    alone, told = find_alone(view, parting), "the ranks called different collectives at the same time"
    if alone is None and (left := explain_parting(view, parting)):
        (class_id, fix, where), gone, instead = left
        sight = tell_parting(view, parting, rule=rule, told=told, class_id=class_id, fix=fix, culprits=gone, lead=instead)  # fmt: skip
        return put_at(sight, where)
    places = dict.fromkeys(shorten(op.site) for _, op in parting.sides[:3])
    return tell_parting(
        view, parting, rule=rule, told=told,
        class_id=alone.class_id if alone else "C8", lead=alone.op if alone else None,
        fix=alone.fix if alone else (
            "all ranks of the group must call the same collectives in the same order: "
            f"look at the branches that lead to {' and '.join(places)}"
        ),
    )  # fmt: skip
