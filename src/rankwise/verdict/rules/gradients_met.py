"""Gradients of some ranks met another collective of others: a rank made more backward passes, or a collective alone (D14, D15, D16, X10; C1, C26)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.alone import find_alone
from rankwise.verdict.telling import put_at, tell_parting
from rankwise.verdict.uneven import explain_fewer, say_even, tell_uneven
from rankwise.verdict.words import is_gradient

if TYPE_CHECKING:
    from rankwise.verdict.parting import Parting
    from rankwise.verdict.sight import Sight
    from rankwise.verdict.view import View

RULE = "gradients_met"


def find(view: View) -> tuple[Sight, ...]:
    """Return the sights of it."""
    return tuple(
        _tell(view, parting)
        for parting in view.partings
        if len({is_gradient(op) for _, op in parting.sides}) == 2 and parting.respect != "order"
    )


def _has_trained(view: View, rank: int) -> bool:
    """Tell whether a rank made optimizer steps: what C++ issued before them may not be known of one that aborted."""
    evidence = view.by_rank[rank].evidence if rank in view.by_rank else None
    return evidence is not None and evidence.steps > 0


def _tell(view: View, parting: Parting) -> Sight:
    stepping, gradients = next((ranks[0], op) for ranks, op in parting.sides if is_gradient(op))
    others = [rank for side, op in parting.sides if not is_gradient(op) for rank in side]
    places = [op.site for _, op in parting.sides if not is_gradient(op)]
    were_there = all(
        parting.lane.has_been_at(rank, gradients.site) or _has_trained(view, rank) for rank in others
    )
    alone = find_alone(view, parting)
    if alone is not None and not is_gradient(alone.op):
        return tell_parting(
            view, parting, rule=RULE, told="a collective that only some ranks called was paired with a DDP gradient all-reduce",
            class_id=alone.class_id, fix=alone.fix, culprits=alone.ranks, lead=alone.op,
        )  # fmt: skip
    known = explain_fewer(view, gradients.site, stepping, others, places)
    class_id, fix, where = known or (
        "D14", say_even(view, stepping, gradients.site, is_sharded=False), None,
    )  # fmt: skip
    sight = tell_parting(
        view,
        parting,
        rule=RULE,
        told="a DDP gradient all-reduce was paired with a different collective",
        class_id=class_id if were_there else None,
        fix=fix,
        # Who left a step out is known then, and it is not who stands in backward.
        culprits=tuple(sorted(others)) if known and were_there else (),
        lead=next(op for _, op in parting.sides if not is_gradient(op)) if known else None,
    )
    sight = put_at(sight, where if were_there else None)
    return (
        tell_uneven(view, sight, sorted(others), [stepping], gradients.site)
        if were_there and known is None
        else sight
    )
