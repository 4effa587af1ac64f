"""Only some ranks gather the state of a sharded model, which takes all of them (D28)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.standing import list_calls
from rankwise.verdict.telling import tell_absence
from rankwise.verdict.words import shorten

if TYPE_CHECKING:
    from rankwise.verdict.sight import Sight
    from rankwise.verdict.view import View

RULE = "state_on_some"
_GATHERERS = frozenset({
    "full_tensor", "get_model_state_dict", "get_optimizer_state_dict", "get_state_dict", "_get_model_state_dict",
    "_full_post_state_dict_hook", "summon_full_params", "full_optim_state_dict", "optim_state_dict", "consolidate_state_dict",
})  # fmt: skip


def find(view: View) -> tuple[Sight, ...]:
    """Return the sights of it: not while those that are missing may still come."""
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
    return bool(_GATHERERS & (inside | set(standing.op.inside if standing.op else ())))
