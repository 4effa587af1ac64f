"""A batch of a pipeline, cut into micro-batches, and its loss: what the model is called with, and what all micro-batches have together."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from rankwise.base.errors import UsageError
from rankwise.parallel.model_check import hash_tensor
from rankwise.parallel.pipeline_plan import find_autocast
from rankwise.parallel.trees import describe, list_tensors, put_tensors, take_tensors
from rankwise.runtime.nested import flatten, unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


Call = tuple[tuple[Any, ...], dict[str, Any]]


@final
@dataclass(frozen=True, slots=True)
class Chunk:
    """A micro-batch, and which share of the whole batch's samples it has."""

    batch: Any
    share: float
    num_samples: int


def split(batch: Any, number: int) -> list[Chunk]:
    """Cut a batch along dim 0 into so many micro-batches, the first ones larger by a sample at most; some have none if the batch has fewer.

    What has one element along dim 0, and all that is no tensor, is given to each.
    """
    tree, tensors = take_tensors(batch)
    total = max((one.shape[0] for one in tensors if one.dim()), default=0)
    pieces = [one.tensor_split(number) if one.dim() and one.shape[0] == total else [one] * number for one in tensors]
    sizes = [total // number + (place < total % number) for place in range(number)]
    return [
        Chunk(put_tensors(tree, [one[place] for one in pieces]), size / total if total else 0.0, size)
        for place, size in enumerate(sizes)
    ]


def describe_batch(batch: Any) -> tuple[str, str | None]:
    """Return a batch's form as text, which begins with the number of samples, and what is wrong with it."""
    tensors = list_tensors(batch)
    sizes = sorted({one.shape[0] for one in tensors if one.dim()} - {1})
    described = f"{max(sizes, default=1 if tensors else 0)} samples: {'; '.join(describe(batch))[:2000]}"
    if not tensors:
        return described, f"a step of a pipeline was given a {type(batch).__name__} without tensors"
    if len(sizes) > 1:
        return described, f"the tensors of a batch have {' and '.join(map(str, sizes))} samples"
    return described, None


def count_samples(described: str) -> int:
    """Return how many samples a batch has, by its description."""
    return int(described.partition(" ")[0])


def digest(batch: Any) -> str:
    """Return a digest of a batch's values."""
    return " ".join(map(hash_tensor, list_tensors(batch)))


# ------------------------------------------------------------------ the loss


class _CalledError(BaseException):
    """Ends a loss function where it calls the model; no Exception, which it might catch."""


@final
class Stub:
    """Stands for the model where a loss function is asked what it calls the model with, or is given what the pipeline has computed."""

    def __init__(self, model: nn.Module, output: Any = None, *, is_asked: bool) -> None:
        self._model, self._output, self._is_asked = model, output, is_asked
        self.call: Call | None = None
        self.autocast: tuple[str, torch.dtype] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Note the call."""
        if self.call is not None:
            raise UsageError(
                "the loss function calls the model twice", hint="a pipeline computes one forward for each micro-batch"
            )
        self.call = (args, kwargs)
        self.autocast = find_autocast()
        if self._is_asked:
            raise _CalledError
        return self._output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def ask(model: nn.Module, batch: Any, loss: Callable[[Any, Any], Any]) -> tuple[Call, Any]:
    """Find out what a loss function calls the model with, and under which autocast; one that doesn't call it is refused."""
    stub = Stub(model, is_asked=True)
    with suppress(_CalledError):
        loss(stub, batch)
    if stub.call is None:
        raise UsageError(
            "the loss function doesn't call the model that it is given",
            hint="loss(model, batch) calls model(inputs) once, and not a model from elsewhere",
        )
    return stub.call, stub.autocast


def has_count(value: Any) -> bool:
    """Whether a loss function returned a sum and its count."""
    value = value["loss"] if isinstance(value, dict) else value
    return isinstance(value, (tuple, list))


def read_loss(value: Any, rank: int) -> Tensor:
    """Return the loss in what a loss function returned."""
    value = value.get("loss") if isinstance(value, dict) else value
    loss = value[0] if isinstance(value, (tuple, list)) and len(value) == 2 else value
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise UsageError(
            f"the loss function returned {type(loss).__name__} {tuple(loss.shape) if isinstance(loss, Tensor) else ''} without a gradient, or no scalar",
            rank=rank,
            hint='return a scalar tensor (the mean over the batch\'s samples), (sum, count), or a dict of these with the key "loss"',
        )
    return loss


def detach(value: Any) -> Any:
    """Return what a loss function returned without its graph; numbers as tensors."""
    if isinstance(value, Tensor):
        return value.detach()
    leaves = [
        one.detach() if isinstance(one, Tensor) else torch.tensor(float(one), dtype=torch.float64)
        for _, one in flatten(value)
    ]
    return unflatten(value, leaves)


def combine(returned: Sequence[Any], chunks: Sequence[Chunk]) -> Any:
    """Return what a loss function would have returned for all micro-batches together: means are weighed, sums and counts added up."""
    kept = [(value, chunk.share) for value, chunk in zip(returned, chunks, strict=True) if chunk.num_samples]
    if not kept:
        kept = [(returned[0], 0.0)]
    first = kept[0][0]
    if isinstance(first, dict):
        return {name: _add([(value[name], share) for value, share in kept]) for name in first}
    return _add(kept)


def _add(parts: Sequence[tuple[Any, float]]) -> Any:
    if isinstance(parts[0][0], (tuple, list)):
        return tuple(torch.stack([value[place] for value, _ in parts]).sum() for place in range(2))
    if len(parts) == 1 and parts[0][1] == 0.0:
        return parts[0][0].new_zeros(())
    values = torch.stack([value.reshape(()) for value, _ in parts])
    return (values * values.new_tensor([share for _, share in parts])).sum()
