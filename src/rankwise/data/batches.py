"""What a worker sends to the training process: micro-batches, and how many samples are in them."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, final

from torch import Tensor
from torch.utils.data import default_collate

from rankwise.base.errors import DataError
from rankwise.data.schedule import divide

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_MOST_SHOWN = 8


class WorkerBatch(NamedTuple):
    """What a worker has made of one work item; a named tuple, as torch knows how to pin the memory of these.

    Attributes:
        batches: Micro-batches; None for one without samples that the training process has to fill in.
        counts: Samples in each.
        global_samples: Samples of the step over all ranks; -1 if the worker can't know.
        is_last: The stream has ended: no work item after this one will find a sample.
        num_read: Samples of the stream that are read by now, those that were left out included.
        state: The stream's state by now, pickled; None if it offers none.
        empty: A batch without samples, where the training process may need one.
        fault: Message and hint of the error to raise: the error itself may not travel, or not become whole again.
        kept: Which of the samples that were asked for are left, by their number among these; None: all of them, or
            nobody asks.
        collate_draws: The user's collate function was seen to draw random numbers.
    """

    batches: list[Any]
    counts: list[int]
    global_samples: int = -1
    is_last: bool = False
    num_read: int = 0
    state: bytes | None = None
    empty: Any = None
    fault: Sequence[str] | None = None
    kept: Sequence[int] | None = None
    collate_draws: bool = False


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How samples become a batch.

    Attributes:
        collate: The user's function; torch's by default.
        drops_none: Leave out samples that are None, instead of an error.
    """

    collate: Callable[[list[Any]], Any] = default_collate
    drops_none: bool = False

    def sift(self, samples: Sequence[Any], names: Sequence[int]) -> tuple[list[Any], list[int]]:
        """Return the samples that are there, and their names.

        Args:
            samples: Some may be None.
            names: The index of each, for errors.

        Raises:
            DataError: A sample is None, and nobody has said that it may be.
        """
        absent = [name for name, sample in zip(names, samples, strict=True) if sample is None]
        if absent and not self.drops_none:
            raise DataError(
                f"the data set returned None for {_name_samples(absent)}",
                hint="DataLoader(..., drop_none=True) leaves such samples out and keeps the ranks in step; or fix the data set",
            )
        pairs = [(one, name) for one, name in zip(samples, names, strict=True) if one is not None]
        return [one for one, _ in pairs], [name for _, name in pairs]

    def pack(self, samples: list[Any], names: Sequence[int]) -> Any:
        """Return the batch of some samples, at least one.

        Args:
            samples: What the data set has returned.
            names: Their indices, for the error.

        Raises:
            DataError: The collate function returned None.
        """
        try:
            batch = self.collate(samples)
        except Exception as error:
            leave_note(error, f"while collating {_name_samples(names)}")
            raise
        if batch is None:
            raise DataError(
                f"collate_fn returned None for the batch of {_name_samples(names)}",
                hint="a rank without a batch would keep the others waiting: let the data set return None for a bad sample, and pass drop_none=True",
            )
        return batch

    def pack_empty(self, sample: Any) -> Any:
        """Return a batch of no samples that looks like others: what differs between one sample and two is the batch's size."""
        # The user's function may change the samples that it gets.
        one, two, three = (_copy(sample) for _ in range(3))
        return _shrink(self.collate([one]), self.collate([two, three]))


def _copy(sample: Any) -> Any:
    """Return a deep copy, or the sample itself where it can't be copied: an open file, a tensor with a graph."""
    try:
        return copy.deepcopy(sample)
    except (TypeError, RuntimeError, ValueError, AttributeError, pickle.PicklingError):
        return sample


def _shrink(one: Any, two: Any) -> Any:
    """Return ``one`` without its sample; tensors keep all dims, and the one that grows with the samples gets size 0."""
    if isinstance(one, Tensor) or (hasattr(one, "shape") and hasattr(two, "shape")):
        grows = [dim for dim in range(len(one.shape)) if one.shape[dim] != two.shape[dim]]
        return (
            one[tuple(slice(0, 0) if dim in grows else slice(None) for dim in range(len(one.shape)))] if grows else one
        )
    if isinstance(one, Mapping):
        filled: Any = copy.copy(one)
        for key in one:
            filled[key] = _shrink(one[key], two[key])
        return filled
    if isinstance(one, tuple) and hasattr(one, "_fields"):
        named: Any = type(one)
        return named(*map(_shrink, one, two))
    if isinstance(one, (list, tuple)):
        return type(one)(map(_shrink, one, two)) if len(one) == len(two) else type(one)()
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        built = copy.copy(one)
        for field in dataclasses.fields(one):
            value = _shrink(getattr(one, field.name), getattr(two, field.name))
            object.__setattr__(built, field.name, value)  # a frozen one has no other door
        return built
    return one


def cut(items: list[Any], sizes: Iterable[int]) -> list[list[Any]]:
    """Cut into consecutive parts of these sizes."""
    return [items[start:end] for start, end in pairwise(accumulate(sizes, initial=0))]


def cut_evenly(items: list[Any], num_parts: int) -> list[list[Any]]:
    """Cut into consecutive parts whose sizes differ by one at most; the first ones are larger."""
    return cut(items, divide(len(items), num_parts))


def leave_note(error: Exception, text: str) -> None:
    """Add to what the user's code has raised what it was about, where Python has notes (3.11 on); it stays the same exception."""
    if hasattr(error, "add_note"):
        error.add_note(f"rankwise: {text}")


def _name_samples(names: Sequence[int]) -> str:
    shown = ", ".join(map(str, names[:_MOST_SHOWN]))
    more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return f"sample{'s' if len(names) > 1 else ''} {shown}{more}"
