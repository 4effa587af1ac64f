"""What a run can be told by, as plain values: for its journal, and for `rankwise compare`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rankwise.base import __version__

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from rankwise.data.loader import DataLoader
    from rankwise.runtime.context import RankContext


def describe(
    loader: DataLoader,
    optimizer: torch.optim.Optimizer,
    model: nn.Module | None,
    ctx: RankContext,
    folder: Path | None,
) -> dict[str, Any]:
    """Return the facts of a run.

    Args:
        loader: What it reads.
        optimizer: What moves the weights.
        model: What is trained, unwrapped; None if that is not known.
        ctx: The job.
        folder: Where the run is kept.
    """
    sampler = loader.sampler
    group = optimizer.param_groups[0]
    kind = next((kind for kind in ("fused", "foreach") if group.get(kind)), "")
    facts: dict[str, Any] = {
        "optimizer": f"{type(optimizer).__name__} {kind}".strip(),
        # What the user has given; a schedule has moved it by now.
        "lr": float(group.get("max_lr", group.get("initial_lr", group["lr"]))),
        "weight_decay": _plain(group.get("weight_decay")),
        "data_seed": loader.seed,
        "order": sampler.order.name if sampler is not None else "stream",
        "num_samples": sampler.num_samples if sampler is not None else None,
        "micro_batch": loader.micro_batch,
        "device": ctx.device.type,
        "backend": ctx.backend,
        "folder": None if folder is None else str(folder),
        "torch": torch.__version__,
        "rankwise": __version__,
    }
    if model is not None:
        parameters = list(model.parameters())
        facts["model"] = type(model).__name__
        facts["parameters"] = sum(parameter.numel() for parameter in parameters)
        facts["dtype"] = "+".join(sorted({str(one.dtype).removeprefix("torch.") for one in parameters}))
    return facts


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
