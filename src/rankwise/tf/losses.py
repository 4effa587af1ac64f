"""Losses of replicas whose gradients are added: each is divided by what all replicas have together."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

from rankwise.base.errors import UsageError
from rankwise.tf.contexts import find_frame

if TYPE_CHECKING:
    from collections.abc import Iterator


def compute_average_loss(
    per_example_loss: Tensor,
    sample_weight: Tensor | float | None = None,
    global_batch_size: int | None = None,
) -> Tensor:
    """Return this replica's part of the mean loss over the global batch: gradients of replicas are added, not averaged.

    Args:
        per_example_loss: Shape (batch, ...), of a loss with ``reduction="none"``; the batch may be empty.
        sample_weight: Multiplied with it.
        global_batch_size: Samples of the step over all replicas; None: those here times the number of replicas, which
            is wrong where the last batch of an epoch is split unevenly.

    Returns:
        A 0-d tensor: the sum divided by ``global_batch_size``.

    Raises:
        UsageError: The loss is a mean already, the size makes no sense, or this is not called by a replica's function.
    """
    num_replicas = _count_replicas("compute_average_loss")
    if per_example_loss.dim() == 0:
        raise UsageError(
            "compute_average_loss() of a loss without a batch dim: its mean was over this replica's samples only",
            hint='compute it with reduction="none"',
        )
    if global_batch_size is not None and (type(global_batch_size) is not int or global_batch_size < 1):
        raise UsageError(
            f"global_batch_size={global_batch_size!r}",
            hint="samples of one step over all replicas, 1 or more",
        )
    weighed = per_example_loss if sample_weight is None else per_example_loss * sample_weight
    return weighed.sum() / (global_batch_size or max(1, per_example_loss.shape[0] * num_replicas))


def scale_regularization_loss(regularization_loss: Any) -> Tensor:
    """Return the sum of losses that do not depend on the batch, such as weight decay, divided by the number of replicas.

    Args:
        regularization_loss: A tensor, or several.
    """
    num_replicas = _count_replicas("scale_regularization_loss")
    parts = regularization_loss if isinstance(regularization_loss, (list, tuple)) else [regularization_loss]
    return torch.stack([part.sum() for part in parts]).sum() / num_replicas


def _count_replicas(what: str) -> int:
    frame = find_frame()
    if frame is not None and frame[1] is None:
        raise UsageError(
            f"{what}() outside of a replica's function", rank=frame[0].rank,
            hint="call it in the function that strategy.run() is given",
        )  # fmt: skip
    return 1 if frame is None else frame[0].num_replicas_in_sync


@contextmanager
def refusing_local_means(rank: int) -> Iterator[None]:
    """Refuse loss modules that average over this replica's samples while training, as tf refuses its own."""

    def look(module: Any, _: Any) -> None:
        is_loss = isinstance(module, torch.nn.modules.loss._Loss)
        if is_loss and module.reduction == "mean" and torch.is_grad_enabled():
            raise UsageError(
                f"{type(module).__name__}() averages over the samples of this replica, and gradients of replicas are added", rank=rank,
                hint=f'{type(module).__name__}(reduction="none"), and compute_average_loss(losses, global_batch_size=...)',
            )  # fmt: skip

    handle = register_module_forward_pre_hook(look)
    try:
        yield
    finally:
        handle.remove()
