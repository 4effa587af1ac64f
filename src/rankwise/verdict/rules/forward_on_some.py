"""Only some ranks ran the forward pass of a DDP model: it broadcasts buffers, and the others were elsewhere (D17, D19); with FSDP it gathers (C1, D14)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.conditional_call import find_conditional_call
from rankwise.verdict.explain import explain_absence, explain_mismatch, put_at
from rankwise.verdict.rules.state_on_some import has_gathered
from rankwise.verdict.uneven_steps import explain_fewer
from rankwise.verdict.wording import is_buffers, is_gradient, is_shards, shorten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.evidence.reader.scene import Op
    from rankwise.verdict.finding import JobFinding
    from rankwise.verdict.group_sequences import GroupSequence
    from rankwise.verdict.mismatch import Mismatch
    from rankwise.verdict.scene_view import SceneView

RULE = "forward_on_some"


def find(view: SceneView) -> tuple[JobFinding, ...]:
    """Return the findings of it, met by another collective, or waiting for ranks that make none."""
    findings = []
    for mismatch in view.mismatches:
        buffers = [side for side in mismatch.sides if is_buffers(side[1])]
        others = [rank for ranks, op in mismatch.sides if not is_buffers(op) for rank in ranks]
        if not buffers or not others or mismatch.respect not in {"op", "size", "dtype"}:
            continue
        ranks, broadcast = buffers[0]
        class_id = _name(mismatch.sequence, ranks[0], broadcast, others)
        places = [op.site for _, op in mismatch.sides if not is_buffers(op)]
        known = explain_fewer(view, broadcast.site, ranks[0], others, places) if class_id == "D14" else None
        class_id, fix, where = known or (class_id, fix_forward(broadcast, class_id), None)
        finding = explain_mismatch(
            view, mismatch, rule=RULE, text="some ranks ran the DDP model's forward pass while the others did not",
            class_id=class_id, fix=fix, lead=broadcast,
        )  # fmt: skip
        findings.append(put_at(finding, where))
    findings += [
        _tell_shards(view, mismatch) for mismatch in view.mismatches if _is_shards_met(view, mismatch)
    ]
    for absence in view.absences:
        op, sequence = absence.op, absence.sequence
        if op is None or sequence is None or not is_buffers(op):
            continue
        class_id = _name(sequence, absence.waiting[0].rank, op, absence.missing)
        if class_id in {"D17", "D19"} and not any(view.may_come(rank) for rank in absence.missing):
            findings.append(
                explain_absence(
                    view, absence, rule=RULE, class_id=class_id, fix=fix_forward(op, class_id),
                    certainty="proof" if view.have_ended(absence) else "suspicion",
                )
            )  # fmt: skip
    return tuple(findings)


def _is_shards_met(view: SceneView, mismatch: Mismatch) -> bool:
    """Tell whether FSDP's parameters were met by what is no pass through the model, and no gathering of its state either."""
    is_pass = [is_shards(op) and not has_gathered(view, ranks[0], op) for ranks, op in mismatch.sides]
    has_state = any(has_gathered(view, ranks[0], op) for ranks, op in mismatch.sides)
    return mismatch.respect in {"op", "size", "dtype"} and 0 < sum(is_pass) < len(is_pass) and not has_state


def _tell_shards(view: SceneView, mismatch: Mismatch) -> JobFinding:
    ranks, gathering = next(side for side in mismatch.sides if is_shards(side[1]))
    others = [rank for side, op in mismatch.sides if not is_shards(op) for rank in side]
    at = shorten(gathering.site)
    alone = find_conditional_call(view, mismatch)
    were_there = all(mismatch.sequence.has_been_at(rank, gathering.site) for rank in others)
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
        places = [op.site for _, op in mismatch.sides if not is_shards(op)]
        known = explain_fewer(view, gathering.site, ranks[0], others, places)
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
