"""Ranks of one group did not make the same call under one number.

Other collectives (C8; C1 and C26 where a condition shows whose is one too many; D15 and D16 where a loop does), or one with tensors of another size,
type or shape, or parts that don't fit (C5, C6, C7, C20), or with another root or operator (C8).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from rankwise.base.rank_names import name_ranks
from rankwise.verdict.conditional_call import find_conditional_call
from rankwise.verdict.explain import explain_mismatch, put_at
from rankwise.verdict.group_sequences import find_family
from rankwise.verdict.split_mismatch import find_split_mismatches
from rankwise.verdict.uneven_steps import explain_divergence
from rankwise.verdict.wording import join_clauses, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.evidence.reader.scene import Op
    from rankwise.verdict.finding import JobFinding
    from rankwise.verdict.mismatch import Mismatch
    from rankwise.verdict.scene_view import SceneView
    from rankwise.verdict.split_mismatch import SplitMismatch


class _Difference(NamedTuple):
    """What is said of one respect; ``{values}`` stands for what the ranks passed, ``{at}`` for the line."""

    rule: str
    class_id: str | None
    text: str
    fix: str


_SIZES, _SPLITS = (
    "the ranks passed tensors of different sizes",
    "the ranks disagree about how much goes from one to another ({values})",
)
#: By what differs, and of some kinds of collectives by that too.
_DIFFERENCES: dict[str, _Difference] = {
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
    "size": _Difference(
        "other_size", "C5", _SIZES, "all ranks must pass tensors of the same shape at {at}, and call their collectives in the same order",
    ),
    "size of all_gather": _Difference(
        "other_size", "C5", _SIZES, "at {at} gather the lengths first and pad to the longest, or use all_gather_object",
    ),
    "size of broadcast_object_list": _Difference(
        "other_size", "C20", _SIZES, "at {at} the lists must have the same length on all ranks: [None] * n on those that receive",
    ),
    "splits": _Difference(
        "other_splits", "C5", _SPLITS,
        "at {at} row r of all input_split_sizes must be column r of all output_split_sizes: exchange the counts first, with an all_to_all_single "
        "of one number per rank, and split the output by what arrived",
    ),
    "splits of all_gather": _Difference(
        "other_splits", "C5", _SPLITS, "at {at} make each output as large as what that rank sends: gather the lengths first, or pad to the longest",
    ),
    "splits of reduce_scatter": _Difference(
        "other_splits", "C5", _SPLITS, "at {at} split the inputs alike on all ranks, with piece r as large as the output of rank r",
    ),
}  # fmt: skip
RULES = ("other_op", *dict.fromkeys(difference.rule for difference in _DIFFERENCES.values()))


def find(view: SceneView) -> Iterator[JobFinding]:
    """Yield the findings of it."""
    for mismatch in view.mismatches:
        if mismatch.respect in {"op", "model check"}:
            yield _explain_two(view, mismatch, rule="other_op")
        elif mismatch.respect == "size" and _are_two(view, mismatch):
            yield _explain_two(view, mismatch, rule="other_size")
        elif mismatch.respect in _DIFFERENCES:
            difference = _find_difference(mismatch)
            yield explain_mismatch(
                view, mismatch, rule=difference.rule, class_id=difference.class_id, culprits=mismatch.culprits if mismatch.respect == "splits" else (),
                text=difference.text.format(values=_describe_values(mismatch)),
                fix=difference.fix.format(at=shorten(mismatch.sides[0][1].site)),
            )  # fmt: skip


def _find_difference(mismatch: Mismatch) -> _Difference:
    op, respect = mismatch.sides[0][1], mismatch.respect
    kind = "broadcast_object_list" if "broadcast_object_list" in op.inside else find_family(op)
    return _DIFFERENCES.get(f"{respect} of {kind}", _DIFFERENCES[respect])


def _describe_values(mismatch: Mismatch) -> str:
    if mismatch.respect == "root":
        return ", ".join(f"{name_ranks(ranks)} named rank {op.root}" for ranks, op in mismatch.sides[:3])
    if mismatch.respect == "splits":
        sequence, seq = mismatch.sequence, mismatch.seq
        ops = {rank: known[seq] for rank, known in sequence.ops.items() if seq in known}
        found = sorted(find_split_mismatches(sequence.ranks, ops), key=lambda one: (one.giver, one.getter))
        return join_clauses([_describe_split(one, ops[one.giver]) for one in found], most=3)
    return " and ".join(dict.fromkeys(str(op.reduce_op) for _, op in mismatch.sides))


def _describe_split(split: SplitMismatch, op: Op) -> str:
    # In rows where one tensor was cut, as the script counts them.
    row = math.prod(op.shapes[0][1:]) if len(op.shapes) == 1 and find_family(op) == "all_to_all" else 1
    is_in_rows = row > 1 and split.given % row == 0 and split.expected % row == 0
    unit, size = ("row", row) if is_in_rows else ("element", 1)
    given = split.given // size
    whom = "itself" if split.giver == split.getter else f"rank {split.getter}"
    return (
        f"rank {split.giver} sends {whom} {given} {unit}{'' if given == 1 else 's'}, but {split.expected // size} {'is' if split.expected == size else 'are'} expected"
    )  # fmt: skip


def _are_two(view: SceneView, mismatch: Mismatch) -> bool:
    """Tell whether the sizes differ because the collectives are two: their lines do, or one was made under a condition of its own."""
    sites = {op.site for _, op in mismatch.sides}
    if None in sites:
        return False
    first = mismatch.sides[0][1].site
    are_apart = len(sites) > 1 and not any(view.source.are_alternatives(first, site) for site in sites)
    return are_apart or find_conditional_call(view, mismatch) is not None


def _explain_two(view: SceneView, mismatch: Mismatch, *, rule: str) -> JobFinding:
    """Return the finding of ranks that made two collectives where one was due; ``rule`` has found it."""
    alone = find_conditional_call(view, mismatch)
    text = "the ranks called different collectives at the same time"
    if alone is None and (left := explain_divergence(view, mismatch)):
        (class_id, fix, where), gone, instead = left
        finding = explain_mismatch(
            view, mismatch, rule=rule, text=text, class_id=class_id, fix=fix, culprits=gone, lead=instead
        )
        return put_at(finding, where)
    places = dict.fromkeys(shorten(op.site) for _, op in mismatch.sides[:3])
    return explain_mismatch(
        view, mismatch, rule=rule, text=text,
        class_id=alone.class_id if alone else "C8", lead=alone.op if alone else None,
        fix=alone.fix if alone else (
            "all ranks of the group must call the same collectives in the same order: "
            f"look at the branches that lead to {' and '.join(places)}"
        ),
    )  # fmt: skip
