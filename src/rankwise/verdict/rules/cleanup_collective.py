"""A rank left a block by an exception, and its except or finally makes a collective that nobody meets (C25)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.base.rank_names import name_ranks
from rankwise.evidence.reader.notes import parse_traceback
from rankwise.evidence.reader.thread_choice import MAIN
from rankwise.verdict.explain import explain_mismatch
from rankwise.verdict.uneven_steps import explain_fewer
from rankwise.verdict.wording import is_gradient, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.base.faults import FaultRecord
    from rankwise.evidence.reader.scene import Op, RankFacts
    from rankwise.verdict.finding import JobFinding
    from rankwise.verdict.mismatch import Mismatch
    from rankwise.verdict.scene_view import SceneView

RULE = "cleanup_collective"


def find(view: SceneView) -> Iterator[JobFinding]:
    """Yield the findings of it: only the script's text tells that a line stands in a finally."""
    for mismatch in view.mismatches:
        raised = _find_raised(view, mismatch)
        cleaning = _find_cleaning(view, mismatch) or tuple(sorted(raised))
        if not cleaning:
            continue
        at = next(op.site for ranks, op in mismatch.sides if ranks[0] in cleaning)
        others = [op for ranks, op in mismatch.sides if ranks[0] not in cleaning]
        # Who is through with its batches earlier reaches the finally just as well.
        is_early = any(map(is_gradient, others)) and not _is_excepting(view, mismatch, cleaning)
        text = f"{name_ranks(cleaning)} left a try block early and called the collective in its except or finally"
        behind = f"look for the exception that led to {shorten(at)}: it has not been printed yet{', or for a loop that ended earlier' if is_early else ''}"
        known = [rank for rank in cleaning if rank in raised]
        if is_early and not known and _is_explained(view, mismatch, cleaning):
            continue  # the script's own lines tell why there was a step less: mispaired_gradients says so
        if known:
            is_early, text = False, _describe_raised(known, cleaning, raised, at)
            behind = f"fix the exception raised at {shorten(raised[known[0]].where)}: it was not printed, because the collective after it still blocks"
        yield explain_mismatch(
            view, mismatch, rule=RULE, class_id=None if is_early else "C25", culprits=cleaning, text=text,
            fix=f"{behind}; and take the collective out of the except or finally",
        )  # fmt: skip


def _is_explained(view: SceneView, mismatch: Mismatch, cleaning: tuple[int, ...]) -> bool:
    """Tell whether the script shows how these ranks came to a step less than those whose gradients they met."""
    stepping, gradients = next((ranks[0], op) for ranks, op in mismatch.sides if is_gradient(op))
    places = [op.site for ranks, op in mismatch.sides if ranks[0] in cleaning]
    return explain_fewer(view, gradients.site, stepping, cleaning, places) is not None


def _describe_raised(
    known: list[int], cleaning: tuple[int, ...], raised: dict[int, FaultRecord], at: str | None
) -> str:
    first = raised[known[0]]
    text = f"{name_ranks(known[:1])} raised {first.message} at {shorten(first.where)}"
    if more := [rank for rank in cleaning if rank != known[0]]:
        text += f", {name_ranks(more)} left the block too"
    return f"{text}, and called the collective in the except, finally or __exit__ at {shorten(at)}"


def _find_raised(view: SceneView, mismatch: Mismatch) -> dict[int, FaultRecord]:
    """Return what ranks that still stand in the collective are handling, if it is not what all others are handling too."""
    found = {
        rank: fault
        for ranks, op in mismatch.sides
        for rank in ranks
        if (fault := _find_handled(view.by_rank[rank], op)) is not None
    }
    sides = [ranks for ranks, _ in mismatch.sides if not any(rank in found for rank in ranks)]
    return found if sides else {}


def _find_handled(facts: RankFacts, op: Op) -> FaultRecord | None:
    """Return the exception that a rank has on its hands in a collective: one that came through a function that it is still in."""
    evidence, stack = facts.evidence, facts.stack
    if evidence is None or stack is None or stack.where != op.site:
        return None
    thread = next((name for name, one in evidence.stacks.items() if one == stack), MAIN)
    fault = (evidence.handled or {}).get(thread)
    trace = parse_traceback(fault.callstack) if fault else None
    if fault is None or trace is None:
        return None
    own = {(frame.file, frame.function) for frame in stack.frames if frame.is_users}
    return fault if any((frame.file, frame.function) in own for frame in trace.frames) else None


def _find_cleaning(view: SceneView, mismatch: Mismatch) -> tuple[int, ...]:
    """Return the ranks that are in an except or finally while others are still in the block before it."""
    guards = [(ranks, view.source.guards_where(ranks[0], op.site)) for ranks, op in mismatch.sides]
    inside = {(guard.file, guard.opened) for _, found in guards for guard in found if guard.kind == "try"}
    return tuple(
        sorted(
            rank
            for ranks, found in guards
            if any(guard.kind in {"except", "finally"} and (guard.file, guard.opened) in inside for guard in found)
            for rank in ranks
        )
    )


def _is_excepting(view: SceneView, mismatch: Mismatch, cleaning: tuple[int, ...]) -> bool:
    return any(
        guard.kind == "except"
        for ranks, op in mismatch.sides
        if ranks[0] in cleaning
        for guard in view.source.guards_where(ranks[0], op.site)
    )
