"""What a run can be told by, as plain values: for its journal, and for `rankwise compare`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rankwise.base import __version__
from rankwise.base.log import get_logger

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from rankwise.data.loader import DataLoader
    from rankwise.runtime.context import RankContext

_LOGGER = get_logger(__name__)


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
        "lr": _given_lr(group),
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


def read_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the numbers that an optimizer was made with, such as lr and betas, for each of its groups."""
    known = getattr(optimizer, "defaults", {}).keys() - {"lr"}
    return [
        {"lr": _given_lr(group)}
        | {name: value for name, value in group.items() if name in known and type(value) in {int, float, tuple}}
        for group in optimizer.param_groups
    ]


def tell_unused(optimizer: torch.optim.Optimizer, given: list[dict[str, Any]], before: list[dict[str, Any]]) -> None:
    """Warn if an optimizer was made with other numbers than when the checkpoint was saved that has replaced them."""
    for used, now, then in zip(read_options(optimizer), given, before, strict=False):
        for name in now.keys() & then.keys():
            if now[name] not in {then[name], used[name]}:
                _LOGGER.warning(
                    f"{name}={now[name]} is not used: the optimizer continues with {used[name]}, as the checkpoint has it\n"
                    "  -> to change it, begin in another folder with the weights alone; without a scheduler, a callback's on_start may set it in trainer.optimizer.param_groups"
                )
                return


def _given_lr(group: dict[str, Any]) -> float:
    """What the user has given; a schedule has moved it by now."""
    return float(group.get("max_lr", group.get("initial_lr", group["lr"])))


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
