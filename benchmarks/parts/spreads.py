"""How benchmarks/sharded.py spreads a model: by hand with torch's own functions, and by ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import rankwise

if TYPE_CHECKING:
    from collections.abc import Callable

    from parts.tasks import Task

#: The degrees of the mesh of each spread; without one, all ranks share the work in the one way that there is.
MESHES: dict[str, dict[str, int]] = {
    "fsdp": {},
    "zero1": {},
    "hsdp": {"replicate": 2, "shard": -1},
    "tp": {"tensor": -1},
    "tp-fsdp": {"shard": -1, "tensor": 2},
}
_PLAN = {"blocks.*.mlp.0": "colwise", "blocks.*.mlp.2": "rowwise"}


def spread_by_hand(task: Task, model: Any) -> tuple[nn.Module, Callable[[Any], Any]]:
    """Spread a model by torch's own functions; return it, and what makes the optimizer of its parameters."""
    mesh = _lay_mesh(task)
    if task.spread == "zero1":
        return (
            DistributedDataParallel(model, gradient_as_bucket_view=True),
            lambda parameters: ZeroRedundancyOptimizer(
                parameters,
                type(task.build_optimizer([nn.Parameter()])),
                parameters_as_bucket_view=True,
                lr=1e-3,
            ),
        )
    if "tp" in task.spread:
        for block in model.blocks:
            # Of torch's styles only these two keep what comes in and goes out whole.
            parallelize_module(block.mlp, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if "fsdp" in task.spread or task.spread == "hsdp":
        for block in model.blocks:
            fully_shard(block, mesh=mesh["shard"] if "tp" in task.spread else mesh)
        fully_shard(model, mesh=mesh["shard"] if "tp" in task.spread else mesh)
    return model, task.build_optimizer


def spread_ours(task: Task, model: nn.Module) -> tuple[nn.Module, Callable[[Any], Any]]:
    """Spread a model by our functions, along the mesh of the job."""
    if task.spread == "ddp":
        return rankwise.apply_ddp(model), task.build_optimizer
    if task.spread == "zero1":
        return (
            rankwise.apply_ddp(model),
            lambda parameters: rankwise.apply_zero1(task.build_optimizer(parameters)),
        )
    if "tp" in task.spread:
        rankwise.apply_tensor_parallel(model, _PLAN)
    if "fsdp" in task.spread or task.spread == "hsdp":
        rankwise.apply_fsdp(model)
    return model, task.build_optimizer


def _lay_mesh(task: Task) -> DeviceMesh:
    world_size = dist.get_world_size()
    degrees = dict(MESHES[task.spread]) or {"shard": world_size}
    known = 1
    for size in degrees.values():
        known *= max(size, 1)
    sizes = tuple(world_size // known if size < 0 else size for size in degrees.values())
    return init_device_mesh(task.device_type, sizes, mesh_dim_names=tuple(degrees))
