"""FSDP gathered or reduced different modules on different ranks under one number: they are at different places of the model (D15)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.case import name_ranks
from rankwise.verdict.telling import put_at, tell_parting
from rankwise.verdict.uneven import Explained, explain_skip
from rankwise.verdict.words import is_in_backward, shorten

if TYPE_CHECKING:
    from rankwise.evidence.facts import Op
    from rankwise.verdict.parting import Parting
    from rankwise.verdict.sight import Sight
    from rankwise.verdict.view import View

RULE = "other_module"


def find(view: View) -> tuple[Sight, ...]:
    """Return the sights of it."""
    return tuple(_tell(view, parting) for parting in view.partings if parting.respect == "module")


def _tell(view: View, parting: Parting) -> Sight:
    forward = [side for side in parting.sides if not is_in_backward(side[1])]
    backward = [side for side in parting.sides if is_in_backward(side[1])]
    if not forward or not backward:
        return tell_parting(
            view, parting, rule=RULE, class_id=None, told="the ranks of an FSDP model are at different modules of it",
            fix="run the same modules in the same order on all ranks: where one is dropped or skipped, all must drop it "
            "(draw it from a generator with the same seed, or broadcast the decision)",
        )  # fmt: skip
    ahead = tuple(sorted(rank for ranks, _ in forward for rank in ranks))
    # Either of the two has passed over something; a rank in its next forward has passed over its backward.
    told = "some ranks of an FSDP model are in a forward pass while the others are in a backward pass"
    class_id, fix, where = _explain(view, ahead, *backward[0])
    sight = tell_parting(
        view, parting, rule=RULE, class_id=class_id, culprits=ahead, lead=forward[0][1], told=told, fix=fix
    )
    return put_at(sight, where)


def _explain(view: View, ahead: tuple[int, ...], others: tuple[int, ...], op: Op) -> Explained:
    explained = explain_skip(view, others[0], op.site)
    if explained is not None:
        return explained
    gate = next((one for one in view.guards_where(others[0], op.site) if one.is_rank_test), None)
    why = f"the rank test at {shorten(gate.file)}:{gate.line} keeps it from there; " if gate else ""
    fix = (
        f"{why}make {name_ranks(ahead)} run the backward pass at {shorten(op.site)} as often as the others "
        "(with a loss of 0 times the outputs where there is nothing to learn), or skip it on all ranks: all_reduce the flag first"
    )
    return Explained("D15", fix, None)
