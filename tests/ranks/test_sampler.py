"""Samplers on real ranks and behind real DataLoader workers: whom they deal out to, and what they count."""

from __future__ import annotations

from itertools import chain

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

import rankwise
from rankwise import DataError, UsageError
from rankwise.data.sampler import GlobalBatchSampler
from rankwise.testing import run_ranks

pytestmark = pytest.mark.linux


class Numbers:
    """A data set that holds its indices."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> int:
        return index


def take(batch: list[int]) -> list[int]:
    """Collate nothing."""
    return batch


def test_ranks_are_the_jobs() -> None:
    """Without arguments the ranks are those that rankwise.init() has joined; together they hold every sample once."""

    def program() -> list[int]:
        with rankwise.init():
            samplers = [GlobalBatchSampler(50, global_batch=8), rankwise.DistributedSampler(Numbers())]
            assert all(sampler.num_replicas == 3 for sampler in samplers)
            return [index for indices in samplers[0] for index in indices]

    assert sorted(chain.from_iterable(run_ranks(program, 3))) == list(range(50))


def test_ranks_are_torchs_without_init() -> None:
    """Without rankwise.init() they are those of torch's own process group."""

    def program() -> tuple[int, int]:
        dist.init_process_group("gloo")
        sampler = GlobalBatchSampler(50, global_batch=8)
        dist.barrier()  # who leaves at once may close a connection that its peer is still opening
        dist.destroy_process_group()
        return sampler.rank, sampler.num_replicas

    assert run_ranks(program, 2) == [(0, 2), (1, 2)]


def test_a_sampler_before_init_is_refused() -> None:
    """A sampler that is made before the rank has joined is an error there and then, on each rank."""

    def program() -> str:
        with pytest.raises(UsageError) as caught:
            GlobalBatchSampler(50, global_batch=8)
        return str(caught.value)

    for rank, text in enumerate(run_ranks(program, 2)):
        assert f"[rank {rank}] WORLD_SIZE=2" in text
        assert "rankwise.init()" in text


@pytest.mark.parametrize("persistent", [False, True])
def test_what_workers_have_drawn_ahead_is_not_counted(persistent: bool) -> None:
    """track() counts what the loop has got, while two workers are up to four batches ahead; passes follow each other."""
    sampler = GlobalBatchSampler(50, global_batch=4, num_replicas=1, rank=0)
    loader = DataLoader(
        Numbers(), batch_sampler=sampler, num_workers=2, collate_fn=take, persistent_workers=persistent,
        multiprocessing_context="fork",
    )  # fmt: skip
    got = []
    for number, batch in enumerate(sampler.track(loader), 1):
        assert sampler.consumed == min(4 * number, 50)
        got.append(batch)
        if number == 3:
            state = sampler.state_dict()
    assert got == list(sampler.draw(0))
    assert (sampler.epoch, sampler.consumed) == (1, 0)
    assert list(sampler.track(loader)) == list(sampler.draw(1))
    sampler.load_state_dict(state)
    assert list(sampler.track(loader)) == list(sampler.draw(0))[3:]
    assert sampler.epoch == 1


def test_micro_batches_of_a_loader_are_counted_by_steps() -> None:
    """Behind a loader too, a step counts when its last micro-batch is out."""
    sampler = GlobalBatchSampler(50, global_batch=20, micro_batch=5, num_replicas=2, rank=1)
    loader = DataLoader(Numbers(), batch_sampler=sampler, collate_fn=take)
    assert [sampler.consumed for _ in sampler.track(loader)] == [0, 20, 20, 40, 50]


def test_another_loader_is_refused() -> None:
    """track() takes the loader of this sampler, and notices one that yields more or fewer batches than it should."""
    sampler = GlobalBatchSampler(50, global_batch=10, num_replicas=1, rank=0)
    with pytest.raises(UsageError, match="another batch_sampler"):
        sampler.track(DataLoader(Numbers(), batch_size=10))

    class Loader:
        batch_sampler = sampler

        def __init__(self, number: int) -> None:
            self.number = number

        def __iter__(self) -> object:
            return iter(range(self.number))

    for number, words in ((4, "ended before step 4"), (6, "goes on after its last step")):
        with pytest.raises(DataError, match=words):
            list(sampler.track(Loader(number)))
