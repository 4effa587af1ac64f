"""Data for replicas: global batches split among them as tf splits them, or batches that each replica makes for itself."""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass
from enum import Enum
from itertools import chain, islice, repeat
from typing import TYPE_CHECKING, Any, final

import torch
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from rankwise.base.errors import DataError, UsageError
from rankwise.data.distributed_sampler import DistributedSampler
from rankwise.data.loader import DataLoader as OurLoader
from rankwise.data.prefetch import move_tree
from rankwise.runtime.collectives import all_gather, all_reduce, broadcast
from rankwise.runtime.context import current
from rankwise.tf.missing import NamedMembers
from rankwise.tf.values import count_rows, cut_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


class AutoShardPolicy(Enum, metaclass=NamedMembers):
    """How ``experimental_distribute_dataset`` splits a data set."""

    AUTO = "AUTO"
    DATA = "DATA"
    FILE = "FILE"
    OFF = "OFF"


@final
@dataclass(frozen=True, slots=True)
class InputOptions:
    """How data reaches a replica.

    Attributes:
        experimental_fetch_to_device: Whether batches are put on the replica's device.
        auto_shard_policy: What tf takes from the data set's own options. AUTO and DATA: each global batch is split, so
            that all replicas together have what one process has. FILE: the parts of a ``ConcatDataset`` are files, and
            each replica reads its own. OFF: each replica reads all of it, in batches of its own part of the size.
    """

    experimental_fetch_to_device: bool = True
    auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO


@final
@dataclass(frozen=True, slots=True)
class InputContext:
    """For which replica a function makes a data set.

    Attributes:
        num_input_pipelines: How many data sets are made: one for each replica (each worker of a parameter server).
        input_pipeline_id: Which of them this is, from 0.
        num_replicas_in_sync: How many replicas share a global batch.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return a replica's part of a global batch.

        Args:
            global_batch_size: Samples of one step over all replicas.

        Raises:
            UsageError: It can't be divided evenly.
        """
        if global_batch_size % self.num_replicas_in_sync:
            raise UsageError(
                f"global_batch_size={global_batch_size} for {self.num_replicas_in_sync} replicas",
                hint="choose a multiple; experimental_distribute_dataset splits any size",
            )
        return global_batch_size // self.num_replicas_in_sync


