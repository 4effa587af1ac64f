"""rankwise's DistributedSampler keeps torch's contract: lengths, padding, epochs; only the shuffled order is another."""

from __future__ import annotations

import tracemalloc
from itertools import chain, islice
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, distributed

import rankwise
from rankwise import UsageError
from rankwise.data.distributed_sampler import DistributedSampler


class Numbers:
    """A data set of any length that holds its indices."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


GRID = [
    (size, world, drop_last)
    for size in (0, 1, 2, 3, 7, 8, 9, 64, 101)
    for world in (1, 2, 3, 8, 20)
    for drop_last in (False, True)
]


def make_all(kind: Any, size: int, world: int, **options: Any) -> list[Any]:
    """Return the samplers of all ranks."""
    return [kind(Numbers(size), num_replicas=world, rank=rank, **options) for rank in range(world)]


@pytest.mark.parametrize(("size", "world", "drop_last"), GRID)
def test_unshuffled_it_is_torchs(size: int, world: int, drop_last: bool) -> None:
    """Without shuffling, every index, length and padding is torch's, also where there are fewer samples than ranks."""
    options = {"shuffle": False, "drop_last": drop_last}
    ours, theirs = (
        make_all(kind, size, world, **options) for kind in (DistributedSampler, distributed.DistributedSampler)
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert list(mine) == list(other)
        assert (len(mine), mine.num_samples, mine.total_size) == (
            len(other),
            other.num_samples,
            other.total_size,
        )


@pytest.mark.parametrize(("size", "world", "drop_last"), GRID)
def test_shuffled_it_pads_as_torch_does(size: int, world: int, drop_last: bool) -> None:
    """Shuffled, the ranks together hold an order of all samples, and its head again where torch repeats it."""
    ours = make_all(DistributedSampler, size, world, drop_last=drop_last, seed=4)
    theirs = make_all(distributed.DistributedSampler, size, world, drop_last=drop_last)
    for sampler in ours:
        sampler.set_epoch(3)
    parts = [list(sampler) for sampler in ours]
    assert [len(part) for part in parts] == [len(sampler) for sampler in theirs]
    dealt = [index for row in zip(*parts, strict=True) for index in row]
    order = dealt[:size]
    assert len(set(order)) == len(order)
    assert drop_last or set(order) == set(range(size))
    assert dealt == [order[place % len(order)] for place in range(len(dealt))]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    """Epochs and seeds differ, the same epoch is the same again, and it does not advance without set_epoch, as torch's."""
    sampler, other = (DistributedSampler(Numbers(100), 1, 0, seed=seed) for seed in (0, 1))
    first = list(sampler)
    assert first == list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    assert second not in (first, list(other))
    running = iter(sampler)
    sampler.set_epoch(0)
    assert list(running) == second
    assert list(sampler) == first


def test_it_is_torchs_class_for_libraries() -> None:
    """Libraries ask isinstance(sampler, torch's DistributedSampler), read its fields, and give it to a DataLoader."""
    sampler = rankwise.DistributedSampler(Numbers(10), 3, 1, True, 7, False)
    assert isinstance(sampler, distributed.DistributedSampler)
    fields = (
        sampler.num_replicas,
        sampler.rank,
        sampler.shuffle,
        sampler.seed,
        sampler.drop_last,
        sampler.epoch,
    )
    assert fields == (3, 1, True, 7, False, 0)
    loaded = [batch.tolist() for batch in DataLoader(Numbers(10), batch_size=2, sampler=sampler)]
    assert list(chain.from_iterable(loaded)) == list(sampler)


def test_wrong_ranks_are_torchs_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank outside the world is torch's ValueError; without a job it is one process, unless the environment differs."""
    with pytest.raises(ValueError, match="rank 3"):
        DistributedSampler(Numbers(10), 3, 3)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert DistributedSampler(Numbers(10)).num_replicas == 1
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="WORLD_SIZE=2"):
        DistributedSampler(Numbers(10))


def test_memory_does_not_grow_with_the_data_set() -> None:
    """The first 4096 of 10**12 samples, and the numbers of them all, take less than 20 MiB; 2**62 samples work too."""
    tracemalloc.start()
    try:
        sampler = DistributedSampler(Numbers(10**12), 7, 3)
        batches = iter(BatchSampler(sampler, 256, drop_last=False))
        first = [next(batches) for _ in range(16)]
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 20 << 20
    assert len({index for batch in first for index in batch}) == 4096
    assert len(sampler) == -(-(10**12) // 7)
    assert len(list(islice(DistributedSampler(Numbers(1 << 62), 2, 1), 10))) == 10
    # torch's own division of floats would be off by one here.
    assert len(DistributedSampler(Numbers((1 << 60) + 1), 1, 0)) == (1 << 60) + 1


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("change", ["num_samples", "both", "data set"])
def test_counts_that_no_longer_fit_are_an_error(change: str, *, drop_last: bool) -> None:
    """Where torch's sampler fails by an assertion, ours says why, and deals no fewer samples in silence; where torch's deals, ours does."""
    data, samplers = list(range(10)), []
    for kind in (distributed.DistributedSampler, DistributedSampler):
        sampler = kind(data, num_replicas=3, rank=1, drop_last=drop_last)
        if change != "data set":
            sampler.num_samples = 2
        if change == "both":
            sampler.total_size = 6
        samplers.append(sampler)
    if change == "data set":
        data += [10] * 9
    theirs, ours = samplers
    try:
        wanted = len(list(theirs))
    except AssertionError:
        with pytest.raises(
            rankwise.DataError, match=r"num_samples=\d+ and total_size=\d+ don't fit \d+ samples on 3 ranks"
        ):
            list(ours)
    else:
        assert len(list(ours)) == wanted
