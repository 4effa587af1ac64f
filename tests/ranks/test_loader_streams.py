"""Data sets that can only be iterated, on real ranks: split by rank and worker, resumed, and ended together."""

from __future__ import annotations

import multiprocessing
import random
import time
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

import rankwise
from rankwise.base.errors import DataError, UsageError
from rankwise.testing.ranks import run_ranks, try_ranks

pytestmark = pytest.mark.linux


class Stream(IterableDataset):
    """Numbers in an order that it draws at its start, each with an augmentation."""

    def __init__(self, size: int = 22) -> None:
        self.size, self.epoch = size, -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        order = list(range(self.size))
        random.shuffle(order)
        for number in order:
            yield number, torch.rand(2), self.epoch


class Stateful(IterableDataset):
    """Can say where it is, and counts what it reads."""

    def __init__(self, size: int = 22) -> None:
        self.size, self.place, self.num_read = size, 0, 0

    def __iter__(self) -> Any:
        while self.place < self.size:
            self.place, self.num_read = self.place + 1, self.num_read + 1
            yield self.place - 1, torch.rand(2), 0
        self.place = 0

    def state_dict(self) -> Any:
        return {"place": self.place}

    def load_state_dict(self, state: Any) -> None:
        self.place = state["place"]


class Sharded(IterableDataset):
    """Splits as Hugging Face's do; part k of K has 2k elements of its own."""

    def __init__(self, num_shards: int = 1, index: int = 0) -> None:
        self.num_shards, self.index = num_shards, index

    def shard(self, num_shards: int, index: int) -> Sharded:
        return Sharded(num_shards, index)

    def __iter__(self) -> Any:
        assert get_worker_info() is None, "a part would be split once more"
        for number in range(2 * self.index):
            yield 100 * self.index + number, torch.ones(3)


def workers(number: int) -> dict[str, Any]:
    """Return the arguments for so many workers; what a test defines can be forked but not pickled."""
    return {"num_workers": number, "multiprocessing_context": "fork" if number else None}


def read(loader: Any, stop_after: int | None = None) -> list[Any]:
    seen = []
    for step in loader.steps():
        samples = [(int(i), *x.tolist(), *map(int, more)) for batch in step for i, x, *more in zip(*batch, strict=True)]
        assert len(samples) == step.num_samples
        seen.append((step.index, step.global_samples, samples))
        if len(seen) == stop_after:
            break
    return seen


def merge(ranks: list[list[Any]]) -> list[Any]:
    """Join the ranks' parts of each step."""
    assert len({len(one) for one in ranks}) == 1
    merged = []
    for parts in zip(*ranks, strict=True):
        assert len({part[:2] for part in parts}) == 1
        merged.append((*parts[0][:2], sorted(sample for part in parts for sample in part[2])))
    return merged


def test_a_stream_gives_the_same_steps_at_any_number_of_ranks_and_workers() -> None:
    """What it shuffles and augments from the global generators too, though each rank was seeded differently."""

    def body(num_workers: int, micro_batch: int | None) -> list[Any]:
        with rankwise.init(device="cpu", timeout_s=30) as ctx:
            ctx.seed(7)
            loader = rankwise.DataLoader(Stream(), global_batch=5, micro_batch=micro_batch, **workers(num_workers))
            return [one for _ in loader.epochs(2) for one in read(loader)]

    wanted = merge(run_ranks(body, 1, 0, None))
    assert [step[1] for step in wanted] == [5, 5, 5, 5, 2] * 2
    for epoch, steps in ((0, wanted[:5]), (1, wanted[5:])):
        assert sorted(one[0] for step in steps for one in step[2]) == list(range(22))
        assert {one[3] for step in steps for one in step[2]} == {epoch}
    assert wanted[0][2] != wanted[5][2]
    for world_size, num_workers, micro_batch in ((2, 0, 1), (3, 2, None), (4, 0, None)):
        assert merge(run_ranks(body, world_size, num_workers, micro_batch)) == wanted


