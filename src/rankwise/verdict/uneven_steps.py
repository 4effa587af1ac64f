"""Why a rank made fewer steps than the others, where the script's own lines show it: it skipped one, threw a batch away, or stopped early."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from rankwise.base.rank_names import name_ranks
from rankwise.verdict.loops import find_swallows, find_ways_out
from rankwise.verdict.source_text import lines_of, list_loops, split_site
from rankwise.verdict.wording import shorten, verb

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rankwise.evidence.reader.scene import Op
    from rankwise.verdict.finding import JobFinding
    from rankwise.verdict.loops import Reason, WayOut
    from rankwise.verdict.mismatch import Mismatch
    from rankwise.verdict.scene_view import SceneView

_CLASSES: dict[Reason, str] = {
    "not finite": "D15", "exception": "D15", "empty": "D15", "no loss": "D15", "swallowed": "D15", "stop": "D16",
}  # fmt: skip
_FIXES: dict[Reason, str] = {
    "not finite": "the continue at {at} skips the step on the rank whose loss is not finite: skip it on all ranks together (all_reduce the flag with MAX first)",
    "exception": "the continue at {at} skips the step on the rank that caught an exception: let it end the rank, or skip it on all ranks together "
    "(all_reduce a flag with MAX first)",
    "empty": "the continue at {at} skips the step on the rank whose batch is empty: run the step anyway (with a loss of 0 times the parameters), or skip it on all ranks together",
    "no loss": "the continue at {at} skips the step on the rank that has no loss: skip it on all ranks together (all_reduce the flag with MAX first)",
    "swallowed": "the {word} at {at} throws away a step on the rank that had an exception, and continues: let it raise, or skip it on all ranks together "
    "(all_reduce a flag with MAX first)",
    "stop": "the {word} at {at} ends the loop on one rank by that rank's own numbers: make one decision for all ranks (all_reduce or broadcast it first)",
}
_OWN = (
    "the {word} at {at} {does} on one rank by that rank's own number or data: make one decision for all ranks (all_reduce the flag with MAX first); "
    "if no rank takes it, give all ranks the same number of batches"
)
_FILTERED = "the continue at {at} throws away a batch that was filtered after the sampler had assigned it: filter the data set before the sampler"


class Explained(NamedTuple):
    """Why a rank made fewer steps: the failure class, what to do, and the line that it took."""

    class_id: str
    fix: str
    where: str | None


def explain_fewer(
    view: SceneView, site: str | None, waiting: int, missing: Sequence[int], places: Sequence[str | None] = ()
) -> Explained | None:
    """Return what the script shows where there is exactly one way in which ranks can have left a loop, or a step of it, alone.

    Args:
        view: The scene.
        site: Where the others make the step.
        waiting: One of these.
        missing: Who made fewer.
        places: Where they are instead, as far as their collectives tell; their stacks are looked at anyway.
    """
    found: dict[Reason, tuple[WayOut, str]] = {}
    own: dict[str, tuple[WayOut, str]] = {}
    for file, text, line in _list_lines(view, waiting, site):
        for way in find_ways_out(text, line):
            if not _are_inside(view, file, way.loop, missing, places):
                if way.reason == "own":
                    own[f"{file}:{way.line}"] = (way, file)
                else:
                    found[way.reason] = (way, file)
    if not found and (swallow := _find_swallow(view, site, waiting, missing, places)):
        found["swallowed"] = swallow
    ways = [*(found or own).values()]
    if len(ways) != 1:
        return None  # none, or it is not known which of them it was
    way, file = ways[0]
    if way.reason == "empty" and "collate_fn" in view.source.text_of(file):
        return Explained("X10", _FILTERED.format(at=f"{shorten(file)}:{way.line}"), f"{file}:{way.line}")
    return _explain(way, file)


def _list_lines(view: SceneView, rank: int, site: str | None) -> Iterator[tuple[str, str, int]]:
    """Yield the lines that led a rank to one of its collectives, innermost first: the file, its text, and the line's number."""
    for place in view.source.lines_where(rank, site):
        file, line = split_site(place)
        yield file, view.source.text_of(file), line


def _explain(way: WayOut, file: str) -> Explained:
    at = f"{shorten(file)}:{way.line}"
    if way.reason == "own":
        skips = way.word == "continue"
        fix = _OWN.format(at=at, word=way.word, does="skips the step" if skips else "ends the loop")
        return Explained("D15" if skips else "D16", fix, f"{file}:{way.line}")
    fix = _FIXES[way.reason].format(at=at, word=way.word)
    return Explained(_CLASSES[way.reason], fix, f"{file}:{way.line}")


def explain_divergence(view: SceneView, mismatch: Mismatch) -> tuple[Explained, tuple[int, ...], Op] | None:
    """Return how one side has left the loop in which the other makes its collective, which ranks these are, and what they called instead."""
    if len(mismatch.sides) != 2:
        return None
    found = []
    for (inside, op), (gone, instead) in itertools.permutations(mismatch.sides):
        explained = explain_fewer(view, op.site, inside[0], gone, [instead.site])
        if explained and all(mismatch.sequence.has_been_at(rank, op.site) for rank in gone):
            found.append((explained, gone, instead))
    return found[0] if len(found) == 1 else None


