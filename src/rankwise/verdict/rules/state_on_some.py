"""Only some ranks gather the state of a sharded model, which takes all of them (D28)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.explain import explain_absence, explain_mismatch
from rankwise.verdict.rank_state import list_calls
from rankwise.verdict.wording import shorten

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.evidence.reader.notes import Stack
    from rankwise.evidence.reader.scene import Op
    from rankwise.verdict.finding import JobFinding
    from rankwise.verdict.scene_view import SceneView

RULE = "state_on_some"
#: Functions that gather a state from all ranks.
GATHERERS = frozenset({
    "full_tensor", "get_model_state_dict", "get_optimizer_state_dict", "get_state_dict", "_get_model_state_dict",
    "_full_post_state_dict_hook", "summon_full_params", "full_optim_state_dict", "optim_state_dict", "consolidate_state_dict",
})  # fmt: skip


def find(view: SceneView) -> Iterator[JobFinding]:
    """Yield the findings of it: met by another collective, or waiting for ranks of which none may still come."""
    for mismatch in view.mismatches:
        gathering = [op for ranks, op in mismatch.sides if has_gathered(view, ranks[0], op)]
        if mismatch.may_be_two and 0 < len(gathering) < len(mismatch.sides):
            yield explain_mismatch(
                view, mismatch, rule=RULE, class_id="D28", lead=gathering[0], fix=_fix(gathering[0].site),
                text="some ranks gathered the state of a sharded model while the others did not",
            )  # fmt: skip
    for absence in view.absences:
        if all(_gathers(view, one.rank) for one in absence.waiting) and not view.may_any_come(absence):
            yield explain_absence(view, absence, rule=RULE, class_id="D28", fix=_fix(absence.waiting[0].site))


def _fix(site: str | None) -> str:
    return f"let all ranks gather the state at {shorten(site)}, and only one write it"


def has_gathered(view: SceneView, rank: int, op: Op) -> bool:
    """Tell whether a rank made an operation to gather a state: by its record, or by its stack if it still stands there."""
    rank_state = view.rank_states.get(rank)
    is_there = rank_state is not None and rank_state.wait is not None and rank_state.where == op.site
    return bool(GATHERERS & {*op.inside}) or (is_there and _gathers(view, rank))


def is_gathering(stack: Stack | None) -> bool:
    """Tell whether the line of the user's that a stack is in gathers a state."""
    return stack is not None and any(frame.function in GATHERERS for frame in list_calls(stack))


def _gathers(view: SceneView, rank: int) -> bool:
    op = view.rank_states[rank].op
    return is_gathering(view.by_rank[rank].stack) or (op is not None and bool(GATHERERS & {*op.inside}))
