"""Cut a model's parameters, gradients and optimizer states over the ranks (FSDP2: Zhao et al., arXiv:2304.11277; ZeRO-3: arXiv:1910.02054)."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from rankwise.base.errors import UsageError
from rankwise.base.log import get_logger
from rankwise.parallel.blocks import Blocks, find_blocks
from rankwise.parallel.dtensors import noting_replaced, to_local
from rankwise.parallel.materialise import Materialiser
from rankwise.parallel.model_check import check_same_model, find_complaint
from rankwise.parallel.names import list_holders
from rankwise.parallel.strategy import defer_reduction, move_tensors, share_values
from rankwise.parallel.sync_batchnorm import convert_sync_batchnorm, find_foreign
from rankwise.runtime.context import RankContext, current

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.distributed.device_mesh import DeviceMesh


_LOGGER = get_logger(__name__)

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def apply_fsdp(  # noqa: PLR0913 - most calls give none
    model: nn.Module,
    *,
    blocks: Blocks = "auto",
    precision: Literal["fp32", "bf16", "fp16"] | MixedPrecisionPolicy = "fp32",
    cpu_offload: bool = False,
    reshard_after_forward: bool | int | None = None,
    defer_gradients: bool = False,
    sync_batchnorm: bool = False,
    init_weights: Callable[[nn.Module], Any] | bool | None = None,
    seed: int = 0,
    ctx: RankContext | None = None,
    wait_s: float | None = None,
) -> nn.Module:
    """Shard a model over the ranks by torch's FSDP2: each holds a part of every parameter, and gathers a block when it computes it.

    Without a mesh, over all ranks. With ``init(mesh={"replicate": 2, "shard": 4})``, over the shard axis, and the
    replicate axis holds copies (HSDP). All ranks start from the first one's weights. Build the optimizer afterwards,
    from ``model.parameters()``: they are new ones. The model's class gets FSDP2's methods, and its names stay. Call
    ``apply_tensor_parallel`` and ``apply_checkpointing`` before it.

    A model on the meta device (``with torch.device("meta"): model = Net()``) gets its values block by block, the same
        at any number of ranks.

    Args:
        model: On the CPU, the rank's device, or the meta device; changed in place.
        blocks: What is gathered at a time. "auto": the repeated layers, those that stand in a ModuleList or Sequential
            beside others of their class, or what a model of transformers names. Or a class, a name pattern
            (``"layers.*"``: ``*`` is one part of a name, ``**`` any number), a list of them, or a number: the smallest
            modules that have so many parameters.
        precision: "bf16" or "fp16": parameters are gathered and computed in it; gradients are added up, and shards
            kept, in the model's own dtype. Or torch's MixedPrecisionPolicy.
        cpu_offload: Keep shards, gradients and optimizer states in the host's memory.
        reshard_after_forward: As in torch's ``fully_shard``: False keeps a block gathered until its backward. Of a
            pipeline's stages it is False.
        defer_gradients: With ``accumulate``: add up whole gradients on each rank, and send them with a step's last
            micro-batch; takes the memory of all gradients.
        sync_batchnorm: Let BatchNorm see the samples of all ranks; else each rank keeps its own statistics.
        init_weights: For modules on the meta device: a function that initialises one module; None: its
            ``reset_parameters()``; False: a checkpoint will be loaded.
        seed: For that: each module is seeded by it and its name.
        ctx: The job; None: the one that ``init()`` joined.
        wait_s: Seconds to wait for the slowest rank to arrive; None: 60, or the job's timeout if that is less.

    Returns:
        The model.

    Raises:
        ModelError: The model differs between ranks, is spread already, or can't be initialised; names what. The same
            error on every rank.
        UsageError: Options that can't work, or a mesh without a shard axis.
        CollectiveTimeoutError: A rank did not arrive; names it.

    Collective: every rank. From now on each forward in training and evaluation is one, too.
    """
    ctx = ctx or current()
    # Called inside of `with torch.device("meta")`, as the model was built, our own tensors would have no values.
    with torch.device("cpu") if torch.get_default_device().type == "meta" else nullcontext():
        mesh = _find_mesh(ctx)
        policy = _read_precision(precision, ctx)
        #: Of a pipeline each stage is gathered apart.
        stages: list[Any] = getattr(model, "stage_modules", [])
        if stages and reshard_after_forward is None:
            # Micro-batches follow each other through a stage; and a backward in two halves (zero bubble) seeks the
            # gathered weights.
            reshard_after_forward = False
        found = _choose_blocks(model, find_blocks(model, blocks, rank=ctx.rank))
        maker = Materialiser(model, ctx.device, init_weights, seed)
        options = {
            "blocks": sorted(found),
            "precision": policy,
            "cpu_offload": cpu_offload,
            "reshard_after_forward": reshard_after_forward,
            "defer_gradients": defer_gradients,
            "sync_batchnorm": sync_batchnorm,
            "seed": seed,
        }
        check_same_model(
            model,
            options,
            ctx=ctx,
            wait_s=wait_s,
            complaint=_find_complaint(model, reshard_after_forward)
            or maker.find_complaint(model)
            or (find_foreign(model) if sync_batchnorm else None),
            call="apply_fsdp",
            among=list_copies(ctx) if stages else None,
        )
        if sync_batchnorm:
            _check_batchnorm(ctx)
            model = convert_sync_batchnorm(model, None if ctx.group is dist.group.WORLD else ctx.group)
            found = {name: model.get_submodule(name) for name in found}
        else:
            _warn_of_batchnorm(model, ctx)
        arguments: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": policy,
            "offload_policy": CPUOffloadPolicy(pin_memory=ctx.device.type != "cpu") if cpu_offload else OffloadPolicy(),
        }
        with noting_replaced(model):
            for name, block in found.items():
                _prepare(block.named_modules(prefix=name), maker, mesh, ctx)
                fully_shard(block, reshard_after_forward=reshard_after_forward, **arguments)
            inside = tuple(f"{name}." for name in found)
            rest = [(name, one) for name, one in model.named_modules() if not f"{name}.".startswith(inside)]
            _prepare(rest, maker, mesh, ctx)
            for root in stages or [model]:
                fully_shard(root, reshard_after_forward=reshard_after_forward, **arguments)
        for module in (one for root in stages or [model] for one in root.modules()):
            if isinstance(module, FSDPModule) and ctx.device.type == "cpu":
                # Gloo in torch 2.8 takes the mean that is asked for, and returns the sum.
                module.set_force_sum_reduction_for_comms(True)
        if stages:
            model.compute_in(policy.param_dtype)
        if defer_gradients:
            defer_reduction(model)
        # That a module returned a view, as a linear layer on the CPU does, is the same on all ranks: once is enough. Of
        # the whole model it does no harm, as the blocks' own hooks stay.
        warnings.filterwarnings("once" if ctx.is_main else "ignore", message="FSDP2-wrapped module")
        if found:
            warnings.filterwarnings("ignore", message=rf"FSDP2-wrapped module \({type(model).__name__}\)")
        return model


def _find_mesh(ctx: RankContext) -> DeviceMesh:
    mesh = ctx.mesh() if ctx.has_mesh else ctx.mesh(shard=-1)
    degrees = mesh.degrees
    if degrees["replicate"] > 1 and degrees["shard"] == degrees["tensor"] == degrees["pipeline"] == 1:
        raise UsageError(
            f"apply_fsdp on a mesh of {degrees['replicate']} copies and 1 shard would shard nothing",
            rank=ctx.rank,
            hint="init(mesh={'shard': -1}), or with copies {'replicate': 2, 'shard': -1}; or apply_ddp(model)",
        )
    return mesh.of("replicate", "shard") if degrees["replicate"] > 1 else mesh.of("shard")


def list_copies(ctx: RankContext) -> list[int]:
    """Return the ranks that have the same stages of a pipeline."""
    mesh = ctx.mesh()
    return mesh.device_mesh.mesh.reshape(mesh.degrees["pipeline"], -1)[mesh.position["pipeline"]].tolist()  # type: ignore[no-any-return]


def _read_precision(precision: str | MixedPrecisionPolicy, ctx: RankContext) -> MixedPrecisionPolicy:
    if isinstance(precision, MixedPrecisionPolicy):
        return precision
    if precision not in {"fp32", *_DTYPES}:
        raise UsageError(
            f"precision={precision!r}",
            rank=ctx.rank,
            hint="'fp32', 'bf16', 'fp16', or torch's MixedPrecisionPolicy",
        )
    if precision == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=_DTYPES[precision], reduce_dtype=torch.float32)


def _find_complaint(model: nn.Module, reshard_after_forward: bool | int | None) -> str | None:  # noqa: FBT001 - apply_fsdp's own
    sharded = [name for name, one in model.named_modules() if isinstance(one, FSDPModule)]
    if sharded:
        return f"{sharded[0] or 'the model'!r} was passed to fully_shard or apply_fsdp already"
    hooked = [name for name, one in model.named_parameters() if one._backward_hooks]
    if hooked:
        return f"{hooked[0]!r} has a hook on its gradient, and apply_fsdp puts another parameter in its place: register hooks afterwards; a layer of the plan with 'replicate_sum' can't be sharded as well"
    if reshard_after_forward and hasattr(model, "stage_modules"):
        return f"reshard_after_forward={reshard_after_forward!r}: the stages of a pipeline stay gathered from a step's first micro-batch to its last; leave it out"
    held = [id(one) for stage in getattr(model, "stage_modules", []) for one in stage.parameters()]
    if len(set(held)) < len(held):
        return "two stages of a rank share parameters, and each would gather them: use a schedule with one stage on each rank, or an interleaved one"
    return find_complaint(model, takes_meta=True, call="apply_fsdp")


def _choose_blocks(model: nn.Module, blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Leave out the blocks that share a parameter with what is outside, as one that two gather would be two; and other stages', which have none."""
    holders = list_holders(model.named_parameters(remove_duplicate=False), blocks).values()
    held = {block for each in holders for block in each}
    tied = {block for each in holders if len(each) > 1 for block in each}
    return {name: block for name, block in blocks.items() if name in held - tied}


