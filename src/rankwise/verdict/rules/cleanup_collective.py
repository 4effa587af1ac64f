"""A rank left a block by an exception, and its except or finally makes a collective that nobody meets (C25)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.case import name_ranks
from rankwise.verdict.telling import tell_parting
from rankwise.verdict.words import is_gradient, shorten

if TYPE_CHECKING:
    from rankwise.verdict.guards import Guard
    from rankwise.verdict.parting import Parting
    from rankwise.verdict.sight import Sight
    from rankwise.verdict.view import View

RULE = "cleanup_collective"


def find(view: View) -> tuple[Sight, ...]:
    """Return the sights of it: only the script's text tells that a line stands in a finally."""
    sights = []
    for parting in view.partings:
        cleaning = _find_cleaning(view, parting)
        if cleaning:
            at = next(op.site for ranks, op in parting.sides if ranks[0] in cleaning)
            others = [op for ranks, op in parting.sides if ranks[0] not in cleaning]
            # Who is through with its batches earlier comes to the finally just as well.
            is_early = any(map(is_gradient, others)) and not _is_excepting(view, parting, cleaning)
            sight = tell_parting(
                view, parting, rule=RULE, class_id=None if is_early else "C25", culprits=cleaning,
                told=f"{name_ranks(cleaning)} left a try block early and made the collective of its except or finally",
                fix=f"look for the exception behind {shorten(at)}, which has not been shown yet{', or for a loop that ended earlier' if is_early else ''}, "
                "and take the collective out of the except or finally",
            )  # fmt: skip
            sights.append(sight)
    return tuple(sights)


def _find_cleaning(view: View, parting: Parting) -> tuple[int, ...]:
    """Return the ranks that are in an except or finally while others are still in the block before it."""
    guards = [(ranks, view.guards_where(ranks[0], op.site)) for ranks, op in parting.sides]
    inside = {(guard.file, guard.opened) for _, found in guards for guard in found if guard.kind == "try"}
    return tuple(
        sorted(
            rank
            for ranks, found in guards
            if any(_is_cleanup(guard) and (guard.file, guard.opened) in inside for guard in found)
            for rank in ranks
        )
    )


def _is_excepting(view: View, parting: Parting, cleaning: tuple[int, ...]) -> bool:
    return any(
        guard.kind == "except"
        for ranks, op in parting.sides
        if ranks[0] in cleaning
        for guard in view.guards_where(ranks[0], op.site)
    )


def _is_cleanup(guard: Guard) -> bool:
    return guard.kind in {"except", "finally"}