@pytest.mark.parametrize("kind", [Stream, Stateful])
def test_a_stream_resumes_at_other_numbers(kind: Any) -> None:
    """Stopped in mid-epoch with workers, gone on with other ranks and workers: nothing lost, nothing twice."""

    def body(state: Any, stop_after: int | None, num_workers: int) -> Any:
        with rankwise.init(device="cpu", timeout_s=30):
            data = kind()
            loader = rankwise.DataLoader(data, global_batch=4, **workers(num_workers))
            if state is not None:
                loader.load_state_dict(state)
            return read(loader, stop_after), loader.state_dict(), getattr(data, "num_read", None)

    def run(world_size: int, *args: Any) -> Any:
        told = run_ranks(body, world_size, *args)
        assert all(one[1] == told[0][1] for one in told)
        return merge([one[0] for one in told]), *told[0][1:]

    whole, *_ = run(1, None, None, 0)
    before, state, _ = run(2, None, 2, 2)
    assert state["consumed"] == 8
    middle, state, _ = run(3, state, 1, 2)
    after, _, num_read = run(1, state, None, 0)
    assert before + middle + after == whole
    # One that tells its place is not read again from its start.
    assert num_read == (None if kind is Stream else 22 - 12)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_parts_that_end_at_different_times_end_together(num_workers: int) -> None:
    """With split="shard" each element comes once, all ranks have the same batches, and those without samples get empty ones."""

    def body() -> Any:
        with rankwise.init(device="cpu", timeout_s=30):
            loader = rankwise.DataLoader(Sharded(), global_batch=6, split="shard", **workers(num_workers))
            shapes, seen = [], []
            for _ in loader.epochs(1):
                for step in loader.steps():
                    for batch in step:
                        shapes.append([tuple(part.shape[1:]) for part in batch])
                        assert len(batch[0]) == step.num_samples
                        assert step.scale == 3 / step.global_samples
                        seen.append(batch[0].tolist())
            return shapes, seen

    told = run_ranks(body, 3)
    num_parts = 3 * max(1, num_workers)
    elements = sorted(100 * part + number for part in range(num_parts) for number in range(2 * part))
    assert sorted(one for _, seen in told for batch in seen for one in batch) == elements
    assert len({len(seen) for _, seen in told}) == 1
    assert all(shape == [(), (3,)] for shapes, _ in told for shape in shapes)
    assert any(batch == [] for batch in told[0][1])


def test_parts_resume_at_the_same_numbers_only() -> None:
    """Each rank goes on with its own parts; another number of ranks or workers is refused with both values."""

    def body(states: Any, stop_after: int | None, num_workers: int) -> Any:
        with rankwise.init(device="cpu", timeout_s=30) as ctx:
            loader = rankwise.DataLoader(Sharded(), global_batch=4, split="shard", **workers(num_workers))
            if states is not None:
                loader.load_state_dict(states[ctx.rank])
            return read(loader, stop_after), loader.state_dict()

    whole = run_ranks(body, 2, None, None, 2)
    before = [([], None)] * 2
    for stop_after in (1, 2, None):
        states = [state for _, state in before] if before[0][1] else None
        told = run_ranks(body, 2, states, stop_after, 2)
        before = [(old + new, state) for (old, _), (new, state) in zip(before, told, strict=True)]
    assert [seen for seen, _ in before] == [seen for seen, _ in whole]
    (outcome,) = try_ranks(body, 1, [before[0][1]], None, 2)
    assert isinstance(outcome.error, DataError)
    assert "saved with world_size 2, and this loader has 1" in str(outcome.error)
    outcome, _ = try_ranks(body, 2, [state for _, state in before], None, 0)
    assert "saved with streams_per_rank 2, and this loader has 1" in str(outcome.error)


def test_ranks_that_read_different_streams_are_told() -> None:
    """A host that lacks a file ends earlier: all ranks say who has what, and none waits."""

    def body() -> None:
        with rankwise.init(device="cpu", timeout_s=30) as ctx:
            list(rankwise.DataLoader(Stream(9 + ctx.rank), global_batch=4))

    for outcome in try_ranks(body, 2):
        assert isinstance(outcome.error, DataError)
        assert "rank 0 has 1 samples at element 9, and its stream has ended; rank 1 has 2" in str(outcome.error)


class SplitsItself(IterableDataset):
    def __iter__(self) -> Any:
        info = get_worker_info()
        place, number = (info.id, info.num_workers) if info else (0, 1)
        yield from range(place, 8, number)


