"""A rank gave another one more or less than that one expected, in a collective whose parts may be of different sizes (C5)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rankwise.verdict.explain import explain_mismatch
from rankwise.verdict.group_sequences import find_family
from rankwise.verdict.split_mismatch import find_split_mismatches
from rankwise.verdict.wording import join_clauses, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.evidence.reader.scene import Op
    from rankwise.verdict.finding import JobFinding
    from rankwise.verdict.mismatch import Mismatch
    from rankwise.verdict.scene_view import SceneView
    from rankwise.verdict.split_mismatch import SplitMismatch

RULE = "other_splits"
_FIXES = {
    "all_to_all": "row r of all input_split_sizes must be column r of all output_split_sizes: exchange the counts first, with an all_to_all_single "
    "of one number per rank, and split the output by what arrived",
    "all_gather": "make each output as large as what that rank sends: gather the lengths first, or pad to the longest",
    "reduce_scatter": "split the inputs alike on all ranks, with piece r as large as the output of rank r",
}


def find(view: SceneView) -> Iterator[JobFinding]:
    """Yield the findings of it."""
    for mismatch in view.mismatches:
        if mismatch.respect == "splits":
            yield _make_finding(view, mismatch)


def _make_finding(view: SceneView, mismatch: Mismatch) -> JobFinding:
    sequence, seq = mismatch.sequence, mismatch.seq
    ops = {rank: known[seq] for rank, known in sequence.ops.items() if seq in known}
    mismatches = sorted(find_split_mismatches(sequence.ranks, ops), key=lambda one: (one.giver, one.getter))
    op = mismatch.sides[0][1]
    clauses = [_describe_split(one, ops[one.giver]) for one in mismatches]
    return explain_mismatch(
        view, mismatch, rule=RULE, class_id="C5", culprits=mismatch.culprits,
        text=f"the ranks disagree about how much goes from one to another ({join_clauses(clauses, most=3)})",
        fix=f"at {shorten(op.site)} {_FIXES.get(find_family(op) or '', _FIXES['all_to_all'])}",
    )  # fmt: skip


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
