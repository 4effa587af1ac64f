"""A batch of a pipeline: described, so that stages can compare what they were given, and cut into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from rankwise.parallel.model_check import hash_tensor
from rankwise.parallel.trees import describe, list_tensors, put_tensors, take_tensors


@final
@dataclass(frozen=True, slots=True)
class Chunk:
    """A micro-batch.

    Attributes:
        batch: What the loss function is given.
        share: Which part of the whole batch's samples it has.
        num_samples: How many.
    """

    batch: Any
    share: float
    num_samples: int


def split(batch: Any, number: int) -> list[Chunk]:
    """Cut a batch along dim 0 into so many micro-batches, the first ones larger by a sample at most.

    Args:
        batch: Nested tensors; those of one element along dim 0, and all that is no tensor, are given to each.
        number: Of micro-batches; some are of no samples if the batch has fewer.
    """
    tree, tensors = take_tensors(batch)
    total = max((one.shape[0] for one in tensors if one.dim()), default=0)
    pieces = [
        one.tensor_split(number) if one.dim() and one.shape[0] == total else [one] * number for one in tensors
    ]
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
