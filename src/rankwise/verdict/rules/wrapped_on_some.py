"""Only some ranks wrap their model in DDP: its constructor compares the models of all, and the others never answer (D13)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.explain import explain_absence, explain_mismatch, find_guarded
from rankwise.verdict.wording import is_wrapping, shorten

if TYPE_CHECKING:
    from rankwise.evidence.reader.scene import Op
    from rankwise.verdict.finding import JobFinding
    from rankwise.verdict.scene_view import SceneView

RULE = "wrapped_on_some"


def find(view: SceneView) -> tuple[JobFinding, ...]:
    """Return the findings of it."""
    findings = []
    for mismatch in view.mismatches:
        # A collective of one rank's own, which met the constructor of all others, is no missing wrapper.
        is_extra = any(not is_wrapping(op) for _, op in find_guarded(view, mismatch))
        if len({is_wrapping(op) for _, op in mismatch.sides}) == 2 and not is_extra:
            wrapping = next(op for _, op in mismatch.sides if is_wrapping(op))
            findings.append(
                explain_mismatch(
                    view, mismatch, rule=RULE, class_id="D13", fix=_fix(wrapping), lead=wrapping,
                    text="some ranks wrapped their model in DistributedDataParallel while the others did not",
                )
            )  # fmt: skip
    for absence in view.absences:
        op, sequence = absence.op, absence.sequence
        if op is None or sequence is None or not is_wrapping(op) or any(map(view.may_come, absence.missing)):
            continue
        if not any(sequence.has_been_at(rank, op.site) for rank in absence.missing):
            findings.append(
                explain_absence(
                    view, absence, rule=RULE, class_id="D13", fix=_fix(op),
                    certainty="proof" if view.have_ended(absence) else "suspicion",
                )
            )  # fmt: skip
    return tuple(findings)


def _fix(op: Op) -> str:
    return f"construct DistributedDataParallel at {shorten(op.site)} on all ranks of the group, also those that have no data"
