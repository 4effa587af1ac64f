"""Where the ranks of a group diverged under the same number.

Only what the operation demands to be equal is compared. Different lines of one operation are nothing: ranks may branch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, final

from rankwise.verdict.group_sequences import find_family
from rankwise.verdict.split_mismatch import (
    clean_dtype,
    find_item_size,
    find_odd,
    find_split_mismatches,
    is_uneven,
)
from rankwise.verdict.wording import is_gradient, is_join, is_of_shards, is_wrapping, name_op

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.evidence.reader.scene import Op
    from rankwise.verdict.group_sequences import GroupSequence

#: In which respect; the first one that holds is the one that is told.
Respect = Literal[
    "op", "module", "root", "reduce op", "size", "dtype", "shape", "order", "bucket", "model check", "line",
    "splits",
]  # fmt: skip

#: Ranks that agree with each other, with what the first of them did.
Sides = tuple[tuple[tuple[int, ...], "Op"], ...]
_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
_REDUCING = frozenset({"all_reduce", "reduce", "reduce_scatter"})
#: All ranks give, or get, tensors of one size; with Gloo more of them than with NCCL.
_EQUAL_SIZES = frozenset({"all_reduce", "reduce", "broadcast"})
_EQUAL_SIZES_GLOO = frozenset({"all_gather", "gather", "reduce_scatter"})
#: Behind two collectives that were swapped, this far is looked whether the ranks are in step.
_MOST_SWAPPED = 16


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """One number of one group under which its ranks differ.

    Attributes:
        respect: In what.
        sides: The ranks that agree with each other, with what the first of them did; the smallest side first.
        is_through: Whether all of them came out of it: what they hold now is wrong, and they went on.
        later: The number under which it came out, where they had parted before (``verdict.desync``).
        blamed: Who deviates, where more is known of it than who is the minority.
        then: What came of it under the later number, as a clause.
    """

    sequence: GroupSequence
    seq: int
    respect: Respect
    sides: Sides
    is_through: bool
    later: int | None = None
    blamed: tuple[int, ...] = ()
    then: str = ""

    @property
    def key(self) -> str:
        """What is equal for the same mismatch at a later moment, also if more was seen of its beginning by then."""
        return f"mismatch {self.sequence.key} #{self.later or self.seq}"

    @property
    def culprits(self) -> tuple[int, ...]:
        """Those who deviate from the most; where there is no most, all."""
        if self.blamed:
            return self.blamed
        sizes = sorted(len(ranks) for ranks, _ in self.sides)
        if sizes[-1] == sizes[-2] or (self.sequence.ranks and sizes[-1] * 2 <= sum(sizes)):
            return tuple(sorted(rank for ranks, _ in self.sides for rank in ranks))
        return tuple(sorted(rank for ranks, _ in self.sides[:-1] for rank in ranks))

    @property
    def may_be_two(self) -> bool:
        """Whether, by what differs, they may be two collectives where one was due."""
        return self.respect in {"op", "size", "dtype"}

    def split(self, test: Callable[[Op], bool]) -> tuple[Sides, Sides]:
        """Return the sides whose collective is of a kind, and the others."""
        chosen = tuple(side for side in self.sides if test(side[1]))
        return chosen, tuple(side for side in self.sides if side not in chosen)

    def find_next(self, rank: int) -> Op | None:
        """Return what a rank made under the number after this one; None if it is not known."""
        return self.sequence.ops[rank].get(self.seq + 1)

    @property
    def moment_s(self) -> float:
        """When the first of them entered it; later than all others if unknown."""
        known = [op.entered_s for _, op in self.sides if op.entered_s is not None]
        return min(known, default=float("inf"))


def find_mismatches(sequences: Sequence[GroupSequence]) -> tuple[Mismatch, ...]:
    """Return the first mismatch of each group that can't have gone well, and the first silent one before it."""
    found: list[Mismatch] = []
    for sequence in sequences:
        loud: Mismatch | None = None
        silent: Mismatch | None = None
        module: Mismatch | None = None
        for seq in _shared_numbers(sequence):
            mismatch = _compare(sequence, seq)
            if mismatch is None:
                continue
            if mismatch.respect == "module":
                module = module or mismatch
            elif mismatch.respect in {"shape", "order", "bucket"}:
                silent = silent or mismatch
            else:
                loud = mismatch
                break
        loud = loud if module is None else _begin_with(module, loud)
        found += [one for one in (silent, loud) if one is not None]
    return tuple(found)


def _begin_with(module: Mismatch, loud: Mismatch | None) -> Mismatch:
    """Return where ranks were at different modules of FSDP for the first time, with what came of it."""
    if loud is None:
        return module
    later = " and ".join(name_op(op, number=False) for _, op in loud.sides)
    then = f"; these were paired, with wrong values, and at #{loud.seq} {later} can't be"
    return replace(module, later=loud.seq, is_through=loud.is_through, then=then)


