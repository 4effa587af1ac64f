"""A rank gave another one more or less than that one expected, in a collective whose parts may be of different sizes (C5)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rankwise.verdict.exchange import find_misfits
from rankwise.verdict.lanes import find_family
from rankwise.verdict.telling import tell_parting
from rankwise.verdict.words import join_clauses, shorten

if TYPE_CHECKING:
    from rankwise.evidence.facts import Op
    from rankwise.verdict.exchange import Misfit
    from rankwise.verdict.parting import Parting
    from rankwise.verdict.sight import Sight
    from rankwise.verdict.view import View

RULE = "other_splits"
_FIXES = {
    "all_to_all": "row r of all input_split_sizes must be column r of all output_split_sizes: exchange the counts first, with an all_to_all_single "
    "of one number per rank, and split the output by what arrived",
    "all_gather": "make each output as large as what that rank sends: gather the lengths first, or pad to the longest",
    "reduce_scatter": "split the inputs alike on all ranks, with piece r as large as the output of rank r",
}


def find(view: View) -> tuple[Sight, ...]:
    """Return the sights of it."""
    return tuple(_tell(view, parting) for parting in view.partings if parting.respect == "splits")


def _tell(view: View, parting: Parting) -> Sight:
    lane, seq = parting.lane, parting.seq
    ops = {rank: known[seq] for rank, known in lane.ops.items() if seq in known}
    misfits = sorted(find_misfits(lane.ranks, ops), key=lambda one: (one.giver, one.getter))
    op = parting.sides[0][1]
    clauses = [_tell_misfit(one, ops[one.giver]) for one in misfits]
    return tell_parting(
        view, parting, rule=RULE, class_id="C5", culprits=parting.culprits,
        told=f"the ranks disagree about how much goes from one to another ({join_clauses(clauses, most=3)})",
        fix=f"at {shorten(op.site)} {_FIXES.get(find_family(op) or '', _FIXES['all_to_all'])}",
    )  # fmt: skip


def _tell_misfit(misfit: Misfit, op: Op) -> str:
    # In rows where one tensor was cut, as the script counts them.
    row = math.prod(op.shapes[0][1:]) if len(op.shapes) == 1 and find_family(op) == "all_to_all" else 1
    is_in_rows = row > 1 and misfit.given % row == 0 and misfit.expected % row == 0
    unit, size = ("row", row) if is_in_rows else ("element", 1)
    given = misfit.given // size
    whom = "itself" if misfit.giver == misfit.getter else f"rank {misfit.getter}"
    return (
        f"rank {misfit.giver} sends {whom} {given} {unit}{'' if given == 1 else 's'}, but {misfit.expected // size} {'is' if misfit.expected == size else 'are'} expected"
    )  # fmt: skip
