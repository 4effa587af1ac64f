"""Clips gradients by the norm of the whole model, however it is spread over the ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rankwise.base.errors import UsageError
from rankwise.parallel.dtensors import scale_to
from rankwise.parallel.strategy import Strategy
from rankwise.parallel.strategy_lookup import find_strategy

if TYPE_CHECKING:
    from rankwise.runtime.context import RankContext


def clip_grad_norm_(model: nn.Module, max_norm: float, *, ctx: RankContext | None = None) -> Tensor:
    """Scale a model's gradients, in place, so that their 2-norm over the whole model is at most ``max_norm``.

    ``torch.nn.utils.clip_grad_norm_`` for every composition: it refuses models of which some parameters are split along
    one axis of a mesh and others are not, and of a pipeline it sees one stage only.

    Args:
        model: What an ``apply_*`` has returned, or any other.
        max_norm: The bound; ``math.inf`` only measures.
        ctx: The job; None: the one that ``init()`` joined, if one is needed.

    Returns:
        The norm before, a scalar, the same on every rank.

    Raises:
        UsageError: ``max_norm`` is not a positive number, or ``model`` is not a module.

    Collective: every rank, if the model's parameters are sharded.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"clip_grad_norm_ takes the model, but got a {type(model).__name__}",
            rank=None if ctx is None else ctx.rank,
            hint="clip_grad_norm_(model, 1.0): how the model is spread determines how its norm is computed",
        )
    if not max_norm > 0:
        raise UsageError(
            f"clip_grad_norm_: max_norm is {max_norm!r}, and gradients have no norm below 0",
            rank=None if ctx is None else ctx.rank,
            hint="pass a positive number; math.inf only measures",
        )
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    strategy = find_strategy(model, ctx) or Strategy(model, ctx)
    with torch.no_grad():
        norm = strategy.total_norm(gradients)
        if not math.isinf(max_norm):
            scale_to(gradients, max_norm, norm)
    return norm
