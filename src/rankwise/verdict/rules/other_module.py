"""FSDP gathered or reduced different modules on different ranks under one number: they are at different places of the model (D15)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.base.rank_names import name_ranks
from rankwise.verdict.explain import explain_mismatch, put_at
from rankwise.verdict.uneven_steps import Explained, explain_skip
from rankwise.verdict.wording import is_in_backward, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.evidence.reader.scene import Op
    from rankwise.verdict.finding import JobFinding
    from rankwise.verdict.mismatch import Mismatch
    from rankwise.verdict.scene_view import SceneView

RULE = "other_module"


def find(view: SceneView) -> Iterator[JobFinding]:
    """Yield the findings of it."""
    for mismatch in view.mismatches:
        if mismatch.respect == "module":
            yield _make_finding(view, mismatch)


def _make_finding(view: SceneView, mismatch: Mismatch) -> JobFinding:
    backward, forward = mismatch.split(is_in_backward)
    if not forward or not backward:
        return explain_mismatch(
            view, mismatch, rule=RULE, class_id=None, text="the ranks of an FSDP model are at different modules of it",
            fix="run the same modules in the same order on all ranks: where one is dropped or skipped, all must drop it "
            "(draw it from a generator with the same seed, or broadcast the decision)",
        )  # fmt: skip
    ahead = tuple(sorted(rank for ranks, _ in forward for rank in ranks))
    # Either of the two has passed over something; a rank in its next forward has passed over its backward.
    text = "some ranks of an FSDP model are in a forward pass while the others are in a backward pass"
    class_id, fix, where = _explain(view, ahead, *backward[0])
    finding = explain_mismatch(
        view, mismatch, rule=RULE, class_id=class_id, culprits=ahead, lead=forward[0][1], text=text, fix=fix
    )
    return put_at(finding, where)


def _explain(view: SceneView, ahead: tuple[int, ...], others: tuple[int, ...], op: Op) -> Explained:
    explained = explain_skip(view, others[0], op.site)
    if explained is not None:
        return explained
    gate = next((one for one in view.source.guards_where(others[0], op.site) if one.is_rank_test), None)
    why = f"the rank test at {shorten(gate.file)}:{gate.line} keeps it from there; " if gate else ""
    fix = (
        f"{why}make {name_ranks(ahead)} run the backward pass at {shorten(op.site)} as often as the others "
        "(with a loss of 0 times the outputs where there is nothing to learn), or skip it on all ranks: all_reduce the flag first"
    )
    return Explained("D15", fix, None)
