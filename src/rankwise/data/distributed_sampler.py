"""torch's DistributedSampler without its list: starts at once and needs no memory, however many samples there are."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, final

import torch
from torch.utils.data import distributed

from rankwise.base.errors import DataError
from rankwise.data.data_ranks import find_world
from rankwise.data.epoch_order import Order, SequentialOrder, ShuffledOrder
from rankwise.data.schedule import FIRST_BLOCK, LAST_BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterator, Sized


@final
class DistributedSampler(distributed.DistributedSampler):  # type: ignore[misc]
    """Distributes the samples of an epoch over the ranks, in place of torch's class.

    Same arguments, same lengths, same padding: without ``drop_last`` the first samples of the epoch come again at its
    end until each rank has as many. Only the shuffled order is another one, computed index by index. For training that
    may continue with another number of ranks, and without duplicate samples, use ``GlobalBatchSampler``.

    Args:
        dataset: Anything with a length.
        num_replicas: Ranks that share the data; None: the job's.
        rank: Which of them this is; None: the job's.
        shuffle: Reshuffle in each epoch that ``set_epoch`` announces.
        seed: The order's seed, the same on all ranks.
        drop_last: Leave samples out instead of repeating some, so that all ranks have as many.

    Raises:
        ValueError: The rank is out of range (as in torch).
        UsageError: The environment names several ranks, but no job was joined.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,  # noqa: FBT001 - torch's signature
        seed: int = 0,
        drop_last: bool = False,  # noqa: FBT001 - torch's signature
    ) -> None:
        if num_replicas is None or rank is None:
            num_replicas, rank = find_world(num_replicas, rank)
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        # torch divides floats here, which are exact up to 2**53 only.
        size = len(dataset)
        self.num_samples = size // num_replicas if drop_last else -(-size // num_replicas)
        self.total_size = self.num_samples * num_replicas

    def __iter__(self) -> Iterator[Any]:
        """Return the indices of this rank in the epoch.

        Raises:
            DataError: ``num_samples`` or ``total_size`` was changed, or the data set has grown: samples would be left
                out.
        """
        size = len(self.dataset)
        self._check_counts(size)
        order: Order = ShuffledOrder(size, self.seed) if self.shuffle else SequentialOrder(size)
        # chain hands out a block's numbers without a step of Python for each.
        return chain.from_iterable(self._take_blocks(order, self.epoch))

    def _check_counts(self, size: int) -> None:
        """Refuse what torch's sampler refuses by an assertion."""
        is_whole = self.num_samples * self.num_replicas == self.total_size
        if is_whole and (self.total_size <= size if self.drop_last else self.total_size >= size):
            return
        raise DataError(
            f"num_samples={self.num_samples} and total_size={self.total_size} don't fit {size} samples on {self.num_replicas} ranks"
            f"{' with drop_last' if self.drop_last else ''}",
            rank=self.rank,
            hint="leave both as they are: for fewer samples give it a Subset; after the data set has changed make a new sampler",
        )

    def _take_blocks(self, order: Order, epoch: int) -> Iterator[list[int]]:
        start, size = self.rank, FIRST_BLOCK
        while start < self.total_size:
            stop = min(start + size * self.num_replicas, self.total_size)
            positions = torch.arange(start, stop, self.num_replicas, device="cpu")
            # Past the end the epoch begins again: that is torch's padding.
            yield order.take(epoch, positions % order.num_samples).tolist()
            start, size = start + size * self.num_replicas, min(2 * size, LAST_BLOCK)