def _prepare(modules: Iterable[tuple[str, nn.Module]], maker: Materialiser, mesh: DeviceMesh, ctx: RankContext) -> None:
    """Give the modules of a block their values, the same on all ranks, on this rank's device: as short as can be."""
    modules = list(modules)
    maker.fill(modules)
    tensors: dict[Tensor, None] = {}
    for _, module in modules:
        tensors |= dict.fromkeys((*module.parameters(recurse=False), *module.buffers(recurse=False)))
    move_tensors(tensors, ctx.device)
    for dim in range(mesh.ndim):
        share_values(to_local(tensors), mesh.get_group(dim))


def _check_batchnorm(ctx: RankContext) -> None:
    if ctx.data_size != ctx.world_size:
        raise UsageError(
            f"sync_batchnorm on a mesh where {ctx.world_size // ctx.data_size} ranks share each batch: statistics are taken over all ranks",
            rank=ctx.rank,
            hint="use GroupNorm or LayerNorm in such a model",
        )


def _warn_of_batchnorm(model: nn.Module, ctx: RankContext) -> None:
    names = [
        name
        for name, one in model.named_modules()
        if isinstance(one, torch.nn.modules.batchnorm._BatchNorm) and one.track_running_stats
    ]
    if names and ctx.is_main and ctx.data_size > 1:
        _LOGGER.warning(
            f"{names[0]!r} and {len(names) - 1} more BatchNorm layers keep different statistics on each rank, and a checkpoint rank 0's\n"
            "  -> apply_fsdp(..., sync_batchnorm=True) takes them over all ranks"
        )
