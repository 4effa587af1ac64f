"""Ranks passed something else to one collective: another root or operator, or tensors of another type or shape (C6, C7, C8)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rankwise.base.rank_names import name_ranks
from rankwise.verdict.explain import explain_mismatch
from rankwise.verdict.wording import shorten

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.verdict.finding import JobFinding
    from rankwise.verdict.mismatch import Mismatch, Respect
    from rankwise.verdict.scene_view import SceneView


class _Difference(NamedTuple):
    """What is said of one respect; ``{values}`` stands for what the ranks passed, ``{at}`` for the line."""

    rule: str
    class_id: str | None
    text: str
    fix: str


_DIFFERENCES: dict[Respect, _Difference] = {
    "root": _Difference(
        "other_root", "C8", "the ranks disagree about the source or destination ({values})",
        "pass the same src or dst on all ranks at {at}: it is the rank that all others get the data from, not one's own",
    ),
    "reduce op": _Difference(
        "other_reduction", None, "the ranks reduced with different operators ({values})", "pass the same ReduceOp on all ranks at {at}",
    ),
    "dtype": _Difference(
        "other_dtype", "C7", "the ranks passed tensors of different dtypes",
        "convert to one dtype on all ranks before {at}, as in tensor.to(torch.float32)",
    ),
    "shape": _Difference(
        "other_shape", "C6", "the ranks passed tensors with the same number of elements but different shapes",
        "transpose or reshape to the same shape on all ranks before {at}",
    ),
}  # fmt: skip
#: Each has its page.
RULES = tuple(difference.rule for difference in _DIFFERENCES.values())


def find(view: SceneView) -> Iterator[JobFinding]:
    """Yield the findings of them."""
    for mismatch in view.mismatches:
        difference = _DIFFERENCES.get(mismatch.respect)
        if difference is not None:
            yield explain_mismatch(
                view, mismatch, rule=difference.rule, class_id=difference.class_id,
                text=difference.text.format(values=_list_values(mismatch)),
                fix=difference.fix.format(at=shorten(mismatch.sides[0][1].site)),
            )  # fmt: skip


def _list_values(mismatch: Mismatch) -> str:
    if mismatch.respect == "root":
        return ", ".join(f"{name_ranks(ranks)} named rank {op.root}" for ranks, op in mismatch.sides[:3])
    return " and ".join(dict.fromkeys(str(op.reduce_op) for _, op in mismatch.sides))