def _shared_numbers(sequence: GroupSequence) -> list[int]:
    if len({sequence.lives.get(rank, 0) for rank in sequence.ops}) > 1:
        return []  # the group was made anew, and not all are that far
    counts: dict[int, int] = {}
    for known in sequence.ops.values():
        for seq in known:
            counts[seq] = counts.get(seq, 0) + 1
    return sorted(seq for seq, count in counts.items() if count > 1)


def _compare(sequence: GroupSequence, seq: int) -> Mismatch | None:
    ops = {rank: known[seq] for rank, known in sequence.ops.items() if seq in known}
    first = next(iter(ops.values()))
    if all(_is_same(op, first) for op in ops.values()) and not is_uneven(first):
        return None
    if any(find_family(op) is None for op in ops.values()) or _is_ncclls_barrier(sequence, ops):
        return None
    respects: tuple[tuple[Respect, Callable[[Op], object]], ...] = (
        ("op", find_family),
        ("module", lambda op: _find_module(sequence, op)),
        ("root", lambda op: op.root if find_family(op) in _ROOTED else None),
        ("reduce op", _find_reduce_op),
        ("size", lambda op: _find_size(sequence, op)),
        ("dtype", _find_dtype),
        ("shape", _find_layout),
    )
    for respect, find in respects:
        if sides := _split(ops, find):
            return _make(sequence, seq, respect, sides, ops)
    return _compare_splits(sequence, seq, ops) or _compare_purposes(sequence, seq, ops)


def _compare_splits(sequence: GroupSequence, seq: int, ops: dict[int, Op]) -> Mismatch | None:
    odd = find_odd(find_split_mismatches(sequence.ranks, ops), ops)
    if not odd:
        return None
    sides: dict[object, list[int]] = {}
    for rank in ops:
        sides.setdefault(rank if rank in odd else "others", []).append(rank)
    return replace(_make(sequence, seq, "splits", sides, ops), blamed=odd)


def _compare_purposes(sequence: GroupSequence, seq: int, ops: dict[int, Op]) -> Mismatch | None:
    """Return where collectives that could be one are known to be two."""
    if (is_checked := _is_model_check_met(ops)) or _is_bucket_met(ops):
        met: Respect = "model check" if is_checked else "bucket"
        return _make(sequence, seq, met, _split(ops, is_wrapping if is_checked else is_gradient), ops)
    if sides := _split_swapped(sequence, seq, ops):
        return _make(sequence, seq, "order", sides, ops)
    return None


def _is_same(op: Op, other: Op) -> bool:
    return (
        op.name == other.name
        and op.site == other.site
        and op.shapes == other.shapes
        and op.dtypes == other.dtypes
        and op.root == other.root
        and op.reduce_op == other.reduce_op
        and op.gives == other.gives
        and op.gets == other.gets
        and op.source == other.source
        and op.module == other.module
    )


def _split(ops: dict[int, Op], find: Callable[[Op], object]) -> dict[object, list[int]]:
    """Return the ranks by what is found; nothing if they agree as far as that is known."""
    sides: dict[object, list[int]] = {}
    for rank, op in ops.items():
        value = find(op)
        if value is not None:
            sides.setdefault(value, []).append(rank)
    return sides if len(sides) > 1 else {}


def _make(
    sequence: GroupSequence, seq: int, respect: Respect, sides: dict[object, list[int]], ops: dict[int, Op]
) -> Mismatch:
    ordered = sorted(sides.values(), key=lambda ranks: (len(ranks), ranks))
    return Mismatch(
        sequence=sequence,
        seq=seq,
        respect=respect,
        sides=tuple((tuple(sorted(ranks)), ops[min(ranks)]) for ranks in ordered),
        is_through=_is_silent(respect, ops) or all(op.is_over and not op.has_raised for op in ops.values()),
    )


def _is_silent(respect: Respect, ops: dict[int, Op]) -> bool:
    """Tell whether the backend pairs these without a word."""
    if respect == "dtype":
        return len({tuple(map(find_item_size, op.dtypes)) for op in ops.values()}) == 1
    return respect in {"shape", "order", "bucket", "reduce op"}


def _is_ncclls_barrier(sequence: GroupSequence, ops: dict[int, Op]) -> bool:
    """NCCL's barrier is an all_reduce inside, and which of the two names is recorded depends on who tells."""
    families = {find_family(op) for op in ops.values()}
    return families == {"barrier", "all_reduce"} and not sequence.is_gloo


def _find_module(sequence: GroupSequence, op: Op) -> str | None:
    """Return the module that FSDP makes it for, if all ranks know one by that name: one may have wrapped its model in another."""
    if not is_of_shards(op):
        return None
    known = ({one.module for one in ops.values() if is_of_shards(one)} for ops in sequence.ops.values())
    return op.module if all(op.module in names for names in known) else None


