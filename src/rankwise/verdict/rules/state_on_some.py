"""Only some ranks gather the state of a sharded model, which takes all of them (D28)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.standing import list_calls
from rankwise.verdict.telling import tell_absence, tell_parting
from rankwise.verdict.words import shorten

if TYPE_CHECKING:
    from rankwise.evidence.facts import Op
    from rankwise.verdict.sight import Sight
    from rankwise.verdict.view import View

RULE = "state_on_some"
#: Functions that gather a state from all ranks.
GATHERERS = frozenset({
    "full_tensor", "get_model_state_dict", "get_optimizer_state_dict", "get_state_dict", "_get_model_state_dict",
    "_full_post_state_dict_hook", "summon_full_params", "full_optim_state_dict", "optim_state_dict", "consolidate_state_dict",
})  # fmt: skip


def find(view: View) -> tuple[Sight, ...]:
    """Return the sights of it: not while those that are missing may still come."""
    return (*_tell_partings(view), *_tell_absences(view))


def _tell_partings(view: View) -> list[Sight]:
    """Return the sights of a gathering that another collective of the others met."""
    sights = []
    for parting in view.partings:
        gathering = [op for ranks, op in parting.sides if has_gathered(view, ranks[0], op)]
        if parting.respect not in {"op", "size", "dtype"} or not 0 < len(gathering) < len(parting.sides):
            continue
        sights.append(
            tell_parting(
                view, parting, rule=RULE, class_id="D28", lead=gathering[0], told="some ranks gathered the state of a sharded model while the others did not",
                fix=f"let all ranks gather the state at {shorten(gathering[0].site)}, and only one write it",
            )
        )  # fmt: skip
    return sights


def has_gathered(view: View, rank: int, op: Op) -> bool:
    """Tell whether a rank made an operation to gather a state: by its record, or by its stack if it still stands there.

    Args:
        view: The scene.
        rank: Who.
        op: What it made.
    """
    standing = view.standings.get(rank)
    is_there = standing is not None and standing.wait is not None and standing.where == op.site
    return bool(GATHERERS & {*op.inside}) or (is_there and _gathers(view, rank))


def _tell_absences(view: View) -> tuple[Sight, ...]:
    return tuple(
        tell_absence(
            view, absence, rule=RULE, class_id="D28", certainty="proof" if view.have_ended(absence) else "suspicion",
            fix=f"let all ranks gather the state at {shorten(absence.waiting[0].site)}, and only one write it",
        )
        for absence in view.absences
        if all(_gathers(view, one.rank) for one in absence.waiting)
        and not any(map(view.may_come, absence.missing))
    )  # fmt: skip


def _gathers(view: View, rank: int) -> bool:
    facts, standing = view.by_rank[rank], view.standings[rank]
    inside = {frame.function for frame in list_calls(facts.stack)} if facts.stack else set()
    return bool(GATHERERS & (inside | set(standing.op.inside if standing.op else ())))
