"""Train one model on all ranks, each with its own samples (DistributedDataParallel; Li et al., arXiv:2006.15704)."""

from __future__ import annotations

import inspect
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from rankwise.base.errors import UsageError
from rankwise.parallel.checked_ddp import CheckedDDP, Watch
from rankwise.parallel.model_check import check_same_model, find_complaint
from rankwise.parallel.names import quote
from rankwise.parallel.placement_hooks import placement_of
from rankwise.parallel.sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm, find_foreign
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
        find_unused_parameters: Look, at each step, for parameters that have no part in the loss; costs a walk over the
            graph.
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
        or _find_layer_complaint(model, sync_batchnorm=sync_batchnorm, device=ctx.device)
        or _find_hook_complaint(model, comm_hook),
    )
    if placement_of(model) is None:
        model.to(ctx.device)
    if sync_batchnorm:
        model = convert_sync_batchnorm(model, None if ctx.group is dist.group.WORLD else ctx.group)
    ddp = _wrap(model, ctx, tuning, find_unused_parameters=find_unused_parameters, static_graph=static_graph)
    register_comm_hook(ddp, comm_hook, ctx.group)
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
    native = [name for name, layer in model.named_modules() if isinstance(layer, nn.SyncBatchNorm)]
    if device.type != "cpu" or not native:
        return None
    return f"torch.nn.SyncBatchNorm works on GPUs only, and the ranks run on the CPU: {quote(native)}; apply_ddp(..., sync_batchnorm=True) makes them work here"


def _find_hook_complaint(model: nn.Module, hook: CommHook | None) -> str | None:
    scalars = [name for name, one in model.named_parameters() if one.requires_grad and not one.dim()]
    if hook in {None, "fp16", "bf16"} or not scalars:
        return None
    # torch 2.8 to 2.15: an IndexError in the first step that compresses, thousands of steps later.
    return f"PowerSGD makes matrices of parameters, and {quote(scalars)} has no dim: give it the shape (1,), or take comm_hook='bf16'"


def _wrap(model: nn.Module, ctx: RankContext, tuning: Tuning, **options: bool) -> CheckedDDP:
    # torch 2.13 renamed broadcast_buffers; both shall share the buffers once, when the model is wrapped.
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    if renamed:
        options["forward_sync_buffers"] = tuning.broadcast_buffers
    ddp = CheckedDDP(
        model,
        # A model on several devices brings its inputs where they belong by itself.
        device_ids=None if ctx.device.type == "cpu" or placement_of(model) is not None else [ctx.device.index],
        process_group=ctx.group,
        gradient_as_bucket_view=tuning.gradient_as_bucket_view,
        bucket_cap_mb=tuning.bucket_cap_mb,
        **options,
    )
    if not renamed:
        ddp.broadcast_buffers = tuning.broadcast_buffers
    return ddp


# ---------------- gradients made smaller on their way: half precision, or PowerSGD (Vogels et al., arXiv:1905.13727)


#: DDP makes its buckets anew after the first step, and PowerSGD keeps memory for each bucket.
_FEWEST_PLAIN_STEPS = 2


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSGD:
    """Send a low-rank approximation of each gradient, and add what was lost to the next one.

    Attributes:
        rank: Rank of the approximation: 1 to 4, up to 32 for language models. A smaller one sends less and is less
            exact.
        plain_steps: Steps at the start that send whole gradients, at least 2; a tenth of the training is a good
            start, as early gradients suffer most.
        min_compression: A tensor is compressed only if that makes it this many times smaller.
    """

    rank: int = 1
    plain_steps: int = 1000
    min_compression: float = 2.0


CommHook = Literal["fp16", "bf16", "powersgd"] | PowerSGD


def check_comm_hook(hook: object) -> None:
    """Refuse what is no comm hook."""
    if isinstance(hook, PowerSGD):
        if hook.rank < 1 or hook.plain_steps < _FEWEST_PLAIN_STEPS:
            raise UsageError(
                f"PowerSGD(rank={hook.rank}, plain_steps={hook.plain_steps}): needs a rank of at least 1"
                f" and at least {_FEWEST_PLAIN_STEPS} plain steps"
            )
    elif hook is not None and hook not in ("fp16", "bf16", "powersgd"):
        raise UsageError(f"comm_hook={hook!r} is unknown", hint="use 'fp16', 'bf16', 'powersgd', PowerSGD(...) or None")


def register_comm_hook(ddp: DistributedDataParallel, hook: CommHook | None, group: dist.ProcessGroup) -> None:
    """Let a wrapped model send its gradients through a hook.

    "fp16" halves what is sent; gradients above 65504 become infinite, so scale the loss or take "bf16", which has the
    range of float32 and 8 bits of precision. Both divide by the number of ranks before they add up.
    """
    if hook == "fp16":
        ddp.register_comm_hook(group, default_hooks.fp16_compress_hook)
    elif hook == "bf16":
        ddp.register_comm_hook(group, average_in_bf16)
    elif hook is not None:
        chosen = hook if isinstance(hook, PowerSGD) else PowerSGD()
        state = powerSGD_hook.PowerSGDState(
            group,
            matrix_approximation_rank=chosen.rank,
            start_powerSGD_iter=chosen.plain_steps,
            min_compression_rate=chosen.min_compression,
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def average_in_bf16(group: dist.ProcessGroup, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients in bfloat16 by torch's hook, which DDP refuses, by its name, on all backends but NCCL: Gloo adds it up, too."""
    averaged: torch.futures.Future[torch.Tensor] = default_hooks.bf16_compress_hook(group, bucket)
    return averaged


# DDP looks at the annotations themselves, and they are strings in this file.
average_in_bf16.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