def _find_reduce_op(op: Op) -> str | None:
    return op.reduce_op.lower().rpartition(".")[2] if op.reduce_op and find_family(op) in _REDUCING else None


def _find_size(sequence: GroupSequence, op: Op) -> int | None:
    family = find_family(op)
    demands = family in _EQUAL_SIZES or (sequence.is_gloo and family in _EQUAL_SIZES_GLOO)
    return op.num_elements if demands else None


def _find_dtype(op: Op) -> tuple[str, ...] | None:
    family = find_family(op)
    if family not in _EQUAL_SIZES | _EQUAL_SIZES_GLOO or not op.dtypes:
        return None
    return tuple(dict.fromkeys(clean_dtype(dtype) for dtype in op.dtypes))


def _find_layout(op: Op) -> tuple[tuple[int, ...], ...] | None:
    """Return shapes that can't be another's view: a scalar is as good as one element, and a flat tensor as any."""
    if find_family(op) not in _EQUAL_SIZES or len(op.shapes) != 1:
        return None
    clean = tuple(tuple(length for length in shape if length != 1) for shape in op.shapes)
    return clean if all(len(shape) > 1 for shape in clean) else None


def _is_model_check_met(ops: dict[int, Op]) -> bool:
    """Tell whether some ranks compared their models in DDP's constructor, and others are known to have done something else."""
    others = [op for op in ops.values() if not is_wrapping(op)]
    return 0 < len(others) < len(ops) and all(op.site and (op.source == "python" or op.inside) for op in others)


def _is_bucket_met(ops: dict[int, Op]) -> bool:
    """Tell whether the gradients of some ranks were summed with what others reduce by a line of their own."""
    if any(is_join(op) for op in ops.values()):
        return False
    direct = [
        op for op in ops.values()
        if op.source == "python" and op.site and find_family(op) == "all_reduce" and set(op.inside) <= {"all_reduce", "wrapper"}
    ]  # fmt: skip
    gradients = [op for op in ops.values() if is_gradient(op)]
    return bool(direct and gradients) and len(direct) + len(gradients) == len(ops)


def _split_swapped(sequence: GroupSequence, seq: int, ops: dict[int, Op]) -> dict[object, list[int]]:
    """Return the ranks by their line, where two of them used two lines in opposite order under numbers next to each other."""
    sides = _split(ops, lambda op: op.site)
    if len(sides) != 2:
        return {}
    (here, first), (there, second) = sides.items()
    one, other = min(first), min(second)
    following, crossed = sequence.ops[one].get(seq + 1), sequence.ops[other].get(seq + 1)
    if following is None or crossed is None or following.site != there or crossed.site != here:
        return {}
    if not is_swap(sequence, seq, one, other):
        return {}
    met = [*ops.values(), following, crossed]
    # Barriers carry nothing that could be exchanged, and Join's ranks make up for others.
    is_harmless = find_family(met[0]) == "barrier" or any(is_join(op) for op in met)
    return {} if is_harmless or find_family(following) != find_family(crossed) else sides


def is_swap(sequence: GroupSequence, seq: int, one: int, other: int) -> bool:
    """Tell whether two ranks are in step again behind two collectives that they made crosswise.

    One that made a collective more does what the other did, one number later: that looks the same for as long as two
        lines take turns.
    """
    mine, theirs = sequence.ops[one], sequence.ops[other]
    if seq - 1 in mine and seq - 1 in theirs and mine[seq - 1].site != theirs[seq - 1].site:
        return False  # they were out of step before
    shifts = [(mine, theirs), (theirs, mine)]
    last = max(*mine, *theirs)
    for number in range(seq + 2, min(seq + _MOST_SWAPPED, last) + 1):
        here, there = mine.get(number), theirs.get(number)
        if here is None or there is None:
            return False  # not known yet
        if here.site != there.site:
            return _are_new(sequence, seq, one, other) and _crosses(mine, theirs, number)
        shifts = [
            (more, less)
            for more, less in shifts
            if number - 1 not in less or more[number].site == less[number - 1].site
        ]
        if not shifts:
            return True
    return last < seq + 2


def _are_new(sequence: GroupSequence, seq: int, one: int, other: int) -> bool:
    """Tell whether both lines of two ranks are at their first turn: neither rank has made one of them before."""
    sites = {sequence.ops[one][seq].site, sequence.ops[other][seq].site}
    before = [op for rank in (one, other) for number, op in sequence.ops[rank].items() if number < seq]
    return all(map(sequence.remembers_all, (one, other))) and not any(op.site in sites for op in before)


def _crosses(mine: dict[int, Op], theirs: dict[int, Op], number: int) -> bool:
    """Tell whether two ranks use two lines crosswise under a number and the next one."""
    following, crossed = mine.get(number + 1), theirs.get(number + 1)
    return (
        following is not None
        and crossed is not None
        and following.site == theirs[number].site
        and crossed.site == mine[number].site
    )
