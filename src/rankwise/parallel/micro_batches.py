"""Deals a step's micro-batches out to its loop, so that the last backward exchanges the gradients of all."""

from __future__ import annotations

from collections.abc import Sized
from itertools import repeat
from typing import TYPE_CHECKING, TypeVar

from rankwise.base.errors import CollectiveError, UsageError
from rankwise.runtime.context import current, find_current
from rankwise.runtime.signature import locate, show_site

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rankwise.parallel.strategy import Strategy
    from rankwise.runtime.context import RankContext

Micro = TypeVar("Micro")


def deal(strategy: Strategy, micro_batches: Iterable[Micro], ctx: RankContext | None) -> Iterator[Micro]:
    """Yield micro-batches; all but the last in the strategy's ``deferring()``.

    Raises:
        UsageError: There is no micro-batch.
        CollectiveError: Every forward is a collective, and the ranks have different numbers of micro-batches.
    """
    ctx = ctx or find_current()
    rank = None if ctx is None else ctx.rank
    length = len(micro_batches) if isinstance(micro_batches, Sized) else None
    # A loader's step has as many on every rank by its plan: no need to ask them at each step.
    is_planned = getattr(micro_batches, "as_many_on_every_rank", False)
    if strategy.needs_equal_numbers and length is not None and not is_planned:
        _compare_numbers(strategy, length, ctx or current())
    number, is_last = 0, False
    try:
        for micro, ends in (
            _mark_end(micro_batches) if length is None else zip(micro_batches, repeat(False))  # noqa: FBT003 - what is repeated
        ):
            number += 1
            is_last = ends or number == length
            if is_last:
                yield micro
                strategy.settle()
                return
            # Around forward and backward: DDP decides in the forward whether the backward will average.
            with strategy.deferring():
                yield micro
    except GeneratorExit:
        # The loop was left. What was accumulated is this rank's own, and would go into a step as if it were the average.
        if not is_last:
            strategy.note_left(number)
        raise
    if number == 0:
        raise UsageError(
            "accumulate() got no micro-batch, and the other ranks would wait for this one",
            rank=rank,
            hint="a rank without samples passes one empty micro-batch: [(inputs[:0], targets[:0])]",
        )
    raise UsageError(
        f"accumulate() got {number} micro-batches of a container whose len() is {length}",
        rank=rank,
        hint="pass an iterator, whose length is not checked",
    )


def _mark_end(source: Iterable[Micro]) -> Iterator[tuple[Micro, bool]]:
    """Yield each with whether it is the last, which is known when the next one was asked for."""
    held: list[Micro] = []
    for micro in source:
        if held:
            yield held.pop(), False
        held.append(micro)
    if held:
        yield held.pop(), True


def _compare_numbers(strategy: Strategy, number: int, ctx: RankContext) -> None:
    answers = ctx.control.compare(
        f"micro-batches\t{number}", what=f"accumulate at {show_site(locate())} (how many micro-batches?)"
    )
    if answers is not None:
        held = ", ".join(
            f"rank {rank} {text.partition(chr(9))[2]}"
            for rank, text in zip(ctx.control.ranks, answers, strict=True)
        )
        raise CollectiveError(
            f"with {strategy.why_equal} every rank must run the same number of micro-batches: {held}",
            rank=ctx.rank,
            hint="pass empty ones on the ranks that have fewer: (inputs[:0], targets[:0])",
        )
