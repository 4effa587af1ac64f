"""Only some ranks ran the forward pass of a DDP model: it broadcasts buffers, and the others were elsewhere (D17, D19)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.telling import tell_absence, tell_parting
from rankwise.verdict.uneven import explain_fewer
from rankwise.verdict.words import is_buffers, is_gradient, shorten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.evidence.facts import Op
    from rankwise.verdict.lanes import Lane
    from rankwise.verdict.sight import Sight
    from rankwise.verdict.view import View

RULE = "forward_on_some"


def find(view: View) -> tuple[Sight, ...]:
    """Return the sights of it, met by another collective, or waiting for ranks that make none."""
    sights = []
    for parting in view.partings:
        buffers = [side for side in parting.sides if is_buffers(side[1])]
        others = [rank for ranks, op in parting.sides if not is_buffers(op) for rank in ranks]
        if not buffers or not others or parting.respect not in {"op", "size", "dtype"}:
            continue
        ranks, broadcast = buffers[0]
        class_id = _name(parting.lane, ranks[0], broadcast, others)
        places = [op.site for _, op in parting.sides if not is_buffers(op)]
        known = explain_fewer(view, broadcast.site, ranks[0], others, places) if class_id == "D14" else None
        class_id, fix = known or (class_id, fix_forward(broadcast, class_id))
        sights.append(
            tell_parting(
                view, parting, rule=RULE, told="some ranks ran the DDP model's forward pass while the others did not",
                class_id=class_id, fix=fix, lead=broadcast,
            )
        )  # fmt: skip
    for absence in view.absences:
        op, lane = absence.op, absence.lane
        if op is None or lane is None or not is_buffers(op):
            continue
        class_id = _name(lane, absence.waiting[0].rank, op, absence.missing)
        if class_id in {"D17", "D19"} and not any(view.may_come(rank) for rank in absence.missing):
            sights.append(
                tell_absence(
                    view, absence, rule=RULE, class_id=class_id, fix=fix_forward(op, class_id),
                    certainty="proof" if view.have_ended(absence) else "suspicion",
                )
            )  # fmt: skip
    return tuple(sights)


def _name(lane: Lane, rank: int, op: Op, others: Sequence[int]) -> str | None:
    if not all(lane.remembers_all(other) for other in others):
        return None
    if not any(lane.has_been_at(other, op.site) for other in others):
        return "D17"
    earlier = [one for seq, one in sorted(lane.ops[rank].items()) if seq < op.seq]
    since_buffers = [one for one in earlier if is_gradient(one) or is_buffers(one)]
    # Forward upon forward, without a backward pass between them: an evaluation, and of unequal length.
    return "D19" if since_buffers and is_buffers(since_buffers[-1]) else "D14"


def fix_forward(op: Op, class_id: str | None) -> str:
    """Return what to do about a forward pass that only some ranks made.

    Args:
        op: Its broadcast.
        class_id: The failure class: D14 if it was a training step.
    """
    if class_id == "D14":
        return (
            f"let all ranks make the same number of training steps at {shorten(op.site)} (DistributedSampler, drop_last, model.join()), "
            "and agree on it by a collective before a rank leaves the loop or skips a step"
        )
    return (
        f"at {shorten(op.site)} use model.module(...) for a forward pass that only some ranks make, "
        "or let all ranks make the same number of them under torch.no_grad()"
    )
