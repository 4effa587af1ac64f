"""Ranks were at different lines when their collectives were paired by chance, and could not go on later (C1, D14, D17, D28)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.conditional_call import find_conditional_call
from rankwise.verdict.explain import explain_mismatch
from rankwise.verdict.rules.forward_on_some import fix_forward
from rankwise.verdict.rules.state_on_some import GATHERERS
from rankwise.verdict.wording import is_buffers, is_gradient, is_wrapping, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.evidence.reader.scene import Op
    from rankwise.verdict.finding import JobFinding
    from rankwise.verdict.mismatch import Mismatch
    from rankwise.verdict.scene_view import SceneView

RULE = "mispaired_calls"


def find(view: SceneView) -> Iterator[JobFinding]:
    """Yield the findings of it: not where a rule of its own knows what one side was doing."""
    for mismatch in view.mismatches:
        is_known = any(all(mismatch.split(test)) for test in (is_gradient, is_wrapping))
        if mismatch.respect == "line" and not is_known:
            class_id, lead, fix = _judge(view, mismatch)
            yield explain_mismatch(
                view, mismatch, rule=RULE, class_id=class_id, fix=fix, lead=lead,
                text="the ranks took different paths before this showed",
            )  # fmt: skip


def _judge(view: SceneView, mismatch: Mismatch) -> tuple[str | None, Op, str]:
    """Return the class, the collective that is one too many, if it is known, and what to do."""
    own, others = mismatch.sides[0][1], mismatch.sides[1][1]
    away = [op for ranks, op in mismatch.sides if {*ranks} <= {*mismatch.culprits}]
    lead = away[0] if away else own
    if gathering := next((op for op in (own, others) if GATHERERS & {*op.inside}), None):
        return (
            "D28",
            gathering,
            f"gather the state on all ranks at {shorten(gathering.site)}, and write the file on one rank only",
        )
    alone = [op for ranks, op in mismatch.sides if is_buffers(op) and not _is_known_to_all(mismatch, op)]
    if len(alone) == 1:
        return "D17", alone[0], fix_forward(alone[0], "D17")
    if guarded := find_conditional_call(view, mismatch):
        return guarded.class_id, guarded.op, guarded.fix
    places = " and ".join(shorten(op.site) for op in (own, others))
    class_id = "D14" if is_buffers(own) or is_buffers(others) else None
    return (
        class_id, lead,
        f"all ranks must call the same collectives in the same order: look at the branches and loops that lead to {places}",
    )  # fmt: skip


def _is_known_to_all(mismatch: Mismatch, op: Op) -> bool:
    return all(mismatch.sequence.has_been_at(rank, op.site) for ranks, _ in mismatch.sides for rank in ranks)
