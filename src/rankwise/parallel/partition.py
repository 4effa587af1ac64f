"""Cut a row of units into consecutive parts, one for each device, so that the slowest part is as fast as can be.

This is the linear partition problem, solved exactly by dynamic programming over (part, where it ends). Numbers only: what a unit is,
and what it costs, is measured by ``costs.py``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING

from rankwise.base.errors import ModelError, UsageError
from rankwise.parallel.memory import show_size

if TYPE_CHECKING:
    #: One number for each unit; or, where parts differ, one such row for each part.
    Rows = Sequence[float] | Sequence[Sequence[float]]


def balance(
    costs: Rows,
    parts: int,
    limits: Sequence[float] | None = None,
    *,
    sizes: Rows | None = None,
    names: Sequence[str] | None = None,
    may_be_empty: bool = False,
    total: bool = False,
) -> list[int]:
    """Return where each part begins, so that the costliest part costs as little as possible.

    Of several such cuts it is the one whose parts are most even: with the least sum of squares.

    Args:
        costs: Time of each unit, 0 or more, in any unit of measure; or a row of them for each part, where devices
            differ in speed.
        parts: How many parts.
        limits: Bytes that each part may hold.
        sizes: Bytes that each unit holds; or a row of them for each part.
        names: Of the parts, for errors; None: "part 0" and so on.
        may_be_empty: Whether a part may hold no unit, such as a slow device that is not needed.
        total: Let the sum over all parts be the least instead, for parts of different speed that work one after the
            other.

    Returns:
        ``parts`` indices, the first one 0: part p holds the units from its index up to that of part p + 1.

    Raises:
        UsageError: Fewer units than parts.
        ModelError: Within the limits there is no cut; names what each part would hold.
    """
    rows = _make_rows(costs, parts)
    num_units, least = len(rows[0]), 0 if may_be_empty else 1
    if num_units < parts * least:
        raise UsageError(
            f"{num_units} units can't be cut into {parts} parts",
            hint="ask for at most as many parts as there are units",
        )
    price, limits = _sum_ranges(rows), limits or [inf] * parts
    held = price if sizes is None else _sum_ranges(_make_rows(sizes, parts))

    def weigh(part: int, begin: int, end: int) -> float:
        return inf if held(part, begin, end) > limits[part] else price(part, begin, end)

    worst, begins = _solve(weigh, num_units, parts, operator.add if total else max, least)
    if worst == inf:
        raise _complain(held, limits, num_units, names, least)
    if total:
        return begins

    def square(part: int, begin: int, end: int) -> float:
        own = weigh(part, begin, end)
        return own * own if own <= worst else inf

    return _solve(square, num_units, parts, operator.add, least)[1]


def list_parts(begins: Sequence[int], num_units: int) -> list[range]:
    """Return the units of each part, from where the parts begin."""
    return [range(one, end) for one, end in zip(begins, [*begins[1:], num_units], strict=True)]


def _solve(
    weigh: Callable[[int, int, int], float],
    num_units: int,
    num_parts: int,
    add: Callable[[float, float], float],
    least: int,
) -> tuple[float, list[int]]:
    """Return the least total of all cuts, and the cut; ``weigh`` grows with its range, and ``add`` with both numbers."""
    best, chosen = [0.0, *[inf] * num_units], list[list[int]]()
    for part in range(num_parts):
        reached, begin_of = [inf] * (num_units + 1), [0] * (num_units + 1)
        for end in range((part + 1) * least, num_units - (num_parts - 1 - part) * least + 1):
            for begin in range(end - least, -1, -1):
                own = weigh(part, begin, end)
                if own >= reached[end]:
                    break  # what begins earlier is no lighter
                total = add(best[begin], own)
                if total < reached[end]:
                    reached[end], begin_of[end] = total, begin
        best = reached
        chosen.append(begin_of)
    end, begins = num_units, list[int]()
    for begin_of in reversed(chosen):
        end = begin_of[end]
        begins.append(end)
    return best[num_units], begins[::-1]


def _make_rows(values: Rows, parts: int) -> Sequence[Sequence[float]]:
    is_each = values and isinstance(values[0], Sequence)
    return values if is_each else [values] * parts  # type: ignore[return-value, list-item]


def _sum_ranges(rows: Sequence[Sequence[float]]) -> Callable[[int, int, int], float]:
    sums = [list(accumulate(row, initial=0)) for row in rows]
    # Rounding must not make a sum of nothing but zeros negative.
    return lambda part, begin, end: max(0, sums[part][end] - sums[part][begin])


def _complain(
    held: Callable[[int, int, int], float],
    limits: Sequence[float],
    num_units: int,
    names: Sequence[str] | None,
    least: int,
) -> ModelError:
    """Return the error that shows the cut which comes closest: its largest lack of memory is the smallest."""
    _, begins = _solve(
        lambda part, *units: max(0, held(part, *units) - limits[part]), num_units, len(limits), max, least
    )
    lines = []
    for part, units in enumerate(list_parts(begins, num_units)):
        name = names[part] if names is not None else f"part {part}"
        size = held(part, units.start, units.stop)
        lines.append(
            f"{name} {show_size(int(size))} of {'any size' if limits[part] == inf else show_size(int(limits[part]))}{'' if size <= limits[part] else ' (too much)'}"
        )
    return ModelError(
        f"no cut of {num_units} units fits into the memory of {len(limits)} parts; the closest needs: {', '.join(lines)}",
        hint="more parts, smaller micro-batches, activation checkpointing, or an optimizer with fewer states",
    )
