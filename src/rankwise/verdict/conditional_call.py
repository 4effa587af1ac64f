"""Which ranks made a collective under a condition that held for them alone, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from rankwise.verdict.explain import find_guarded
from rankwise.verdict.source_text import (
    Loop,
    find_function,
    find_path_inside,
    list_calls_of,
    spans,
    split_site,
)
from rankwise.verdict.wording import shorten

if TYPE_CHECKING:
    from rankwise.evidence.reader.scene import Op
    from rankwise.verdict.guards import Guard
    from rankwise.verdict.mismatch import Mismatch
    from rankwise.verdict.scene_view import SceneView


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionalCall:
    """A side of a mismatch that a condition of its own has led there.

    Attributes:
        ranks: Who.
        op: What they made.
        class_id: C1 for a test of the rank, C26 for one of what each rank has of its own.
        fix: What to do.
    """

    ranks: tuple[int, ...]
    op: Op
    class_id: str
    fix: str


def find_conditional_call(view: SceneView, mismatch: Mismatch) -> ConditionalCall | None:
    """Return the one side that stands under a condition that no other side is under; None if there is none, or several."""
    if guarded := find_guarded(view, mismatch):
        ranks, op = guarded[0]
        asked = next(guard for guard in view.source.guards_where(ranks[0], op.site) if guard.is_rank_test)
        return _describe_rank_test(asked, ranks, op) if len(guarded) == 1 else None
    called = [(test, ranks, op) for ranks, op in mismatch.sides if (test := _find_test_of_callers(view, ranks[0], op))]
    if len(called) == 1 and not _was_there(mismatch, *called[0][1:]):
        return _describe_rank_test(*called[0])
    found = [(ranks, op, at) for ranks, op in mismatch.sides if (at := _find_own_test(view, mismatch, op))]
    if len(found) != 1:
        return None
    ranks, op, at = found[0]
    fix = f"the condition at {at} depends on data of each rank: let one rank decide, and broadcast the decision before {shorten(op.site)}"
    return ConditionalCall(ranks=ranks, op=op, class_id="C26", fix=fix)


def _describe_rank_test(test: Guard, ranks: tuple[int, ...], op: Op) -> ConditionalCall:
    fix = (
        f"move the collective at {shorten(op.site)} out of the rank test at line {test.line} of {shorten(test.file)}: "
        "all ranks must call it; only what follows may differ"
    )
    return ConditionalCall(ranks=ranks, op=op, class_id="C1", fix=fix)


def _find_test_of_callers(view: SceneView, rank: int, op: Op) -> Guard | None:
    """Return the rank test before all calls of the function that a collective stands in, where its stack is lost: Gloo has aborted the rank."""
    file, number = split_site(op.site)
    function = find_function(view.source.text_of(file), number)
    if function is None or len(view.source.lines_where(rank, op.site)) != 1:
        return None
    tests = [
        next((guard for guard in view.source.guards_at(f"{path}:{line}") if guard.is_rank_test), None)
        for path, text in view.scene.sources.items()
        for line in list_calls_of(text, function.name)
    ]
    return tests[0] if tests and None not in tests else None


def _was_there(mismatch: Mismatch, ranks: tuple[int, ...], op: Op) -> bool:
    """Tell whether a side made a collective at this line before: it went well, and they are apart for another reason."""
    return mismatch.sequence.has_been_at(ranks[0], op.site, before=op.seq)


def _find_own_test(view: SceneView, mismatch: Mismatch, op: Op) -> str | None:
    """Return the line of a condition that a side alone is under, and that the others may have passed by."""
    ranks = next(ranks for ranks, one in mismatch.sides if one is op)
    others = {
        guard for side, one in mismatch.sides if one is not op for guard in view.source.guards_where(side[0], one.site)
    }
    lines = _list_inside(view, mismatch, op)
    tests = [guard for line in lines for guard in view.source.guards_at(line) if guard not in others]
    if _was_there(mismatch, ranks, op):
        return None
    return next((f"{shorten(guard.file)}:{guard.line}" for guard in tests if guard.is_own_test), None)


def _list_inside(view: SceneView, mismatch: Mismatch, op: Op) -> tuple[str, ...]:
    """Return the lines that led to a collective, as far as they belong to a loop that the others are in, or to a function that they passed."""
    ranks = next(ranks for ranks, one in mismatch.sides if one is op)
    lines = view.source.lines_where(ranks[0], op.site)
    places = [
        split_site(line)
        for side, one in mismatch.sides
        if one is not op
        for line in view.source.lines_where(side[0], one.site)
    ]
    loops = [
        (file, step.node)
        for file, line in places
        for step in find_path_inside(view.source.text_of(file), line)
        if isinstance(step.node, Loop) and step.part == "body"  # what its head calls, it calls once
    ]
    for at, place in enumerate(map(split_site, lines)):
        if any(place[0] == file and spans(loop, place[1]) for file, loop in loops):
            return lines[: at + 1]
    return () if loops else lines
