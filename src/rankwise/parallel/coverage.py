"""Whether somebody averages each parameter's gradient over all ranks that have different samples."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakSet

from torch.distributed.tensor import DTensor

from rankwise.base.errors import UsageError
from rankwise.parallel.names import quote
from rankwise.runtime.context import find_current
from rankwise.runtime.mesh import AXES

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rankwise.runtime.context import RankContext

_checked: WeakSet[nn.Module] = WeakSet()


def check_coverage(model: nn.Module, ctx: RankContext | None) -> None:
    """Refuse a model with DTensors of which some parameters would be trained by each rank, or each copy, on its own.

    Args:
        model: Sharded, or with split layers; looked at once.
        ctx: The job; None: the one that ``init()`` joined; outside of one nothing is known.

    Raises:
        UsageError: Names the parameters.
    """
    ctx = ctx or find_current()
    if ctx is None or ctx.data_size == 1 or model in _checked:
        return
    shares = _list_shares(ctx)
    alone = [
        name
        for name, one in model.named_parameters()
        if one.requires_grad and len(_reach(one, shares)) < ctx.data_size
    ]
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
