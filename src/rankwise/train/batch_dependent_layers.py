"""Layers whose result depends on how the samples are dealt out: with them W ranks are not one process, and users are to know it."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from rankwise.parallel.sync_batchnorm import SyncBatchNorm

if TYPE_CHECKING:
    from rankwise.runtime.context import RankContext

_MOST_NAMED = 3


def warn_of_batch_dependent_layers(model: nn.Module, ctx: RankContext) -> None:
    """Warn, on rank 0, of layers in training mode that make the losses of several ranks differ from those of one process.

    Args:
        model: As it is trained.
        ctx: The job.
    """
    if ctx.world_size == 1 or not ctx.is_main:
        return
    training = [(name, layer) for name, layer in model.named_modules() if layer.training]
    drops = [name for name, layer in training if _drops(layer)]
    norms = [name for name, layer in training if _uses_own_batch(layer)]
    lines = []
    if drops:
        lines.append(
            f"{_name_some(drops)} drop{'s' if len(drops) == 1 else ''} by generators of each rank "
            "(rankwise.train.replace_dropout(model) makes them drop the same at any number of ranks)"
        )
    if norms:
        lines.append(
            f"{_name_some(norms)} normalise{'s' if len(norms) == 1 else ''} by the samples of one rank "
            "(TrainerConfig(sync_batchnorm=True) takes those of all)"
        )
    if lines:
        warnings.warn(
            f"the losses of {ctx.world_size} ranks will differ from those of one process: {'; '.join(lines)}",
            # The user's line that calls `fit`, above which are that, the block that it runs in, and contextlib's entry
            # of it.
            stacklevel=5,
        )


def _drops(layer: nn.Module) -> bool:
    if isinstance(layer, _DropoutNd):
        return bool(layer.p > 0)
    return isinstance(layer, (nn.MultiheadAttention, nn.RNNBase)) and layer.dropout > 0


def _uses_own_batch(layer: nn.Module) -> bool:
    return isinstance(layer, _BatchNorm) and not isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm))


def _name_some(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(name or "the model" for name in names[:_MOST_NAMED]) + more
