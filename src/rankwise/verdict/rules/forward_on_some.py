"""Only some ranks ran the forward pass of a DDP model: it broadcasts buffers, and the others were elsewhere (D17, D19); with FSDP it gathers (C1, D14)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.alone import find_alone
from rankwise.verdict.rules.state_on_some import has_gathered
from rankwise.verdict.telling import put_at, tell_absence, tell_parting
from rankwise.verdict.uneven import explain_fewer
from rankwise.verdict.words import is_buffers, is_gradient, is_shards, shorten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.evidence.facts import Op
    from rankwise.verdict.lanes import Lane
    from rankwise.verdict.parting import Parting
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
        class_id, fix, where = known or (class_id, fix_forward(broadcast, class_id), None)
        sight = tell_parting(
            view, parting, rule=RULE, told="some ranks ran the DDP model's forward pass while the others did not",
            class_id=class_id, fix=fix, lead=broadcast,
        )  # fmt: skip
        sights.append(put_at(sight, where))
    sights += [_tell_shards(view, parting) for parting in view.partings if _is_shards_met(view, parting)]
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


def _is_shards_met(view: View, parting: Parting) -> bool:
    """Tell whether FSDP's parameters were met by what is no pass through the model, and no gathering of its state either."""
    is_pass = [is_shards(op) and not has_gathered(view, ranks[0], op) for ranks, op in parting.sides]
    has_state = any(has_gathered(view, ranks[0], op) for ranks, op in parting.sides)
    return parting.respect in {"op", "size", "dtype"} and 0 < sum(is_pass) < len(is_pass) and not has_state


def _tell_shards(view: View, parting: Parting) -> Sight:
    ranks, gathering = next(side for side in parting.sides if is_shards(side[1]))
    others = [rank for side, op in parting.sides if not is_shards(op) for rank in side]
    at = shorten(gathering.site)
    alone = find_alone(view, parting)
    were_there = all(parting.lane.has_been_at(rank, gathering.site) for rank in others)
    class_id, fix, where = (
        "D14" if were_there else None,
        f"make all ranks run the same number of passes at {at} (DistributedSampler, drop_last), "
        "and agree by a collective before a rank leaves the loop or skips a step",
        None,
    )
    if alone is not None:
        class_id, fix = alone.class_id, alone.fix
        if is_shards(alone.op):
            fix = (
                f"all ranks must run the forward pass at {at}, because FSDP gathers its parameters from all of them: "
                "evaluate on all ranks, only what follows may differ"
            )
    elif were_there:
        places = [op.site for _, op in parting.sides if not is_shards(op)]
        known = explain_fewer(view, gathering.site, ranks[0], others, places)
        class_id, fix, where = known or (class_id, fix, None)
    sight = tell_parting(
        view, parting, rule=RULE, class_id=class_id, fix=fix, lead=alone.op if alone else gathering,
        told="some ranks gathered the parameters of an FSDP model for a pass while the others did something else",
    )  # fmt: skip
    return put_at(sight, where)


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
            f"make all ranks run the same number of training steps at {shorten(op.site)} (DistributedSampler, drop_last, model.join()), "
            "and agree by a collective before a rank leaves the loop or skips a step"
        )
    return (
        f"at {shorten(op.site)} use model.module(...) for a forward pass that only some ranks make, "
        "or run the same number of them on all ranks, under torch.no_grad()"
    )
