"""Reads the samples of a micro-batch from a data set with ``__getitem__``, or from tensors; stands in each worker."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch.utils.data import Subset, TensorDataset, default_collate, get_worker_info

from rankwise.base.errors import DataError
from rankwise.data.batches import Packing, WorkerBatch, leave_note
from rankwise.data.seeding import Traces, kept_generators, seed_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

#: To make a batch of none, a sample is needed; so many are tried before it is said that there is none.
_MOST_TRIED = 100


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MapWorkItem:
    """A micro-batch to read.

    Attributes:
        epoch: Of which epoch.
        indices: Its samples; perhaps none.
        places: Where each stands in the epoch, if a sample may come twice; else None.
        other: A sample of the same step that some rank has: an empty batch is made after it.
    """

    epoch: int
    indices: list[int]
    places: tuple[int, ...] | None = None
    other: int | None = None


@final
class MapReader:
    """The data set as torch's DataLoader sees it: one request, one worker batch.

    Args:
        dataset: The user's.
        packing: How samples become a batch.
        seed: Seeds each sample by (seed, epoch, index); None: not at all.
    """

    def __init__(self, dataset: Any, packing: Packing, *, seed: int | None) -> None:
        self._dataset, self._packing, self._seed = dataset, packing, seed
        self._epoch: int | None = None
        self._table: Table | None = None
        # Whether reading has drawn a random number yet: seeding each sample costs more than reading a small one.
        self._draws, self._looked_at_collate = False, False

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, work_item: MapWorkItem) -> WorkerBatch:
        """Read one micro-batch; torch calls this by its own protocol for reading several samples at once."""
        if work_item.epoch != self._epoch or (self._table is not None and not self._table.is_of(self._dataset)):
            # Between two epochs a user may put other samples into a data set.
            self._table = find_table(self._dataset, self._packing.collate)
        if self._table is not None and work_item.indices:
            self._epoch = work_item.epoch
            return WorkerBatch([self._table.take(work_item.indices)], [len(work_item.indices)])
        try:
            if self._seed is None:
                return self._read(work_item, None)
            if not self._draws:
                traces = Traces()
                batch_of_worker = self._read(work_item, None)
                if not traces.are_there():
                    return batch_of_worker
                # From here on samples are seeded; this micro-batch is read again, and is what it would have been.
                self._draws = True
                traces.remove()
            if get_worker_info() is not None:
                return self._read(work_item, self._seed)
            with kept_generators():
                return self._read(work_item, self._seed)
        except DataError as error:
            # By hand: torch would wrap it into text, and nobody could read hint and rank from it.
            return WorkerBatch([], [], fault=(error.message, error.hint or ""))

    def _read(self, work_item: MapWorkItem, seed: int | None) -> WorkerBatch:
        if work_item.epoch != self._epoch:
            self._epoch = work_item.epoch
            tell_epoch(self._dataset, work_item.epoch)
        fetched = self._fetch(work_item, seed)
        samples, names = self._packing.sift(fetched, work_item.indices)
        is_whole = len(samples) == len(fetched)
        kept = None if is_whole else [number for number, one in enumerate(fetched) if one is not None]
        if samples:
            traces = None if seed is None or self._looked_at_collate else Traces()
            batch = self._packing.pack(samples, names)
            self._looked_at_collate |= traces is not None
            draws = traces is not None and traces.are_there()
            return WorkerBatch([batch], [len(samples)], kept=kept, collate_draws=draws)
        return WorkerBatch([self._packing.pack_empty(self._find_any(work_item, seed))], [0], kept=kept)

    def _fetch(self, work_item: MapWorkItem, seed: int | None) -> Sequence[Any]:
        indices = work_item.indices
        if self._seed is None and indices and getattr(self._dataset, "__getitems__", None):
            try:
                several: Sequence[Any] = self._dataset.__getitems__(indices)
            except Exception as error:
                leave_note(error, f"while reading samples {indices} of the data set, in epoch {work_item.epoch}")
                raise
            return several
        places: Sequence[int | None] = work_item.places or [None] * len(indices)
        return [self._fetch_one(work_item.epoch, *pair, seed) for pair in zip(indices, places, strict=True)]

    def _fetch_one(self, epoch: int, index: int, place: int | None, seed: int | None) -> Any:
        if seed is not None:
            # A sample that weights draw several times in an epoch is augmented in several ways.
            path = (epoch, index) if place is None else (epoch, index, place)
            seed_for(seed, "sample", *path)
        try:
            return self._dataset[index]
        except Exception as error:
            leave_note(error, f"while reading sample {index} of the data set, in epoch {epoch}")
            raise

    def _find_any(self, work_item: MapWorkItem, seed: int | None) -> Any:
        first = work_item.indices[0] if work_item.other is None else work_item.other
        size = len(self._dataset)
        tried = [(first + step) % size for step in range(min(size, _MOST_TRIED))]
        for index in tried:
            sample = self._fetch_one(work_item.epoch, index, None, seed)
            if sample is not None:
                return sample
        raise DataError(
            f"all of the {len(tried)} samples from {first} on are None, and an empty batch must look like some sample",
            hint="find out why the data set drops everything there",
        )


def tell_epoch(dataset: Any, epoch: int) -> None:
    """Call the data set's own ``set_epoch`` if it has one."""
    found = getattr(dataset, "set_epoch", None)
    if callable(found):
        found(epoch)


@final
class Table:
    """The rows of a ``TensorDataset``, all or some: reading a batch is one indexing of each, and draws no random numbers.

    Args:
        tensors: Each with the samples along its first dimension.
        rows: Which row each sample is; None: the sample's own number.
    """

    def __init__(self, tensors: Sequence[Tensor], rows: Tensor | None) -> None:
        self._tensors, self._rows = tuple(tensors), rows
        self._source = tensors

    def is_of(self, dataset: Any) -> bool:
        """Tell whether a data set's tensors are still these."""
        while type(dataset) is Subset:
            dataset = dataset.dataset
        return dataset.tensors is self._source

    def take(self, indices: Sequence[int]) -> list[Tensor]:
        """Return the batch that ``default_collate`` would make of these samples.

        Args:
            indices: Of the samples.
        """
        # A third of the time of torch.tensor(), which looks at each number.
        chosen = torch.frombuffer(array("q", indices), dtype=torch.int64)
        if self._rows is not None:
            chosen = self._rows.index_select(0, chosen)
        return [tensor.index_select(0, chosen.to(tensor.device)) for tensor in self._tensors]


def find_table(dataset: Any, collate: Callable[..., Any]) -> Table | None:
    """Return the table that a data set is, or None: a class derived from torch's may do something else with a sample.

    Args:
        dataset: The user's.
        collate: How samples become a batch.
    """
    rows: Tensor | None = None
    while type(dataset) is Subset:
        try:
            outer = torch.as_tensor(dataset.indices, dtype=torch.long)
        except (TypeError, ValueError, RuntimeError):
            return None
        if outer.numel() and int(outer.min()) < 0:
            return None
        rows = outer if rows is None else outer[rows]
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset or collate is not default_collate:
        return None
    # A sparse or nested tensor is indexed in its own way, and a gradient would be cut.
    if not all(
        tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.requires_grad
        and type(tensor) is torch.Tensor
        for tensor in dataset.tensors
    ):
        return None
    return Table(dataset.tensors, rows)
