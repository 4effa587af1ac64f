"""Which implementation of an optimizer is used: the fused one where the user has left it open."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from rankwise.parallel.dtensors import group_by_layout

if TYPE_CHECKING:
    from torch.optim import Optimizer

#: What has a fused kernel, and where (torch 2.8 and newer).
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
#: Of these, for sharded parameters too.
_FUSED_SHARDED = (torch.optim.Adam, torch.optim.AdamW)
_DEVICES = ("cpu", "cuda", "mps", "xpu")


def choose_fused(optimizer: Optimizer) -> bool:
    """Let an optimizer of torch run fused, if the user has left open how it runs, and it has not made a step yet.

    By itself torch goes through the parameters one by one on a CPU; fused AdamW takes less than half of that time
    there. The results differ by rounding only.

    Args:
        optimizer: Changed in place.

    Returns:
        Whether it runs fused now.
    """
    groups = optimizer.param_groups
    if all(group.get("fused") for group in groups):
        return True
    parameters = [parameter for group in groups for parameter in group["params"]]
    # Of one whose states are sharded, the one inside makes the steps.
    kind = type(getattr(optimizer, "optim", optimizer))
    devices = {parameter.device.type for parameter in parameters}
    can_be = (
        len(devices) == 1
        and devices.issubset(_DEVICES)
        and kind in _FUSED
        and not optimizer.state
        and len(group_by_layout(parameters)) == 1
        and all(torch.is_floating_point(parameter) and not parameter.is_sparse for parameter in parameters)
        and all(_is_open(group) for group in groups)
    )
    if not can_be:
        return False
    if isinstance(parameters[0], DTensor) and kind not in _FUSED_SHARDED:
        # Each operator on a DTensor costs as much as a small layer: on lists there are few.
        for group in groups:
            group["foreach"] = True
        return False
    for group in groups:
        group["fused"] = True
    # What the constructor does for fused=True: a GradScaler leaves the unscaling to such an optimizer.
    optimizer._step_supports_amp_scaling = kind is type(optimizer)
    return True


def _is_open(group: dict[str, object]) -> bool:
    """Whether the user has neither chosen an implementation nor something that the fused one can't do."""
    chosen = any(group.get(name) is not None for name in ("fused", "foreach"))
    special = any(group.get(name) for name in ("differentiable", "capturable"))
    return not chosen and not special and not isinstance(group.get("lr"), torch.Tensor)
