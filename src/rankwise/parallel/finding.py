"""Which strategy a model has: seen from what the model is, so that models which torch's own functions have spread have one too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.parallel import DistributedDataParallel

from rankwise.base.errors import UsageError
from rankwise.parallel.coverage import check_coverage
from rankwise.parallel.placed import placement_of
from rankwise.parallel.replicated import Replicated
from rankwise.parallel.sharded import Sharded, is_sharded
from rankwise.parallel.strategy import Strategy
from rankwise.runtime.context import find_current

if TYPE_CHECKING:
    from torch import nn

    from rankwise.runtime.context import RankContext


def find_strategy(model: nn.Module, ctx: RankContext | None = None) -> Strategy | None:
    """Return how a model is spread over the ranks; None if it is not.

    Args:
        model: Any.
        ctx: The job; None: the one that ``init()`` joined, if one is needed.

    Raises:
        UsageError: Some parameters of a sharded model are in nobody's care.
    """
    if isinstance(model, DistributedDataParallel):
        return Replicated(model, ctx)
    make_strategy = getattr(model, "make_strategy", None)  # of a Pipeline, whose import is not for everyone
    if make_strategy is not None:
        return make_strategy(ctx)  # type: ignore[no-any-return]
    if is_sharded(model):
        check_coverage(model, ctx)
        return Sharded(model, ctx)
    # Alone there is nobody to share gradients with, and DistributedDataParallel takes devices of one type only.
    job = ctx or find_current()
    is_alone = placement_of(model) is not None and (job is None or job.world_size == 1)
    return Strategy(model, model, ctx) if is_alone else None


def strategy_of(model: nn.Module, ctx: RankContext | None = None) -> Strategy:
    """Return how a model is spread over the ranks.

    Args:
        model: What an ``apply_*`` has returned, or torch's own functions.
        ctx: The job; None: the one that ``init()`` joined, if one is needed.

    Raises:
        UsageError: It is not spread.
    """
    found = find_strategy(model, ctx)
    if found is None:
        raise UsageError(
            f"this {type(model).__name__} is not spread over the ranks: each would train a model of its own",
            rank=None if ctx is None else ctx.rank,
            hint="pass what apply_ddp(model), apply_fsdp(model) or apply_pipeline(model) has returned, and not the model inside",
        )
    return found


def differs_by_rank(model: nn.Module) -> bool:
    """Whether ranks have different parameters, or parts of them: what one finds in its own, the others may not."""
    return hasattr(model, "make_strategy") or is_sharded(model)
