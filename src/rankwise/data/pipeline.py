"""torch's DataLoader, as the engine below ours: work items go in, worker batches come out in the same order, on the device."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, final

import torch
from torch.utils.data import DataLoader as TorchLoader

from rankwise.base.errors import DataError, UsageError
from rankwise.base.log import get_logger
from rankwise.data.prefetch import bring
from rankwise.data.workers import make_workers
from rankwise.runtime.rng import derive_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rankwise.data.batches import WorkerBatch

_LOGGER = get_logger(__name__)


@final
class Pipeline:
    """Workers, pinned memory and the way to the device.

    Args:
        reader: What makes a worker batch of a work item; a data set in torch's eyes.
        device: Where batches go.
        rank: This rank.
        warns_of_draws: Whether to say that the collate function draws: other ranks draw for their samples.
        seed: The loader's.
        num_workers: As in torch.
        pin_memory: As in torch; None: if the device is CUDA.
        worker_init_fn: As in torch.
        multiprocessing_context: As in torch.
        **options: More of torch's.

    Raises:
        UsageError: torch refuses the options.
    """

    def __init__(  # noqa: PLR0913 - most are torch's
        self,
        reader: Any,
        *,
        device: torch.device,
        rank: int,
        warns_of_draws: bool,
        seed: int,
        num_workers: int,
        pin_memory: bool | None,
        worker_init_fn: Callable[[int], Any] | None,
        multiprocessing_context: Any,
        **options: Any,
    ) -> None:
        self.device, self._rank, self._seed = device, rank, seed
        self._warns_of_draws = warns_of_draws
        self._work_items, self._reader = _WorkItems(), reader
        # torch pins all or nothing, and fails at what a data set has put on the device itself.
        self._pins = pin_memory is None and num_workers == 0 and device.type == "cuda"
        # Workers' seeds come from here and not from the training process's generator: dropout would change with it.
        self._generator = torch.Generator()
        start = None
        try:
            if num_workers > 0:
                multiprocessing_context, start = make_workers(worker_init_fn, multiprocessing_context, num_workers)
            self._loader = TorchLoader(
                reader,
                batch_sampler=self._work_items,
                collate_fn=_as_it_is,
                num_workers=num_workers,
                pin_memory=device.type == "cuda" and not self._pins if pin_memory is None else pin_memory,
                worker_init_fn=start,
                multiprocessing_context=multiprocessing_context,
                generator=self._generator,
                **options,
            )
            self._is_direct = num_workers == 0 and not self._loader.pin_memory
        except ValueError as error:
            raise UsageError(f"DataLoader: {error}", rank=rank) from None

    def start(self, make_tickets: Callable[[], Iterator[Any]], epoch: int) -> Iterator[WorkerBatch]:
        """Begin a pass.

        Args:
            make_tickets: Gives what to read, in order; may be endless. It must hold nothing that holds this pipeline:
                torch's iterator ends its workers at once if its last reference goes, but takes 5 s for each if the
                garbage collector finds it, which has closed the queues to the workers before.
            epoch: Which epoch, for the workers' seeds.

        Returns:
            A worker batch for each work item; workers read ahead.

        Raises:
            DataError: While iterating: what a reader has found wrong.
        """
        if self._is_direct:  # torch's iterator would call the reader just so, and look at a profiler before
            worker_batches = self._check(map(self._reader.__getitems__, make_tickets()))
            return bring(worker_batches, self.device, pins=self._pins)
        self._work_items.make = make_tickets
        self._generator.manual_seed(derive_seed(self._seed, "workers", epoch, self._rank))
        return bring(self._check(iter(self._loader)), self.device)

    def _check(self, worker_batches: Iterator[WorkerBatch]) -> Iterator[WorkerBatch]:
        for made in worker_batches:
            if made.fault is not None:
                message, hint = made.fault
                raise DataError(message, rank=self._rank, hint=hint or None)
            if made.collate_draws and self._warns_of_draws:
                _warn_of_draws()
            yield made


@cache  # a job may have many loaders
def _warn_of_draws() -> None:
    _LOGGER.warning(
        "collate_fn draws random numbers, and each rank draws for its own samples: losses will differ from those of one process\n"
        "  -> let the data set draw for each sample, to have the same at any number of ranks; or leave it so"
    )


@final
class _WorkItems:
    """Stands where torch wants a batch sampler: what it yields is handed to a reader as it is."""

    def __init__(self) -> None:
        self.make: Callable[[], Iterator[Any]] = lambda: iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.make()


def _as_it_is(batch_of_worker: WorkerBatch) -> WorkerBatch:
    """Stand where torch wants a collate function; the reader has called the user's."""
    return batch_of_worker
