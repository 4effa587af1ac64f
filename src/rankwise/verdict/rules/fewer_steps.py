"""Ranks wait in a backward pass for one that has made fewer of them: it left the loop or skipped a step (D14, D15, D16, X10)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.telling import find_fewer, tell_absence
from rankwise.verdict.uneven import explain_fewer
from rankwise.verdict.words import is_gradient, is_in_backward, is_sharded_pass, shorten

if TYPE_CHECKING:
    from rankwise.verdict.sight import Sight
    from rankwise.verdict.view import Absence, View

RULE = "fewer_steps"


def find(view: View) -> tuple[Sight, ...]:
    """Return the sights of it: not while those that are missing may still come."""
    sights = []
    for absence in view.absences:
        if not all(_is_backward(one.wait, absence) for one in absence.waiting) and not (
            absence.op is not None and is_sharded_pass(absence.op) and view.have_ended(absence)
        ):
            continue
        if any(map(view.may_come, absence.missing)) or not _did_before(view, absence):
            continue
        first = absence.waiting[0]
        class_id, fix = explain_fewer(view, first.site, first.rank, absence.missing) or (
            "D14",
            f"let all ranks make the same number of {_name_passes(absence)}, and "
                "one decision for all to stop early or to skip a step (all_reduce the flag first)",
        )  # fmt: skip
        sights.append(
            tell_absence(
                view, absence, rule=RULE, class_id=class_id, fix=fix, culprits=find_fewer(absence),
                certainty="proof" if view.have_ended(absence) else "suspicion",
            )
        )  # fmt: skip
    return tuple(sights)


def _is_backward(wait: str | None, absence: Absence) -> bool:
    return wait == "backward" or (
        absence.op is not None
        and (is_gradient(absence.op) or (is_sharded_pass(absence.op) and is_in_backward(absence.op)))
    )


def _name_passes(absence: Absence) -> str:
    at = shorten(absence.waiting[0].site)
    if absence.op is not None and is_sharded_pass(absence.op):
        return f"passes at {at}: equal batches (DistributedSampler, drop_last)"
    return f"backward passes at {at}: equal batches (DistributedSampler, drop_last, model.join())"


def _did_before(view: View, absence: Absence) -> bool:
    """Tell whether all that are missing are known to have trained along: by their records, or by their steps."""
    lane, op = absence.lane, absence.op
    if (
        lane is not None
        and op is not None
        and all(lane.has_been_at(rank, op.site) for rank in absence.missing)
    ):
        return True
    evidences = [view.by_rank[rank].evidence for rank in absence.missing]
    return all(one is not None and one.steps > 0 for one in evidences)