def test_what_splits_itself_must_be_said() -> None:
    """Without a word it is refused; with split="dataset" its own parts are taken, with "stride" it can't see the workers."""

    def body(split: Any) -> list[int]:
        with rankwise.init(device="cpu", timeout_s=30):
            loader = rankwise.DataLoader(SplitsItself(), global_batch=2, split=split, **workers(2))
            return [int(one) for batch in loader for one in batch]

    (outcome,) = try_ranks(body, 1, None)
    assert isinstance(outcome.error, UsageError)
    assert "SplitsItself asks for get_worker_info in its __iter__" in str(outcome.error)
    assert sorted(run_ranks(body, 1, "dataset")[0]) == list(range(8))
    assert run_ranks(body, 1, "stride") == [list(range(8))]


def test_none_in_a_stream_is_left_out_on_all_ranks() -> None:
    """With drop_none the step shares out what is left; a step of none is left out; the place counts all elements."""

    class Holes(IterableDataset):
        def __iter__(self) -> Any:
            for number in range(14):
                yield None if number in {1, 4, 5, 6, 7, 9, 10} else number

    def body(num_workers: int) -> Any:
        with rankwise.init(device="cpu", timeout_s=30):
            loader = rankwise.DataLoader(Holes(), global_batch=4, drop_none=True, **workers(num_workers))
            return [
                (step.global_samples, [batch.tolist() for batch in step], loader.state_dict()["consumed"])
                for step in loader.steps()
            ]

    for num_workers in (0, 2):
        first, second = run_ranks(body, 2, num_workers)
        assert [(n, place) for n, _, place in first] == [(3, 4), (2, 12), (2, 14)]
        assert [batches for _, batches, _ in first] == [[[0, 3]], [[8]], [[12]]]
        assert [batches for _, batches, _ in second] == [[[2]], [[11]], [[13]]]


def test_hugging_face_streams() -> None:
    """Their iterable data sets work in both ways; set_epoch is called for them, and their state is used."""
    pytest.importorskip("datasets")

    def body() -> Any:
        from datasets import Dataset

        seen = []
        with rankwise.init(device="cpu", timeout_s=60):
            data = Dataset.from_dict({"x": list(range(24))}).to_iterable_dataset(num_shards=6)
            for split, num_workers in (("stride", 2), ("shard", 0), ("shard", 2)):
                loader = rankwise.DataLoader(data, global_batch=5, split=split, **workers(num_workers))
                seen.append([int(one) for batch in loader for one in batch["x"]])
                assert loader.epoch == 1
            resumed = rankwise.DataLoader(data, global_batch=5, split="stride")
            for number, _ in enumerate(resumed):
                if number == 1:
                    state = resumed.state_dict()
                    break
            assert state["streams"][0]["state"] is not None
            again = rankwise.DataLoader(data, global_batch=5, split="stride", **workers(2))
            again.load_state_dict(state)
            seen.append([int(one) for batch in again for one in batch["x"]])
        return seen

    first, second = run_ranks(body, 2)
    for one, other in zip(first[:3], second[:3], strict=True):
        assert sorted(one + other) == list(range(24))
    assert sorted(first[3] + second[3]) == list(range(10, 24))


class Stuck(IterableDataset):
    """Never yields anything."""

    def __iter__(self) -> Any:
        while True:
            time.sleep(1)


def test_a_rank_that_waits_for_its_worker_shows_where_that_one_is() -> None:
    """A rank killed by ``try_ranks`` is often innocent; its children's stacks stand beside its own."""

    def body() -> None:
        next(iter(torch.utils.data.DataLoader(Stuck(), **workers(1))))

    (outcome,) = try_ranks(body, 1, timeout_s=2)
    assert isinstance(outcome.error, TimeoutError)
    own, worker = outcome.traceback.split("Its child ")
    assert "_next_data" in own
    assert "test_loader_streams.py" in worker
    assert "in __iter__" in worker


def test_a_rank_starts_its_processes_as_a_launchers_does() -> None:
    """What a rank of ``run_ranks`` starts, such as a loader's workers, is started as the platform does it, and not as that rank was."""

    def body() -> str:
        return multiprocessing.get_start_method()

    assert run_ranks(body, 1) == [multiprocessing.get_start_method()]
