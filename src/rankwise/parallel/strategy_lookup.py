"""Which strategy a model has: seen from what the model is, so that models which torch's own functions have spread have one too."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakSet

from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from rankwise.base.errors import UsageError
from rankwise.parallel.names import quote
from rankwise.parallel.placement_hooks import placement_of
from rankwise.parallel.strategy import Replicated, Sharded, Strategy, is_sharded
from rankwise.runtime.context import RankContext, find_current
from rankwise.runtime.mesh import AXES

if TYPE_CHECKING:
    from torch import Tensor, nn


#: Models whose parameters were found to be in somebody's care.
_checked: WeakSet[nn.Module] = WeakSet()


def find_strategy(model: nn.Module, ctx: RankContext | None = None) -> Strategy | None:
    """Return how a model is spread over the ranks; None if it is not.

    Raises:
        UsageError: Some parameters of a sharded model are in nobody's care.
    """
    if isinstance(model, DistributedDataParallel):
        return Replicated(model, ctx)
    make_strategy = getattr(model, "make_strategy", None)  # of a Pipeline, whose import is not for everyone
    if make_strategy is not None:
        return make_strategy(ctx)  # type: ignore[no-any-return]
    if is_sharded(model):
        _check_coverage(model, ctx)
        return Sharded(model, ctx)
    # Alone there is nobody to share gradients with, and DistributedDataParallel takes devices of one type only.
    job = ctx or find_current()
    is_alone = placement_of(model) is not None and (job is None or job.world_size == 1)
    return Strategy(model, ctx) if is_alone else None


def strategy_of(model: nn.Module, ctx: RankContext | None = None) -> Strategy:
    """Return how a model is spread over the ranks.

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


def _check_coverage(model: nn.Module, ctx: RankContext | None) -> None:
    """Refuse a model with DTensors of which some parameters would be trained by each rank, or each copy, on its own; looked at once."""
    ctx = ctx or find_current()
    if ctx is None or ctx.data_size == 1 or model in _checked:
        return
    shares = _list_shares(ctx)
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    alone = [name for name, one in trained if len(_reach(one, shares)) < ctx.data_size]
    if alone:
        raise UsageError(
            f"nothing averages the gradients of {quote(alone)} over the {ctx.data_size} shares of the batch: "
            "ranks with different samples would make them diverge",
            rank=ctx.rank,
            hint="apply_fsdp(model) on the whole model, after apply_tensor_parallel and after its last layer was added; "
            "ranks that should have the same samples need the mesh: init(mesh={'tensor': ...})",
        )
    _checked.add(model)


def _list_shares(ctx: RankContext) -> dict[int, int]:
    """Return for each rank which share of a batch it has."""
    if not ctx.has_mesh:
        return {rank: rank for rank in range(ctx.world_size)}
    mesh = ctx.mesh()
    grid = mesh.device_mesh.mesh.reshape([mesh.degrees[axis] for axis in AXES])
    return {
        rank: number
        for number, ranks in enumerate(grid.flatten(1, 2).transpose(0, 1).flatten(1).tolist())
        for rank in ranks
    }


def _reach(parameter: Tensor, shares: dict[int, int]) -> set[int]:
    """Return the shares of the ranks among whom a parameter is spread."""
    if not isinstance(parameter, DTensor):
        return set()
    return {shares[rank] for rank in parameter.device_mesh.mesh.flatten().tolist()}