@final
class DistributedDataset:
    """Batches for this replica: as many on all replicas, some of which may have no rows.

    Args:
        open_pass: Begins a pass.
        length: How many batches a pass has; None: not known.
        device: Where they go; None: they stay where they are.
    """

    def __init__(self, open_pass: Callable[[], Iterator[Any]], length: int | None, device: torch.device | None) -> None:
        self._open, self._length, self._device = open_pass, length, device

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass.

        Collective: every replica.
        """
        batches = self._open()
        device = self._device
        moves = device is not None and device.type != "cpu"
        return (move_tree(one, device) for one in batches) if moves else batches

    def __len__(self) -> int:
        """Return how many batches a pass has."""
        if self._length is None:
            raise TypeError("the number of batches of this data set is not known")
        return self._length


def split_dataset(
    dataset: Any, num_replicas: int, replica_id: int, options: InputOptions, device: torch.device
) -> DistributedDataset:
    """Return what a replica has of the global batches of a data set; see ``Strategy.experimental_distribute_dataset``.

    Collective: every rank, if there are several replicas.
    """
    target = device if options.experimental_fetch_to_device else None
    if isinstance(dataset, OurLoader):
        raise UsageError(
            "experimental_distribute_dataset() of a rankwise.DataLoader, which gives each rank its part by itself",
            hint="iterate it as it is",
        )
    has_index = isinstance(dataset, DataLoader) and not isinstance(dataset.dataset, IterableDataset)
    is_single = isinstance(dataset, DataLoader) and dataset.batch_sampler is None
    if is_single or (hasattr(dataset, "__getitem__") and not isinstance(dataset, (list, tuple))):
        raise UsageError(
            f"experimental_distribute_dataset() of a {type(dataset).__name__} that gives single samples",
            hint="DataLoader(dataset, batch_size=GLOBAL_BATCH_SIZE): a batch is split among the replicas",
        )
    policy = options.auto_shard_policy
    if not has_index:
        if policy not in {AutoShardPolicy.AUTO, AutoShardPolicy.DATA}:
            raise UsageError(
                f"AutoShardPolicy.{policy.name} with a {type(dataset).__name__} without an index",
                hint="distribute_datasets_from_function makes a data set for each replica",
            )
        return DistributedDataset(
            lambda: (_cut(batch, num_replicas, replica_id) for batch in dataset),
            _find_length(dataset),
            target,
        )
    if isinstance(dataset.sampler, (TorchDistributedSampler, DistributedSampler)):
        raise UsageError(
            "experimental_distribute_dataset() of a loader with a DistributedSampler: it would be split twice",
            hint="leave out the sampler, and give the loader the global batch size",
        )
    shares = _Shares(dataset, num_replicas, replica_id, policy)
    return DistributedDataset(shares.open, len(shares), target)


def find_part(num_rows: int, num_replicas: int, replica_id: int) -> slice:
    """Return which rows of a batch a replica has: tf's split, where the last replicas have fewer, or none."""
    size = -(-num_rows // num_replicas)
    return slice(min(num_rows, replica_id * size), min(num_rows, (replica_id + 1) * size))


def _cut(batch: Any, num_replicas: int, replica_id: int) -> Any:
    return cut_rows(batch, find_part(count_rows(batch), num_replicas, replica_id))


def _find_length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:
        return None


@final
class _Shares:
    """Indices of this replica's samples, batch by batch, in place of a loader's batch sampler: it reads no others.

    The order is drawn anew in each pass, from a seed that the first replica has drawn.
    """

    def __init__(self, loader: DataLoader[Any], num_replicas: int, replica_id: int, policy: AutoShardPolicy) -> None:
        self._num_replicas, self._replica_id, self._policy = num_replicas, replica_id, policy
        self._pass, self._rows = 0, deque[int]()
        seed = int(torch.randint(1 << 62, ()).item())
        self._seed = broadcast(seed) if num_replicas > 1 else seed
        self._batches, dataset = loader.batch_sampler, loader.dataset
        self._own_size: int | None = None
        if policy in {AutoShardPolicy.FILE, AutoShardPolicy.OFF}:
            dataset = self._choose_own(loader)
        self._loader: DataLoader[Any] = DataLoader(
            dataset, batch_sampler=self, num_workers=loader.num_workers, collate_fn=loader.collate_fn, pin_memory=loader.pin_memory,
            timeout=loader.timeout, worker_init_fn=loader.worker_init_fn, multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator, prefetch_factor=loader.prefetch_factor, persistent_workers=loader.persistent_workers,
        )  # fmt: skip

    def _choose_own(self, loader: DataLoader[Any]) -> Any:
        """Read all of the data, or the files that are ours, in batches of our own size."""
        if not isinstance(loader.batch_sampler, BatchSampler) or loader.batch_size is None:
            raise UsageError(
                f"AutoShardPolicy.{self._policy.name} with a {type(loader.batch_sampler).__name__}",
                hint="DataLoader(dataset, batch_size=GLOBAL_BATCH_SIZE)",
            )
        part = find_part(loader.batch_size, self._num_replicas, self._replica_id)
        size, dataset, self._length = max(1, part.stop - part.start), loader.dataset, 0
        if self._policy is AutoShardPolicy.FILE:
            files = dataset.datasets if isinstance(dataset, ConcatDataset) else []
            if len(files) < self._num_replicas:
                raise UsageError(
                    f"AutoShardPolicy.FILE: {len(files)} files for {self._num_replicas} replicas",
                    hint="a ConcatDataset has as many files as parts; AutoShardPolicy.DATA splits any data set",
                )
            dataset = ConcatDataset(files[self._replica_id :: self._num_replicas])
        sampler = copy.copy(loader.sampler)
        if hasattr(sampler, "data_source"):
            sampler.data_source = dataset
        self._batches = BatchSampler(sampler, size, loader.drop_last)
        self._own_size = len(self._batches)
        if self._num_replicas > 1:
            self._own_size = max(all_gather(self._own_size))
        return dataset

    def open(self) -> Iterator[Any]:
        """Begin a pass."""
        batches = iter(self._loader)
        rows = self._rows
        return (cut_rows(one, slice(0, rows.popleft())) for one in batches)

    def __len__(self) -> int:
        return self._own_size if self._own_size is not None else len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        self._pass += 1
        self._rows = deque()
        return self._deal(self._rows, self._shuffle())

    def _shuffle(self) -> Iterable[list[int]]:
        """Return the loader's batches, in an order that is the same on all replicas."""
        batches = copy.copy(self._batches)
        sampler = getattr(batches, "sampler", None)
        if hasattr(sampler, "generator"):
            batches.sampler = copy.copy(sampler)
            batches.sampler.generator = torch.Generator().manual_seed((self._seed + self._pass) % (1 << 63))
            return batches  # type: ignore[no-any-return]
        if self._num_replicas > 1 and self._own_size is None:
            first = [int(index) for index in next(iter(self._batches), [])]
            current().agree(first, "the first batch of a sampler")
        return batches  # type: ignore[no-any-return]

    def _deal(self, rows: deque[int], batches: Iterable[list[int]]) -> Iterator[list[int]]:
        dealt: Iterator[tuple[list[int], int]]
        if self._own_size is None:
            dealt = (
                (batch[find_part(len(batch), self._num_replicas, self._replica_id)], batch[0]) for batch in batches
            )
        else:
            dealt = islice(chain(((batch, 0) for batch in batches), repeat(([], 0))), self._own_size)
        for chosen, stand_in in dealt:
            rows.append(len(chosen))
            # Of a part without samples one is read all the same: it has the shapes.
            yield chosen or [stand_in]


def collect_datasets(
    function: Callable[[InputContext], Any],
    context: InputContext,
    options: InputOptions,
    device: torch.device,
) -> DistributedDataset:
    """Return what a function makes for this replica, padded by batches without rows until all replicas have ended.

    Collective: every rank, if there are several replicas.
    """
    dataset = function(context)
    if isinstance(dataset, torch.utils.data.Dataset) and not isinstance(dataset, IterableDataset):
        raise UsageError(
            f"distribute_datasets_from_function(): the function returned a {type(dataset).__name__} that gives single samples",
            hint="return DataLoader(dataset, batch_size=context.get_per_replica_batch_size(GLOBAL_BATCH_SIZE))",
        )
    length, is_alone = _find_length(dataset), context.num_replicas_in_sync == 1
    if not is_alone:
        lengths = all_gather(-1 if length is None else length)
        length = None if -1 in lengths else max(lengths)
    target = device if options.experimental_fetch_to_device else None
    return DistributedDataset(lambda: iter(dataset) if is_alone else _pad(dataset, length), length, target)


def _pad(dataset: Iterable[Any], length: int | None) -> Iterator[Any]:
    """Yield batches, and then such without rows; where lengths are not known, replicas ask each other before each."""
    empty: Any = None
    batches, num_given = iter(dataset), 0
    while length is None or num_given < length:
        found = list(islice(batches, 1))
        if length is None and not all_reduce(bool(found), "any", name="whether a replica has a batch"):
            return
        if found and empty is None:
            empty = cut_rows(found[0], slice(0, 0))
        if not found and empty is None:
            raise DataError(
                "this replica's data set gave no batch, but others' did", rank=current().rank,
                hint="distribute the samples so that each replica has at least one",
            )  # fmt: skip
        num_given += 1
        yield found[0] if found else empty
