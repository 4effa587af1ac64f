"""The cut of units into parts is the best of all cuts, and what fits nowhere is an error with the memory of every part."""

from __future__ import annotations

from itertools import combinations, combinations_with_replacement
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, strategies as st

from rankwise.base.errors import ModelError, UsageError
from rankwise.parallel.partition import balance, list_parts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Whole numbers, so that sums are exact whatever their order.
NUMBERS = st.integers(0, 50)


def list_cuts(num_units: int, parts: int, *, may_be_empty: bool) -> Iterator[list[int]]:
    if may_be_empty:
        yield from ([0, *rest] for rest in combinations_with_replacement(range(num_units + 1), parts - 1))
    else:
        yield from ([0, *rest] for rest in combinations(range(1, num_units), parts - 1))


def price(cut: Sequence[int], rows: Sequence[Sequence[int]]) -> list[int]:
    parts = list_parts(cut, len(rows[0]))
    return [sum(row[units.start : units.stop]) for row, units in zip(rows, parts, strict=True)]


def rank(cut: Sequence[int], rows: Sequence[Sequence[int]]) -> tuple[int, int]:
    prices = price(cut, rows)
    return max(prices), sum(one * one for one in prices)


@given(st.data(), st.booleans(), st.booleans())
def test_a_cut_is_the_best_of_all(data: st.DataObject, differs: bool, may_be_empty: bool) -> None:
    """Trying all cuts finds none whose costliest part is cheaper, nor, of these, one that is more even; also where parts differ in speed."""
    units = data.draw(st.lists(NUMBERS, min_size=1, max_size=8))
    parts = data.draw(st.integers(1, 4 if may_be_empty else min(4, len(units))))
    rows = [units] * parts
    if differs:
        rows = [data.draw(st.lists(NUMBERS, min_size=len(units), max_size=len(units))) for _ in range(parts)]
    cut = balance(rows if differs else units, parts, may_be_empty=may_be_empty)
    assert rank(cut, rows) == min(rank(one, rows) for one in list_cuts(len(units), parts, may_be_empty=may_be_empty))  # fmt: skip


@given(st.data(), st.booleans())
def test_a_cut_within_limits_is_the_best_of_those_that_fit(data: st.DataObject, may_be_empty: bool) -> None:
    """Of all cuts that fit it is the best; where none fits, the error says so."""
    units = data.draw(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=7))
    parts = data.draw(st.integers(1, 4 if may_be_empty else min(4, len(units))))
    limits = data.draw(st.lists(st.integers(0, 120), min_size=parts, max_size=parts))
    costs, sizes = [one for one, _ in units], [one for _, one in units]
    fitting = [
        cut
        for cut in list_cuts(len(units), parts, may_be_empty=may_be_empty)
        if all(held <= limit for held, limit in zip(price(cut, [sizes] * parts), limits, strict=True))
    ]
    if not fitting:
        with pytest.raises(ModelError, match="no cut"):
            balance(costs, parts, limits, sizes=sizes, may_be_empty=may_be_empty)
        return
    cut = balance(costs, parts, limits, sizes=sizes, may_be_empty=may_be_empty)
    assert cut in fitting
    assert rank(cut, [costs] * parts) == min(rank(one, [costs] * parts) for one in fitting)


@given(st.data())
def test_the_least_total_is_that_of_all_cuts(data: st.DataObject) -> None:
    """For parts of different speed that work one after the other; a part that is slow everywhere may stay empty."""
    num_units, parts = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    rows = [data.draw(st.lists(NUMBERS, min_size=num_units, max_size=num_units)) for _ in range(parts)]
    cut = balance(rows, parts, may_be_empty=True, total=True)
    assert sum(price(cut, rows)) == min(sum(price(one, rows)) for one in list_cuts(num_units, parts, may_be_empty=True))


def test_what_fits_nowhere_is_told_with_every_part() -> None:
    """The error has what each part would hold in the cut that comes closest, and its limit, under the caller's names."""
    with pytest.raises(ModelError) as caught:
        balance([1, 1, 1], 2, [2**30, 2**20], sizes=[2**29, 2**30, 2**21], names=["cuda:0", "cpu"])
    assert "cuda:0 1.5 GiB of 1.0 GiB (too much), cpu 2.0 MiB of 1.0 MiB (too much)" in caught.value.message


def test_stages_that_hold_more_micro_batches_get_fewer_units() -> None:
    """A row of sizes for each part: of four equal units the first of two stages, which holds activations twice, takes one."""
    state, activations = 10, 10
    sizes = [[state + activations * in_flight] * 4 for in_flight in (2, 1)]
    assert balance([1] * 4, 2) == [0, 2]
    assert balance([1] * 4, 2, [60, 60], sizes=sizes) == [0, 2]
    assert balance([1] * 4, 2, [59, 60], sizes=sizes) == [0, 1]


def test_fewer_units_than_parts_are_refused() -> None:
    """The error has both numbers."""
    with pytest.raises(UsageError, match="2 units can't be cut into 3 parts"):
        balance([1, 2], 3)


def test_many_units_are_cut_at_once() -> None:
    """A thousand layers over 64 parts: exact, and within the time of a test."""
    begins = balance([1 + (unit * 7919) % 13 for unit in range(1000)], 64)
    assert len(begins) == 64
    assert begins == sorted(set(begins))
