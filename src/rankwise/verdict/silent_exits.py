"""Who left with exit code 0 before another rank missed it: by the moment of its end, by what it had not done, or since it had closed its group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.group_sequences import find_sequences

if TYPE_CHECKING:
    from rankwise.evidence.reader.scene import Scene
    from rankwise.verdict.case import Case, RankEnd

#: A process that says nothing at its end, as by os._exit, is known to be gone only when it is reaped: so long after it
#: may be.
_REAPED_S = 2.0


def find_silent_exits(case: Case, felt: RankEnd | None) -> list[RankEnd]:
    """Return the ranks that ended with exit code 0 before another one missed them, the first of them first.

    Args:
        case: The attempt.
        felt: The rank that missed one; without it all count that ended with 0 by themselves.
    """
    limit = float("inf") if felt is None or felt.left_s is None else felt.left_s
    gone = [end for end in case.ranks if end.code == 0 and end.stopped_s is None and end is not felt]
    gone.sort(key=_through_s)
    in_time = [end for end in gone if _through_s(end) <= limit]
    silent = [end for end in gone if end.finished_s is None and end not in in_time]
    if felt is None or (in_time and not silent):
        return in_time
    closed = [end for end in gone if end not in in_time and has_closed(case, end.rank)]
    late = silent if in_time else [*silent, *closed]
    behind = [end for end in late if case.scene and _has_done_less(case.scene, end.rank, felt.rank)]
    return behind or in_time or [end for end in gone if end.ended_s <= limit + _REAPED_S] or closed


def has_closed(case: Case, rank: int) -> bool:
    """Tell whether a rank of a job on one node has destroyed its process group: others miss it from then on, whatever it does afterwards."""
    facts = case.scene.find(rank) if case.scene is not None and case.num_nodes == 1 else None
    return facts is not None and facts.evidence is not None and facts.evidence.has_left


def _through_s(end: RankEnd) -> float:
    return end.ended_s if end.finished_s is None else end.finished_s


def _has_done_less(scene: Scene, rank: int, felt: int) -> bool:
    """Tell whether the records show that a rank had not entered a collective that the other one had entered."""
    facts = scene.find(rank)
    if facts is None or facts.evidence is None:
        return False
    for sequence in find_sequences(scene):
        if rank not in sequence.ranks or felt not in sequence.ops:
            continue
        last = sequence.last_op(felt)
        # What C++ issued at the last may not have been read from a process that was gone at once.
        if last is not None and last.source == "python" and sequence.is_behind(rank, last.seq):
            return True
    return False
