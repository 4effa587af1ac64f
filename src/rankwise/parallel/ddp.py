"""Train one model on all ranks, each with its own samples (DistributedDataParallel; Li et al., arXiv:2006.15704)."""

from __future__ import annotations

import inspect
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from rankwise.base.errors import UsageError
from rankwise.parallel.checked_ddp import CheckedDDP, Watch
from rankwise.parallel.comm_hooks import CommHook, check_comm_hook, register_comm_hook
from rankwise.parallel.model_check import check_same_model, find_complaint
from rankwise.parallel.names import quote
from rankwise.parallel.placement_hooks import placement_of
from rankwise.parallel.sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm, find_foreign, list_native
from rankwise.runtime.context import RankContext, current
from rankwise.runtime.mesh import DATA_AXES, show_degrees

if TYPE_CHECKING:
    from collections.abc import Iterable


#: Parameters of models that were wrapped.
_averaged = WeakTensorKeyDictionary()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Options that rarely need a change.

    Attributes:
        gradient_as_bucket_view: Let gradients be views into the buckets that are sent: saves memory and a copy.
        bucket_cap_mb: Size of a bucket in MiB; None: torch's 25. Smaller starts to send earlier, larger sends faster.
        broadcast_buffers: Give all ranks the buffers of rank 0 at each forward. Without it, BatchNorm that
            is not synced keeps different statistics on each rank. At the wrap, buffers are rank 0's in any case.
    """

    gradient_as_bucket_view: bool = True
    bucket_cap_mb: float | None = None
    broadcast_buffers: bool = True


def apply_ddp(
    model: nn.Module,
    *,
    ctx: RankContext | None = None,
    sync_batchnorm: bool = False,
    static_graph: bool = False,
    find_unused_parameters: bool = False,
    comm_hook: CommHook | None = None,
    tuning: Tuning | None = None,
    wait_s: float | None = None,
) -> DistributedDataParallel:
    """Move a model to this rank's device and wrap it, after all ranks have agreed that it is the same model.

    All ranks start from the weights of rank 0. Build the optimizer before or after.

    Args:
        model: On the CPU or on the rank's device; changed in place.
        ctx: The job; None: the one that ``init()`` joined.
        sync_batchnorm: Let BatchNorm see the samples of all ranks; on the CPU too.
        static_graph: Promise that every step uses the same parameters in the same way; allows reentrant checkpoints.
        find_unused_parameters: Look, at each step, for parameters that have no part in the loss; costs a walk over the graph.
        comm_hook: Send gradients in "fp16" or "bf16", or by "powersgd" (or ``PowerSGD(rank=..., ...)``).
        tuning: Buckets and buffers.
        wait_s: Seconds to wait for the slowest rank to arrive; None: 60, or the job's timeout if that is less.

    Returns:
        The wrapped model: ``ddp(inputs)`` and then ``backward()`` on every rank. It is torch's own class, with checks.

    Raises:
        ModelError: The model differs between ranks, is wrapped already, frozen, not initialised, or of layers that
            can't work here; names them. The same error on every rank.
        UsageError: Options that can't work.
        CollectiveTimeoutError: A rank did not arrive; names it.

    Collective: every rank, for the same models in the same order.
    """
    ctx, tuning = ctx or current(), tuning or Tuning()
    check_comm_hook(comm_hook)
    if tuning.bucket_cap_mb is not None and not tuning.bucket_cap_mb > 0:
        raise UsageError(
            f"bucket_cap_mb={tuning.bucket_cap_mb}: a bucket must have a size in MiB above 0",
            rank=ctx.rank,
            hint="None: torch's default",
        )
    options = {
        "static_graph": static_graph,
        "find_unused_parameters": find_unused_parameters,
        "sync_batchnorm": sync_batchnorm,
        "comm_hook": comm_hook,
    }
    _check_mesh(ctx)
    if any(hasattr(one, "device_mesh") for one in model.parameters()):
        raise UsageError(
            f"apply_ddp was given a {type(model).__name__} whose parameters are DTensors: it is sharded or split already",
            rank=ctx.rank,
            hint="leave apply_ddp out: a sharded model's gradients are averaged by its own backward",
        )
    check_same_model(
        model,
        {**options, **asdict(tuning)},
        ctx=ctx,
        wait_s=wait_s,
        complaint=find_complaint(model)
        or _find_placement_complaint(model)
        or _find_layer_complaint(model, sync_batchnorm=sync_batchnorm, device=ctx.device),
    )
    if placement_of(model) is None:
        model.to(ctx.device)
    if sync_batchnorm:
        model = convert_sync_batchnorm(model, None if ctx.group is dist.group.WORLD else ctx.group)
    ddp = _wrap(model, ctx, tuning, find_unused_parameters=find_unused_parameters, static_graph=static_graph)
    on_nccl = "nccl" in ctx.backend and ctx.device.type == "cuda"
    register_comm_hook(ddp, comm_hook, group=ctx.group, on_nccl=on_nccl)
    synced = any(isinstance(layer, (SyncBatchNorm, torch.nn.SyncBatchNorm)) for layer in model.modules())
    ddp.watch = Watch(ddp, rank=ctx.rank, has_synced_batchnorm=synced and ctx.world_size > 1)
    for one in ddp.parameters():
        _averaged[one] = True
    return ddp


def is_averaged(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether ``apply_ddp`` averages the gradients of all of some parameters."""
    return all(one in _averaged for one in parameters)


def _check_mesh(ctx: RankContext) -> None:
    degrees = ctx.mesh().degrees if ctx.has_mesh else {}
    # Along "shard" the ranks have different samples: beside a sharded model another may be replicated.
    cut = [axis for axis, size in degrees.items() if size > 1 and axis not in DATA_AXES]
    if cut:
        raise UsageError(
            f"apply_ddp gives each rank the whole model, but the mesh of {show_degrees(degrees)} shards it by {' and '.join(cut)}",
            rank=ctx.rank,
            hint="apply_fsdp(model) spreads it over replicate and shard, after apply_tensor_parallel(model) over tensor; or create no mesh",
        )


def _find_placement_complaint(model: nn.Module) -> str | None:
    kinds = sorted({one.device.type for one in model.parameters()})
    if placement_of(model) is None or not kinds[1:]:
        return None
    return f"the model was placed on devices of type {' and '.join(kinds)}, but DistributedDataParallel takes one type: place it on GPUs only"


def _find_layer_complaint(model: nn.Module, *, sync_batchnorm: bool, device: torch.device) -> str | None:
    if sync_batchnorm:
        return find_foreign(model)
    if device.type != "cpu" or not (native := list_native(model)):
        return None
    return f"torch.nn.SyncBatchNorm works on GPUs only, and the ranks run on the CPU: {quote(native)}; apply_ddp(..., sync_batchnorm=True) makes them work here"


def _wrap(model: nn.Module, ctx: RankContext, tuning: Tuning, **options: bool) -> CheckedDDP:
    # torch 2.13 renamed broadcast_buffers; both shall share the buffers once, when the model is wrapped.
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    if renamed:
        options["forward_sync_buffers"] = tuning.broadcast_buffers
    ddp = CheckedDDP(
        model,
        # A model on several devices brings its inputs where they belong by itself.
        device_ids=None
        if ctx.device.type == "cpu" or placement_of(model) is not None
        else [ctx.device.index],
        process_group=ctx.group,
        gradient_as_bucket_view=tuning.gradient_as_bucket_view,
        bucket_cap_mb=tuning.bucket_cap_mb,
        **options,
    )
    if not renamed:
        ddp.broadcast_buffers = tuning.broadcast_buffers
    return ddp
