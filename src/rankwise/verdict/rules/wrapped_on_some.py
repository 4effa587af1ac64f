"""Only some ranks wrap their model in DDP: its constructor compares the models of all, and the others never answer (D13)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.telling import find_guarded, tell_absence, tell_parting
from rankwise.verdict.words import is_wrapping, shorten

if TYPE_CHECKING:
    from rankwise.evidence.facts import Op
    from rankwise.verdict.sight import Sight
    from rankwise.verdict.view import View

RULE = "wrapped_on_some"


def find(view: View) -> tuple[Sight, ...]:
    """Return the sights of it."""
    sights = []
    for parting in view.partings:
        # A collective of one rank's own, which met the constructor of all others, is no missing wrapper.
        is_extra = any(not is_wrapping(op) for _, op in find_guarded(view, parting))
        if len({is_wrapping(op) for _, op in parting.sides}) == 2 and not is_extra:
            wrapping = next(op for _, op in parting.sides if is_wrapping(op))
            sights.append(
                tell_parting(
                    view, parting, rule=RULE, class_id="D13", fix=_fix(wrapping), lead=wrapping,
                    told="some ranks wrapped their model in DistributedDataParallel while the others did not",
                )
            )  # fmt: skip
    for absence in view.absences:
        op, lane = absence.op, absence.lane
        if op is None or lane is None or not is_wrapping(op) or any(map(view.may_come, absence.missing)):
            continue
        if not any(lane.has_been_at(rank, op.site) for rank in absence.missing):
            sights.append(
                tell_absence(
                    view, absence, rule=RULE, class_id="D13", fix=_fix(op),
                    certainty="proof" if view.have_ended(absence) else "suspicion",
                )
            )  # fmt: skip
    return tuple(sights)


def _fix(op: Op) -> str:
    return f"construct DistributedDataParallel at {shorten(op.site)} on all ranks of the group, also those that have no data"
