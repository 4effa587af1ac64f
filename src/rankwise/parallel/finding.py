"""Which strategy a model has: seen from what the model is, so that models which torch's own functions have spread have one too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.parallel import DistributedDataParallel

from rankwise.base.errors import UsageError
from rankwise.parallel.replicated import Replicated
from rankwise.parallel.sharded import Sharded, is_sharded

if TYPE_CHECKING:
    from torch import nn

    from rankwise.parallel.strategy import Strategy
    from rankwise.runtime.context import RankContext


def find_strategy(model: nn.Module, ctx: RankContext | None = None) -> Strategy | None:
    """Return how a model is spread over the ranks; None if it is not.

    Args:
        model: Any.
        ctx: The job; None: that which ``init()`` has joined, if one is needed.
    """
    if isinstance(model, DistributedDataParallel):
        return Replicated(model, ctx)
    return Sharded(model, ctx) if is_sharded(model) else None


def strategy_of(model: nn.Module, ctx: RankContext | None = None) -> Strategy:
    """Return how a model is spread over the ranks.

    Args:
        model: What an ``apply_*`` has returned, or torch's own functions.
        ctx: The job; None: that which ``init()`` has joined, if one is needed.

    Raises:
        UsageError: It is not spread.
    """
    found = find_strategy(model, ctx)
    if found is None:
        raise UsageError(
            f"this {type(model).__name__} is not spread over the ranks: each would train a model of its own",
            rank=None if ctx is None else ctx.rank,
            hint="pass what apply_ddp(model) or apply_fsdp(model) has returned, and not the model inside",
        )
    return found
