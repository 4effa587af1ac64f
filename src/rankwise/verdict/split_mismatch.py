"""What each rank gives to each other against what that one expects, in collectives and in messages: where the two differ, and whose lists are odd."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from rankwise.evidence.in_rank.flight_recorder import TYPES

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from rankwise.evidence.reader.scene import Op, Scene

_BITS = re.compile(r"(?<=[a-z])(8|16|32|64|128)(?=_|$)")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SplitMismatch:
    """Two ranks, or a rank with itself, that do not agree how much goes from one to the other.

    Attributes:
        giver: Who gives.
        getter: Who gets.
        given: How many elements are given.
        expected: How many the other one expects.
    """

    giver: int
    getter: int
    given: int
    expected: int


def is_uneven(op: Op) -> bool:
    """Tell whether a rank gives or gets more to or from one member than to or from another."""
    return len({*op.gives, *op.gets}) > 1


def find_split_mismatches(members: tuple[int, ...], ops: Mapping[int, Op]) -> tuple[SplitMismatch, ...]:
    """Return all pairs of a group's members that do not agree under one number, as far as both sides are known."""
    known = {
        rank: op for rank, op in ops.items() if len(op.gives) == len(op.gets) == len(members) and rank in members
    }  # fmt: skip
    lists = {(op.gives, op.gets) for op in known.values()}
    if len(lists) == 1 and not any(map(is_uneven, known.values())):
        return ()
    places = {rank: place for place, rank in enumerate(members)}
    return tuple(
        SplitMismatch(giver=giver, getter=getter, given=given, expected=expected)
        for giver, op in known.items()
        for getter, other in known.items()
        if (given := op.gives[places[getter]]) != (expected := other.gets[places[giver]])
    )


def find_odd(mismatches: Collection[SplitMismatch], ops: Mapping[int, Op]) -> tuple[int, ...]:
    """Return the ranks whose lists explain all misfits; both of a pair where nothing tells which one of them is wrong."""
    # Who does not agree with itself is wrong, whatever the others say.
    odd = {one.giver for one in mismatches if one.giver == one.getter}
    rest = _leave_out(mismatches, odd)
    while rest:
        counts = Counter(rank for one in rest for rank in {one.giver, one.getter})
        most = max(counts.values())
        found = {rank for rank, count in counts.items() if count == most}
        if len(found) > 1:
            found = _find_unlike(found, ops)
        odd |= found
        rest = _leave_out(rest, found)
    return tuple(sorted(odd))


def _leave_out(mismatches: Collection[SplitMismatch], ranks: Collection[int]) -> list[SplitMismatch]:
    return [one for one in mismatches if one.giver not in ranks and one.getter not in ranks]


def _find_unlike(ranks: set[int], ops: Mapping[int, Op]) -> set[int]:
    """Return those of some ranks whose lists are not what more than half of all have; all where there is no such list."""
    lists, num = Counter((op.gives, op.gets) for op in ops.values()).most_common(1)[0]
    unlike = {rank for rank in ranks if (ops[rank].gives, ops[rank].gets) != lists}
    return unlike if num * 2 > len(ops) and unlike else ranks


def find_message_mismatch(
    scene: Scene, getter: int, given_bytes: int, expected_bytes: int
) -> tuple[int, Op, Op] | None:
    """Return the message that a rank could not take: who gave it, as what, and what the rank expected.

    Returns:
        None if no two messages have these sizes, or if two ranks may have given it.
    """
    facts = scene.find(getter)
    expected = [
        op
        for op in (facts.ops if facts is not None else ())
        if op.is_message and not op.is_send and size_in_bytes(op) == expected_bytes
    ]
    found: dict[int, tuple[int, Op, Op]] = {}
    for giver in scene.ranks:
        for sent in giver.ops:
            if not sent.is_send or sent.peer != getter or size_in_bytes(sent) != given_bytes:
                continue
            # With tags, messages need not meet in their order: only that of the same number is preferred.
            for awaited in sorted(expected, key=lambda op: (op.seq == sent.seq, op.seq)):
                if awaited.peer in {giver.rank, -1}:
                    found[giver.rank] = (giver.rank, sent, awaited)
    return next(iter(found.values())) if len(found) == 1 else None


def size_in_bytes(op: Op) -> int | None:
    """Return how much a rank gives or gets in an operation; None if its tensors are not known, or are of several types."""
    size = find_item_size(op.dtypes[0]) if len({*op.dtypes}) == 1 else None
    return None if size is None or op.num_elements is None else size * op.num_elements


def clean_dtype(dtype: str) -> str:
    """Return a type by Python's name of it; those that carry the same bytes by one."""
    name = dtype.lower().removeprefix("torch.")
    return "uint8" if name == "bool" else TYPES.get(name, name)


def find_item_size(dtype: str) -> int | None:
    """Return the bytes of one element; None if they are not known."""
    bits = _BITS.search(clean_dtype(dtype))
    return int(bits[0]) // 8 if bits else None
