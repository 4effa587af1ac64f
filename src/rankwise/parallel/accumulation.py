"""Gradients of several micro-batches, averaged over the ranks once, and weighed as if there were one process.

    scale = loss_scale(num_samples)                     # of this rank, in all micro-batches of the step
    for inputs, targets in accumulate(ddp, micro_batches):
        loss = cross_entropy(ddp(inputs), targets, reduction="sum")
        (loss * scale).backward()
    optimizer.step()

DDP averages over ranks, and a mean-reduced loss over the samples of one micro-batch: where these numbers differ, the
mean of the means is not the mean. A sum-reduced loss times ``loss_scale`` is exact, for any split.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeVar

from rankwise.base.errors import UsageError
from rankwise.base.rank_names import name_ranks
from rankwise.parallel.strategy import deal
from rankwise.parallel.strategy_lookup import strategy_of
from rankwise.runtime.context import RankContext, current
from rankwise.runtime.groups import group_of
from rankwise.runtime.signature import agree, locate

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn


Micro = TypeVar("Micro")


def accumulate(model: nn.Module, micro_batches: Iterable[Micro], *, ctx: RankContext | None = None) -> Iterator[Micro]:
    """Yield micro-batches; the backward of the last one averages the gradients of all, the others send nothing.

    Forward and backward of each micro-batch belong in the loop's body, and the optimizer's step after it. Ranks
    may have different numbers of micro-batches, unless BatchNorm is synced or parameters are sharded. A rank without
    samples passes one empty micro-batch (``inputs[:0]``), so that it has a backward too.

    With ``find_unused_parameters=True``, a parameter that no rank uses in its last micro-batch is not averaged
    (pytorch#69031).

    Args:
        model: The spread model: what an ``apply_*`` has returned, or torch's own DistributedDataParallel or
            ``fully_shard``.
        micro_batches: The micro-batches of one step, at least one.
        ctx: The job; None: the one that ``init()`` joined.

    Yields:
        Each micro-batch.

    Raises:
        UsageError: There is no micro-batch, or the model is a pipeline.
        CollectiveError: BatchNorm is synced, and the ranks have different numbers of micro-batches.

    Collective: every rank, once for each step. The body's last backward is the collective; if BatchNorm is synced,
    the start and each forward and backward as well.
    """
    strategy = strategy_of(model, ctx)
    if strategy.instead_of_loops is not None:
        raise UsageError(
            f"accumulate() can't run a {type(model).__name__}: forward and backward of its micro-batches go together",
            rank=None if ctx is None else ctx.rank,
            hint=strategy.instead_of_loops,
        )
    return deal(strategy, micro_batches, ctx)


def loss_scale(num_samples: float, *, ctx: RankContext | None = None) -> float:
    """Return what a sum-reduced loss must be multiplied by, so that DDP's average is the mean over all samples.

    That is the number of ranks by the number of samples of all ranks. It is exact for any split of the samples over
    ranks and micro-batches, where a mean-reduced loss is not. A mean-reduced loss must be multiplied by the samples of
    that micro-batch too: ``mean * len(inputs) * scale``. For language models, count tokens that are not masked.

    Args:
        num_samples: Samples of this rank, in all micro-batches of the step; may be 0. With weights, their sum.
        ctx: The job; None: the one that ``init()`` joined.

    Returns:
        The factor, equal on all ranks.

    Raises:
        UsageError: A negative number or not a number, on some rank; or no samples on any; the same error on all ranks.

        CollectiveError: The ranks call different things.
        CollectiveTimeoutError: Some rank did not call; names it.

    Collective: every rank, once for each step: one small exchange over the side channel, which waits for no GPU.
    """
    group = group_of(ctx or current())
    # What is wrong is sent like a number: an error here alone would leave the others waiting.
    own = _read_number(num_samples)
    answers = agree(group, "loss_scale", site=locate(), must={}, may=[own, repr(num_samples)[:60]])
    given = answers or [[own, repr(num_samples)[:60]]] * group.size
    wrong = {rank: one[1] for rank, one in zip(group.ranks, given, strict=True) if one[0] is None}
    if wrong:
        first = next(iter(wrong))
        raise UsageError(
            f"loss_scale: the number of samples is {wrong[first]} on {name_ranks([first])}"
            + (f", and wrong on {name_ranks(list(wrong)[1:])} too" if len(wrong) > 1 else ""),
            hint="pass the samples of this rank in all micro-batches of the step: a number, 0 or more",
        )
    total = sum(one[0] for one in given)
    if total == 0:
        raise UsageError(
            f"loss_scale: all {group.size} ranks together hold 0 samples",
            hint="skip a step that has none, on every rank",
        )
    return float(group.size / total)


def _read_number(num_samples: Any) -> float | None:
    """Return a number that can be sent, from Python, torch or NumPy; None if it counts nothing."""
    try:
        number = num_samples.item() if hasattr(num_samples, "item") else num_samples
    except (RuntimeError, ValueError):  # of several elements
        return None
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    return number if is_number and 0 <= number < math.inf else None
