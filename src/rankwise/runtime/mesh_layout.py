"""Lay the ranks of a job out as a mesh, by degrees or as torch's own mesh has them."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rankwise.base.errors import UsageError
from rankwise.runtime.mesh import AXES, Mesh, read_degrees, rename_axes, show_degrees

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwise.runtime.context import RankContext

# torch 2.15 has a public one, and warns of the other.
set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout


def lay_mesh(ctx: RankContext, wanted: Mapping[str, int] | DeviceMesh) -> Mesh:
    """Lay the ranks of a job out as a grid.

    Args:
        ctx: The job.
        wanted: How many ranks each axis has, of which one may be -1: all that are left. Or a mesh of torch's whose axes
            have names.

    Raises:
        UsageError: Degrees that don't make up the number of ranks, or an unknown axis.
        CollectiveError: The ranks ask for different ones.

    Collective: every rank.
    """
    if isinstance(wanted, DeviceMesh):
        return _adopt(ctx, wanted)
    degrees = read_degrees(wanted, ctx.world_size, rank=ctx.rank)
    ctx.agree(show_degrees(degrees), "the mesh")
    sizes = {axis: size for axis, size in degrees.items() if axis in rename_axes(wanted) or size > 1}
    if sizes.get("replicate", 1) > 1 and len(sizes) > 1:
        # Copies of a model that is cut by other axes are those of hybrid sharding, whose mesh has both.
        sizes = {axis: degrees[axis] for axis in AXES if axis in {*sizes, "shard"}}
    sizes = sizes or {"replicate": 1}
    device_mesh = init_device_mesh(ctx.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for dim in range(device_mesh.ndim):  # torch gives the groups of a mesh the backend's default
        set_timeout(timedelta(seconds=ctx.timeout_s), device_mesh.get_group(dim))
    if ctx.is_main and ctx.local_world_size % degrees["tensor"] and ctx.num_nodes > 1:
        ctx.print(
            f"rankwise: warning: the tensor axis of {degrees['tensor']} ranks spans hosts of {ctx.local_world_size}: each layer waits for the network between them"
        )
    return _make(ctx, degrees, device_mesh)


def _adopt(ctx: RankContext, device_mesh: DeviceMesh) -> Mesh:
    names = device_mesh.mesh_dim_names
    if not names:
        raise UsageError(
            f"a DeviceMesh of shape {tuple(device_mesh.mesh.shape)} without names: which axis is which?",
            rank=ctx.rank,
            hint="init_device_mesh(..., mesh_dim_names=('replicate', 'shard'))",
        )
    sizes = {name: device_mesh.size(dim) for dim, name in enumerate(names)}
    degrees = read_degrees(sizes, ctx.world_size, rank=ctx.rank)
    order = list(rename_axes(sizes))
    if order != [axis for axis in AXES if axis in order]:
        raise UsageError(
            f"the DeviceMesh has its axes in the order {', '.join(names)}",
            rank=ctx.rank,
            hint=f"outermost first they are {', '.join(AXES)}",
        )
    ctx.agree((show_degrees(degrees), device_mesh.mesh.flatten().tolist()), "the mesh")
    return _make(ctx, degrees, device_mesh)


def _forget_plans() -> None:
    """Forget what DTensor has worked out on this mesh: an equal one, of a job that is joined later, has other groups (torch 2.8 to 2.15)."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor, _redistribute, debug  # noqa: PLC0415 - loaded already, or nothing is to be done

    propagated: Any = getattr(debug, "_clear_sharding_prop_cache", None)
    if propagated is None:  # torch 2.8
        propagated = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear
    clear = getattr(_redistribute, "clear_redistribute_planner_cache", None)
    for forget in (propagated, clear, _redistribute._gen_transform_infos.cache_clear):
        if forget is not None:
            forget()


def _make(ctx: RankContext, degrees: dict[str, int], device_mesh: DeviceMesh) -> Mesh:
    grid: Any = device_mesh.mesh.reshape([degrees[axis] for axis in AXES])
    place = (grid == ctx.rank).nonzero().flatten().tolist()
    ctx._before_leaving.append(_forget_plans)
    coordinates = rename_axes(dict(zip(device_mesh.mesh_dim_names or (), device_mesh.get_coordinate(), strict=True)))
    return Mesh(
        degrees=degrees,
        position={axis: coordinates.get(axis, at) for axis, at in zip(AXES, place, strict=True)},
        device_mesh=device_mesh,
        data_ranks=tuple(grid[0, :, :, 0].flatten().tolist()),
    )
