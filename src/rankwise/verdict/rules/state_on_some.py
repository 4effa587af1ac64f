"""Only some ranks gather the state of a sharded model, which takes all of them (D28)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.explain import explain_absence, explain_mismatch
from rankwise.verdict.rank_state import list_calls
from rankwise.verdict.wording import shorten

if TYPE_CHECKING:
    from rankwise.evidence.reader.scene import Op
    from rankwise.verdict.finding import JobFinding
    from rankwise.verdict.scene_view import SceneView

RULE = "state_on_some"
#: Functions that gather a state from all ranks.
GATHERERS = frozenset({
    "full_tensor", "get_model_state_dict", "get_optimizer_state_dict", "get_state_dict", "_get_model_state_dict",
    "_full_post_state_dict_hook", "summon_full_params", "full_optim_state_dict", "optim_state_dict", "consolidate_state_dict",
})  # fmt: skip


def find(view: SceneView) -> tuple[JobFinding, ...]:
    """Return the findings of it: not while those that are missing may still come."""
    return (*_explain_mismatches(view), *_tell_absences(view))


def _explain_mismatches(view: SceneView) -> list[JobFinding]:
    """Return the findings of a gathering that another collective of the others met."""
    findings = []
    for mismatch in view.mismatches:
        gathering = [op for ranks, op in mismatch.sides if has_gathered(view, ranks[0], op)]
        if mismatch.respect not in {"op", "size", "dtype"} or not 0 < len(gathering) < len(mismatch.sides):
            continue
        findings.append(
            explain_mismatch(
                view, mismatch, rule=RULE, class_id="D28", lead=gathering[0], text="some ranks gathered the state of a sharded model while the others did not",
                fix=f"let all ranks gather the state at {shorten(gathering[0].site)}, and only one write it",
            )
        )  # fmt: skip
    return findings


def has_gathered(view: SceneView, rank: int, op: Op) -> bool:
    """Tell whether a rank made an operation to gather a state: by its record, or by its stack if it still stands there.

    Args:
        view: The scene.
        rank: Who.
        op: What it made.
    """
    rank_state = view.rank_states.get(rank)
    is_there = rank_state is not None and rank_state.wait is not None and rank_state.where == op.site
    return bool(GATHERERS & {*op.inside}) or (is_there and _gathers(view, rank))


def _tell_absences(view: SceneView) -> tuple[JobFinding, ...]:
    return tuple(
        explain_absence(
            view, absence, rule=RULE, class_id="D28", certainty="proof" if view.have_ended(absence) else "suspicion",
            fix=f"let all ranks gather the state at {shorten(absence.waiting[0].site)}, and only one write it",
        )
        for absence in view.absences
        if all(_gathers(view, one.rank) for one in absence.waiting)
        and not any(map(view.may_come, absence.missing))
    )  # fmt: skip


def _gathers(view: SceneView, rank: int) -> bool:
    facts, rank_state = view.by_rank[rank], view.rank_states[rank]
    inside = {frame.function for frame in list_calls(facts.stack)} if facts.stack else set()
    return bool(GATHERERS & (inside | set(rank_state.op.inside if rank_state.op else ())))