def find_loop(view: SceneView, rank: int, site: str | None) -> str | None:
    """Return the line at which the loop begins in which a rank makes a step; None if the script does not show it."""
    for file, text, line in _list_lines(view, rank, site):
        if loops := list_loops(text, line):
            return f"{file}:{loops[0].lineno}"
    return None


def advise_even_steps(view: SceneView, rank: int, site: str | None, *, is_sharded: bool) -> str:
    """Return what to do where the script does not show why ranks make unequal numbers of steps.

    Args:
        view: The scene.
        rank: One that made more of them.
        site: Where it makes them.
        is_sharded: Whether the model is, which Join does not know.
    """
    join = "" if is_sharded else "; or train under `with Join([model])` (torch.distributed.algorithms.join)"
    loop = find_loop(view, rank, site)
    at = f"in the loop at {shorten(loop)}" if loop else f"at {shorten(site)}"
    return (
        f"give all ranks the same number of batches {at}: rankwise.DataLoader, "
        f"or a DistributedSampler and drop_last=True in the loader{join}"
    )


def are_in_step(view: SceneView, site: str | None, waiting: int, missing: Sequence[int], *, any_loop: bool) -> bool:
    """Tell whether ranks are known to be in the loop in which the others make a step: then they have not run out of batches.

    Args:
        view: The scene.
        site: Where the others make it.
        waiting: One of these.
        missing: Who has not come.
        any_loop: Whether a loop around that one counts, too.
    """
    return any(
        _are_inside(view, file, lines_of(loop), missing, ())
        for file, text, line in _list_lines(view, waiting, site)
        for loop in list_loops(text, line)[: None if any_loop else 1]
    )


def explain_uneven(
    view: SceneView, finding: JobFinding, fewer: Sequence[int], more: Sequence[int], site: str | None
) -> JobFinding:
    """Return a finding that says first that the batches are uneven, with the numbers of steps and the loop if they are known.

    Args:
        view: The scene.
        finding: What is told of it without that.
        fewer: Who came to the end of its batches.
        more: Who is in the step after that.
        site: Where these make it.
    """
    where = find_loop(view, more[0], site)
    evidences = [[view.by_rank[rank].evidence for rank in ranks if rank in view.by_rank] for ranks in (fewer, more)]
    less, last = ({0 if one is None else one.steps for one in ranks} for ranks in evidences)
    numbers = ""
    if len(less) == len(last) == 1 and 0 < min(less) <= min(last):
        steps = f"{min(less)} step{'s' if min(less) > 1 else ''}"
        numbers = (
            f" ({name_ranks(fewer)} made {steps}, {name_ranks(more)} {verb(more, 'are', 'is')} in step {min(last) + 1})"
        )
    head = "uneven batches" if finding.is_proof else "probably uneven batches"
    return replace(finding, message=f"{head}{numbers}: {finding.message}", where=where or finding.where)


def explain_skip(view: SceneView, rank: int, site: str | None) -> Explained | None:
    """Return what the script shows where there is exactly one ``continue`` by which a rank can pass over a line and reach it again."""
    found: dict[tuple[str, int], WayOut] = {}
    for file, text, line in _list_lines(view, rank, site):
        ways = find_ways_out(text, line)
        found |= {(file, way.line): way for way in ways if way.word == "continue" and way.reason != "own"}
    if len(found) != 1:
        return None
    (file, _), way = next(iter(found.items()))
    return _explain(way, file)


def _find_swallow(
    view: SceneView, site: str | None, waiting: int, missing: Sequence[int], places: Sequence[str | None]
) -> tuple[WayOut, str] | None:
    """Return what goes on after an exception, in a loop or below one; outside of all only if those that are missing are seen behind it."""
    taken: tuple[WayOut, str] | None = None
    for file, text, line in _list_lines(view, waiting, site):
        # Around a whole script it may only log what ends it; in a loop the next step follows.
        if taken is not None and list_loops(text, line):
            return taken
        for way in find_swallows(text, line):
            if not _are_inside(view, file, way.loop, missing, places):
                taken = taken or (way, file)
                if way.is_in_loop:
                    return taken
    return taken if _are_placed(view, missing, places) else None


def _are_placed(view: SceneView, missing: Sequence[int], places: Sequence[str | None]) -> bool:
    """Tell whether it is known where those that are missing stand now."""
    stacks = [view.by_rank[rank].stack for rank in missing if rank in view.by_rank]
    return any(places) or (len(stacks) == len(missing) and all(one and one.frames for one in stacks))


def _are_inside(
    view: SceneView, file: str, loop: tuple[int, int], missing: Sequence[int], places: Sequence[str | None]
) -> bool:
    """Tell whether one of those that are missing is still in the loop: then it has not left it."""
    lines = [place for place in places if place]
    for rank in missing:
        stack = view.by_rank[rank].stack if rank in view.by_rank else None
        lines += [str(frame) for frame in stack.frames if frame.is_users] if stack else []
    return any(name == file and loop[0] <= line <= loop[1] for name, line in map(split_site, lines))
