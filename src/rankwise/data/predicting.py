"""Runs a model over a data set on all ranks and brings its outputs together: one for each sample, in the data set's order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rankwise.base.errors import UsageError
from rankwise.data.evaluation import evaluating, is_sharded, open_pass
from rankwise.data.place import current_place
from rankwise.runtime.collectives import gather
from rankwise.runtime.nested import flatten, unflatten

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from rankwise.runtime.context import RankContext


def predict(
    model: nn.Module,
    dataset: Any,
    *,
    batch_size: int,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    device: str | torch.device | None = None,
    ctx: RankContext | None = None,
) -> Any:
    """Run a model over a data set on all ranks, and return the outputs of all samples, as one process would.

    As for ``evaluate``: evaluation mode, no gradients, out of DistributedDataParallel; every sample comes once. Rank 0's memory must
    hold all outputs: of what is too large for that each rank writes a file of its own in ``forward``.

    Args:
        model: The same on all ranks.
        dataset: As for ``DataLoader``. One that can only be iterated is read by every rank, and split.
        batch_size: Samples of one forward pass of a rank.
        forward: Takes the model and a batch; returns a tensor, or a container of tensors, whose first dim counts the batch's samples.
            None: the model takes the batch; of a pair of inputs and targets the inputs.
        collate_fn: Makes a batch of a list of samples.
        num_workers: Processes that load, for each rank.
        device: Where batches go; None: where the model is.
        ctx: The job; None: the one that ``init()`` joined, or none.

    Returns:
        On rank 0 what ``forward`` returns, for all samples in the data set's order, on the CPU; elsewhere None.

    Raises:
        UsageError: The outputs are not tensors of as many rows as the batch has samples; or there is no sample at all.
        CollectiveError: The ranks predict different data.

    Collective: every rank, with the same data set. The outputs are sent once, at the end.
    """
    bare, loader, ctx = open_pass(
        model, dataset, batch_size, ctx, collate_fn=collate_fn, num_workers=num_workers, device=device
    )
    takes_empty, forward = is_sharded(bare), forward or _call
    positions: list[int] = []
    parts: list[Any] = []
    with evaluating(bare):
        for step in loader.steps():
            for batch in step:
                if not step.num_samples and not takes_empty:
                    continue
                outputs = forward(bare, batch)
                if step.num_samples:
                    parts.append(_take(outputs, step.num_samples, ctx))
                    positions += current_place().positions
    mine = (positions, _concat(parts) if parts else None)
    gathered = [mine] if ctx is None else gather(mine)
    if gathered is None:
        return None
    return _put_in_order([gathered[rank] for rank in ctx.data_ranks] if ctx is not None else gathered)


def _call(model: nn.Module, batch: Any) -> Any:
    return model(batch[0] if isinstance(batch, (list, tuple)) and len(batch) == 2 else batch)


def _take(outputs: Any, num_samples: int, ctx: RankContext | None) -> Any:
    """Return outputs on the CPU, after a look at their sizes."""
    leaves = flatten(outputs)
    for path, leaf in leaves:
        shape = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None
        if not shape or shape[0] != num_samples:
            given = f"a {type(leaf).__name__}" if shape is None else f"a tensor of shape {shape}"
            raise UsageError(
                f"predict: forward returned {given}{f' at {path}' if path else ''} for a batch of {num_samples} samples",
                rank=None if ctx is None else ctx.rank,
                hint="return tensors whose first dim counts the samples: forward=lambda model, batch: model(batch).logits, say",
            )
    return unflatten(outputs, [leaf.detach().to("cpu", copy=True) for _, leaf in leaves])


def _concat(parts: list[Any]) -> Any:
    columns = zip(*(flatten(part) for part in parts), strict=True)
    return unflatten(parts[0], [torch.cat([leaf for _, leaf in column]) for column in columns])


def _put_in_order(gathered: list[tuple[list[int], Any]]) -> Any:
    """Return the outputs of all ranks, sorted by their samples' positions."""
    positions = torch.tensor([one for places, _ in gathered for one in places])
    if not len(positions):
        raise UsageError("predict: the data set has no sample", hint="look at its length")
    outputs = _concat([part for places, part in gathered if places])
    order = positions.argsort()
    return unflatten(outputs, [leaf[order] for _, leaf in flatten(outputs)])
