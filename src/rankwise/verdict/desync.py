"""Walk back from where ranks can't go on to where they parted: before it, other collectives may have been paired by chance.

A rank that makes a barrier of its own meets the next one of the others, and nobody notices; what can't be paired comes later,
at a line that is right. So from a difference that is proved one goes back for as long as the same ranks stood at other
lines under equal numbers. Other lines alone are no fault, as ranks may branch: something must show who left the common path.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.verdict.group_sequences import find_family
from rankwise.verdict.mismatch import Mismatch
from rankwise.verdict.wording import is_join, name_op, shorten

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rankwise.evidence.reader.scene import Op
    from rankwise.verdict.group_sequences import GroupSequence
    from rankwise.verdict.user_source import UserSource

#: A rank that makes more collectives than this alone is not found out by comparing what follows.
_MOST_EXTRA = 32
#: Nor is one looked for that parted longer ago: whoever does all by lines of its own is on no wrong path.
_MOST_BACK = 64
_Sides = tuple[tuple[int, ...], tuple[int, ...]]


def walk_back(
    mismatches: Sequence[Mismatch],
    breaches: Iterable[tuple[GroupSequence, tuple[Op, tuple[int, ...], tuple[int, ...]] | None]],
    source: UserSource,
) -> tuple[Mismatch, ...]:
    """Return the mismatches, those that had begun before at their beginning; and those that only a member's end has shown."""
    found = [_begin(mismatch, source) or mismatch for mismatch in mismatches]
    for sequence, breach in breaches:
        if breach is not None and (begun := _begin_of_breach(sequence, *breach, source)):
            found.append(begun)
    return tuple(found)


def _begin(mismatch: Mismatch, source: UserSource) -> Mismatch | None:
    if mismatch.respect in {"shape", "order", "bucket", "module"} or len(mismatch.sides) != 2:
        return None
    sides = (mismatch.sides[0][0], mismatch.sides[1][0])
    if {*sides[0], *sides[1]} != {*mismatch.sequence.ranks}:
        return None
    later = " and ".join(name_op(op, number=False) for _, op in mismatch.sides)
    then = f"; these were paired, and at #{mismatch.seq} {later} can't be"
    begun = _find_begin(mismatch.sequence, sides, mismatch.seq, source)
    return begun and replace(begun, is_through=mismatch.is_through, then=then)


def _begin_of_breach(
    sequence: GroupSequence, op: Op, came: tuple[int, ...], gone: tuple[int, ...], source: UserSource
) -> Mismatch | None:
    begun = _find_begin(sequence, (came, gone), op.seq, source)
    then = f"; these were paired, and {name_op(op)} at {shorten(op.site)} has no counterpart: the others have ended"
    return begun and replace(begun, then=then)


def _find_begin(sequence: GroupSequence, sides: _Sides, last: int, source: UserSource) -> Mismatch | None:
    first, seq = last, last - 1
    while last - seq <= _MOST_BACK and first - seq <= 2 and (pair := _pair(sequence, sides, seq)):
        # One number at which they meet at a line by chance is no common path yet.
        first = seq if _are_apart(*pair, source) else first
        seq -= 1
    if first == last:
        return None
    for seq in range(first, last):
        pair = _pair(sequence, sides, seq)
        if (
            pair is not None
            and _are_apart(*pair, source)
            and (shown := _show(sequence, sides, seq, last, pair, source)) is not None
        ):
            ordered = sorted(zip(sides, pair, strict=True), key=lambda side: (len(side[0]), side[0]))
            is_even = len(sides[0]) == len(sides[1])
            return Mismatch(
                sequence=sequence, seq=seq, respect="line", sides=tuple(ordered), is_through=False, later=last, blamed=shown if is_even else (),
            )  # fmt: skip
    return None


def _pair(sequence: GroupSequence, sides: _Sides, seq: int) -> tuple[Op, Op] | None:
    """Return what each side did under a number, if it is known of all ranks and those of a side did the same."""
    pair = []
    for ranks in sides:
        ops = [sequence.ops.get(rank, {}).get(seq) for rank in ranks]
        if ops[0] is None or any(op is None or op.site != ops[0].site for op in ops):
            return None
        pair.append(ops[0])
    return pair[0], pair[1]


def _are_apart(one: Op, other: Op, source: UserSource) -> bool:
    """Tell whether two ranks stood at different places, which are not one place written twice."""
    if one.site is None or other.site is None or one.site == other.site or is_join(one) or is_join(other):
        return False
    return not source.are_alternatives(one.site, other.site)


def _were_at(sequence: GroupSequence, ranks: tuple[int, ...], op: Op, before: int) -> list[bool]:
    """Tell of the first and the last rank of a side, which stand for all, whether they made a collective from a line before."""
    return [sequence.has_been_at(rank, op.site, before) for rank in {ranks[0], ranks[-1]}]


def _show(
    sequence: GroupSequence, sides: _Sides, seq: int, last: int, pair: tuple[Op, Op], source: UserSource
) -> tuple[int, ...] | None:
    """Return who left the common path under a number, nobody in particular if that is not known; None if nothing shows that one did."""
    tests = [
        {guard for guard in source.guards_where(ranks[0], op.site) if guard.is_rank_test}
        for ranks, op in zip(sides, pair, strict=True)
    ]
    guarded = [
        ranks
        for ranks, own, others, op in zip(sides, tests, reversed(tests), pair, strict=True)
        if own - others and not any(_were_at(sequence, ranks, op, seq))
    ]
    if len(guarded) == 1:
        return guarded[0]
    if len(guarded) == 2:
        return None  # each has a test of its own: "rank 0 first", and the others after it
    extra = _find_extra(sequence, sides, seq, last)
    if extra is not None:
        more, less = sides[extra], sides[1 - extra]
        return less if all(_were_at(sequence, less, pair[extra], seq)) else more
    # One side is where all have been, and the other where none has: it has left the loop, or taken another way.
    known = [[one for ranks in sides for one in _were_at(sequence, ranks, op, seq)] for op in pair]
    is_shown = (all(known[0]) and not any(known[1])) or (all(known[1]) and not any(known[0]))
    return () if is_shown else None


def _find_extra(sequence: GroupSequence, sides: _Sides, seq: int, last: int) -> int | None:
    """Return which side made collectives of its own, after which it does what the other did at once; None if neither, or both may have."""
    ops = [sequence.ops[ranks[0]] for ranks in sides]
    found = {
        more
        for more in (0, 1)
        for shift in range(1, min(_MOST_EXTRA, last - seq) + 1)
        if _is_shifted(ops[more], ops[1 - more], range(seq, last + 1 - shift), shift)
    }
    return found.pop() if len(found) == 1 else None


def _is_shifted(more: Mapping[int, Op], less: Mapping[int, Op], numbers: range, shift: int) -> bool:
    is_known = False
    for number in numbers:
        one, other = more.get(number + shift), less.get(number)
        if one is None or other is None:
            continue
        if not _is_alike(one, other):
            return False
        is_known = True
    return is_known


def _is_alike(one: Op, other: Op) -> bool:
    return one.site == other.site and find_family(one) == find_family(other) and one.num_elements == other.num_elements
