"""Only some ranks wrap their model in DDP: its constructor compares the models of all, and the others never answer (D13)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.explain import explain_absence, explain_mismatch, find_guarded
from rankwise.verdict.wording import is_wrapping, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.evidence.reader.scene import Op
    from rankwise.verdict.finding import JobFinding
    from rankwise.verdict.scene_view import SceneView

RULE = "wrapped_on_some"


def find(view: SceneView) -> Iterator[JobFinding]:
    """Yield the findings of it."""
    for mismatch in view.mismatches:
        wrapping, others = mismatch.split(is_wrapping)
        # A collective of one rank's own, which met the constructor of all others, is no missing wrapper.
        is_extra = any(not is_wrapping(op) for _, op in find_guarded(view, mismatch))
        if wrapping and others and not is_extra:
            op = wrapping[0][1]
            yield explain_mismatch(
                view, mismatch, rule=RULE, class_id="D13", fix=_fix(op), lead=op,
                text="some ranks wrapped their model in DistributedDataParallel while the others did not",
            )  # fmt: skip
    for absence in view.absences:
        if absence.op is None or absence.sequence is None or not is_wrapping(absence.op):
            continue
        if not view.may_any_come(absence) and not any(map(absence.was_here, absence.missing)):
            yield explain_absence(view, absence, rule=RULE, class_id="D13", fix=_fix(absence.op))


def _fix(op: Op) -> str:
    return f"construct DistributedDataParallel at {shorten(op.site)} on all ranks of the group, also those that have no data"
