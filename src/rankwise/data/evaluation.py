"""Runs a model over a data set on all ranks: each sample counts once, and no rank waits for one without batches.

torch's DistributedSampler repeats samples until the ranks have equally many, and a metric then counts these twice. Here the ranks
share what is there: they run the same number of batches, some of them smaller or empty, and add up sums.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankwise.base.errors import RankwiseError, UsageError
from rankwise.data.data_ranks import find_world
from rankwise.data.loader import DataLoader
from rankwise.data.metric_totals import MetricTotals
from rankwise.data.sample_position import current_place
from rankwise.data.splitting import find_own_splitting, is_stream
from rankwise.runtime.collectives import gather
from rankwise.runtime.context import find_current
from rankwise.runtime.nested import flatten, unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rankwise.runtime.context import RankContext


def evaluate(  # noqa: PLR0913 - most calls give four
    model: nn.Module,
    dataset: Any,
    metrics: Mapping[str, Any],
    *,
    batch_size: int,
    predict: Callable[[nn.Module, Any], tuple[Any, Any]] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    device: str | torch.device | None = None,
    ctx: RankContext | None = None,
) -> dict[str, float]:
    """Run a model over a data set on all ranks, and return metrics as if one process had seen every sample once.

    The model is taken out of DistributedDataParallel and put into evaluation mode, without gradients; afterwards
    everything is as before. A rank whose samples have run out skips its forward passes, unless the model's parameters
    are sharded over the ranks: then its forwards are collectives, and it takes empty batches.

    Args:
        model: The same on all ranks.
        dataset: As for ``DataLoader``. One that can only be iterated is read by every rank, and split.
        metrics: By name: those of ``rankwise.data.metrics``, one of your own, or of torchmetrics.
        batch_size: Samples of one forward pass of a rank.
        predict: Takes the model and a batch; returns outputs and targets for the metrics. None: a batch is a pair of
            inputs and targets, and the model takes the inputs.
        collate_fn: Makes a batch of a list of samples.
        num_workers: Processes that load, for each rank.
        device: Where batches go; None: where the model is.
        ctx: The job; None: the one that ``init()`` joined, or none.

    Returns:
        A number for each metric, equal on all ranks; of a metric with several results, one for each ``"name/result"``.

    Raises:
        DataError: There is no sample at all, or a sample or batch is None.
        UsageError: Outputs, targets or arguments that a metric can't work with; says what they are.
        CollectiveError: The ranks evaluate different data or metrics.

    Collective: every rank, with the same data set and metrics. The sums take one all-reduce at the end; a minimum or a
    maximum one more, and torchmetrics what it takes.
    """
    bare, loader, ctx = open_pass(
        model, dataset, batch_size, ctx, collate_fn=collate_fn, num_workers=num_workers, device=device
    )
    metric_totals, takes_empty = MetricTotals(metrics, loader.device, ctx), is_sharded(bare)
    predict = predict or predict_pair
    try:
        with evaluating(bare):
            for step in loader.steps():
                for batch in step:
                    if step.num_samples or takes_empty:
                        given = predict(bare, batch)
                        outputs, targets = _unpack(given, "predict returned", "outputs", "return (outputs, targets)")
                        if step.num_samples:
                            metric_totals.add(outputs, targets, step.num_samples)
        return metric_totals.conclude()
    except RankwiseError as error:
        if error.rank is None and ctx is not None:
            error.rank = ctx.rank
        raise


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel, compiled or not: its forward would exchange buffers."""
    inner = getattr(model, "_orig_mod", model)
    while isinstance(inner, DistributedDataParallel):
        model = inner = inner.module
    return model


def open_pass(
    model: nn.Module,
    dataset: Any,
    batch_size: int,
    ctx: RankContext | None,
    *,
    device: str | torch.device | None,
    **options: Any,
) -> tuple[nn.Module, DataLoader, RankContext | None]:
    """Return the bare model, a loader that deals each sample out once, in order, and who the ranks are."""
    ctx, bare = ctx or find_current(), unwrap(model)
    if type(batch_size) is not int or batch_size < 1:
        raise UsageError(f"batch_size={batch_size!r}", hint="batch_size is a whole number, 1 or more")
    world_size = ctx.data_size if ctx is not None else find_world()[0]
    if ctx is None and world_size > 1:
        raise UsageError(
            f"evaluate: {world_size} ranks that have not joined by rankwise can't add up their sums here",
            hint="call `rankwise.init()` instead of init_process_group()",
        )
    in_order: Mapping[str, Any] = {"split": "stride"} if is_stream(dataset) else {"shuffle": False}
    asked = find_own_splitting(dataset, by_rank=True) if is_stream(dataset) else None
    if asked is not None:
        raise UsageError(
            f"{type(dataset).__name__} asks for {asked} in its __iter__, as if to give each rank another part: then it can't be split over the ranks",
            hint="evaluate a data set that is the same on every rank",
        )
    first = next(bare.parameters(), None)
    where = first.device if device is None and first is not None else device
    size = batch_size * world_size
    return bare, DataLoader(dataset, global_batch=size, device=where, ctx=ctx, **in_order, **options), ctx


def is_sharded(model: nn.Module) -> bool:
    """Tell whether a forward pass is a collective: FSDP2 and tensor parallel have DTensors, FSDP1 wraps modules, pipelines have stages."""
    if hasattr(model, "forward_is_collective"):
        return True
    return any(hasattr(one, "full_tensor") and hasattr(one, "to_local") for one in model.parameters()) or any(
        type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and each module's own mode again afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        # Not inference_mode: what a module keeps from it, a table of positions say, could never be trained with again.
        with torch.no_grad():
            yield
    finally:
        for module, was_training in modes:
            module.training = was_training


def predict_pair(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """Take a batch for a pair of inputs and targets; return outputs and targets."""
    hint = "pass predict=lambda model, batch: (outputs, targets)"
    inputs, targets = _unpack(batch, "a batch is", "inputs", hint)
    return model(inputs), targets


def _unpack(given: Any, source: str, name: str, hint: str) -> tuple[Any, Any]:
    if not isinstance(given, (list, tuple)) or len(given) != 2:
        size = f" of {len(given)}" if isinstance(given, (list, tuple)) else ""
        raise UsageError(
            f"evaluate: {source} a {type(given).__name__}{size}, not a pair of {name} and targets", hint=hint
        )
    first, second = given
    return first, second


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

    As for ``evaluate``: evaluation mode, no gradients, out of DistributedDataParallel; every sample comes once. Rank
    0's memory must hold all outputs: of what is too large for that each rank writes a file of its own in ``forward``.

    Args:
        model: The same on all ranks.
        dataset: As for ``DataLoader``. One that can only be iterated is read by every rank, and split.
        batch_size: Samples of one forward pass of a rank.
        forward: Takes the model and a batch; returns a tensor, or a container of tensors, whose first dim counts the
            batch's samples. None: the model takes the batch; of a pair of inputs and targets the inputs.
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
