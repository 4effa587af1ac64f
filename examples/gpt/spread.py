"""Ways to spread the GPT over the ranks: one call each. The losses are those of one process, but for the rounding of sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

import rankwise

if TYPE_CHECKING:
    import torch
    from torch import nn

#: How the ranks are laid out for each; where nothing stands, as one row that shares the batch.
MESHES: dict[str, dict[str, int] | None] = {
    "ddp": None,
    "zero1": None,
    "fsdp": {"shard": -1},
    "offload": {"shard": -1},
    "hsdp": {"replicate": 2, "shard": -1},
    "tp": {"tensor": -1},
    "tp-fsdp": {"shard": -1, "tensor": 2},
}
#: `enter` makes queries, keys and values in one product, so that its outputs are gathered and not split by heads.
TENSOR_PLAN = {
    "blocks.*.attention.enter": "colwise_gather",
    "blocks.*.widen": "colwise",
    "blocks.*.leave": "rowwise",
}


def spread_model(model: nn.Module, how: str) -> nn.Module:
    """Spread a model over the ranks, before its optimizer is built.

    Args:
        model: A GPT.
        how: A key of ``MESHES``, with which the job was begun: ``rankwise.init(mesh=MESHES[how])``.
    """
    if "tp" in how:
        rankwise.apply_tensor_parallel(model, TENSOR_PLAN)
    if "fsdp" in how or how in ("hsdp", "offload"):
        rankwise.apply_checkpointing(model, blocks="blocks.*")
        rankwise.apply_fsdp(model, blocks="blocks.*", cpu_offload=how == "offload")
    if how in ("ddp", "zero1"):
        return rankwise.apply_ddp(model)
    return model


def spread_optimizer(optimizer: torch.optim.Optimizer, how: str) -> torch.optim.Optimizer:
    """Spread the optimizer's states, if that is asked for."""
    return rankwise.apply_zero1(optimizer) if how == "zero1" else optimizer
