"""Only some ranks ran the forward pass of a DDP model: it broadcasts buffers, and the others were elsewhere (D17, D19); with FSDP it gathers (C1, D14)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.conditional_call import find_conditional_call
from rankwise.verdict.explain import explain_absence, explain_mismatch, put_at
from rankwise.verdict.rules.state_on_some import has_gathered
from rankwise.verdict.uneven_steps import explain_fewer
from rankwise.verdict.wording import is_buffers, is_gradient, is_shards, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rankwise.evidence.reader.scene import Op
    from rankwise.verdict.finding import JobFinding
    from rankwise.verdict.group_sequences import GroupSequence
    from rankwise.verdict.mismatch import Mismatch, Sides
    from rankwise.verdict.scene_view import SceneView

RULE = "forward_on_some"


def find(view: SceneView) -> Iterator[JobFinding]:
    """Yield the findings of it, met by another collective, or waiting for ranks that make none."""
    unlike = [mismatch for mismatch in view.mismatches if mismatch.may_be_two]
    for mismatch in unlike:
        buffers, others = mismatch.split(is_buffers)
        if buffers and others:
            yield _describe_buffers(view, mismatch, buffers, others)
    for mismatch in unlike:
        if _is_shards_met(view, mismatch):
            yield _describe_shards(view, mismatch)
    for absence in view.absences:
        op, sequence = absence.op, absence.sequence
        if op is None or sequence is None or not is_buffers(op):
            continue
        class_id = _name(sequence, absence.waiting[0].rank, op, absence.missing)
        if class_id in {"D17", "D19"} and not view.may_any_come(absence):
            yield explain_absence(view, absence, rule=RULE, class_id=class_id, fix=fix_forward(op, class_id))


def _describe_buffers(view: SceneView, mismatch: Mismatch, buffers: Sides, others: Sides) -> JobFinding:
    ranks, broadcast = buffers[0]
    away = [rank for side, _ in others for rank in side]
    class_id = _name(mismatch.sequence, ranks[0], broadcast, away)
    places = [op.site for _, op in others]
    known = explain_fewer(view, broadcast.site, ranks[0], away, places) if class_id == "D14" else None
    class_id, fix, where = known or (class_id, fix_forward(broadcast, class_id), None)
    finding = explain_mismatch(
        view, mismatch, rule=RULE, text="some ranks ran the DDP model's forward pass while the others did not",
        class_id=class_id, fix=fix, lead=broadcast,
    )  # fmt: skip
    return put_at(finding, where)


def _is_shards_met(view: SceneView, mismatch: Mismatch) -> bool:
    """Tell whether FSDP's parameters were met by what is no pass through the model, and no gathering of its state either."""
    shards, others = mismatch.split(is_shards)
    has_state = any(has_gathered(view, ranks[0], op) for ranks, op in mismatch.sides)
    return bool(shards and others) and not has_state


def _describe_shards(view: SceneView, mismatch: Mismatch) -> JobFinding:
    shards, others = mismatch.split(is_shards)
    ranks, gathering = shards[0]
    away = [rank for side, _ in others for rank in side]
    at = shorten(gathering.site)
    alone = find_conditional_call(view, mismatch)
    were_there = all(mismatch.sequence.has_been_at(rank, gathering.site) for rank in away)
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
        known = explain_fewer(view, gathering.site, ranks[0], away, [op.site for _, op in others])
        class_id, fix, where = known or (class_id, fix, None)
    finding = explain_mismatch(
        view, mismatch, rule=RULE, class_id=class_id, fix=fix, lead=alone.op if alone else gathering,
        text="some ranks gathered the parameters of an FSDP model for a pass while the others did something else",
    )  # fmt: skip
    return put_at(finding, where)


def _name(sequence: GroupSequence, rank: int, op: Op, others: Sequence[int]) -> str | None:
    if not all(sequence.remembers_all(other) for other in others):
        return None
    if not any(sequence.has_been_at(other, op.site) for other in others):
        return "D17"
    earlier = [one for seq, one in sorted(sequence.ops[rank].items()) if seq < op.seq]
    since_buffers = [one for one in earlier if is_gradient(one) or is_buffers(one)]
    # Forward upon forward, without a backward pass between them: an evaluation, and of unequal length.
    return "D19" if since_buffers and is_buffers(since_buffers[-1]) else "D14"


def fix_forward(op: Op, class_id: str | None) -> str:
    """Return what to do about a forward pass that only some ranks made."""
    if class_id == "D14":
        return (
            f"make all ranks run the same number of training steps at {shorten(op.site)} (DistributedSampler, drop_last, model.join()), "
            "and agree by a collective before a rank leaves the loop or skips a step"
        )
    return (
        f"at {shorten(op.site)} use model.module(...) for a forward pass that only some ranks make, "
        "or run the same number of them on all ranks, under torch.no_grad()"
    )
