"""What workers read, for many ranks and workers played through in one process: every sample once, in the same steps."""

from __future__ import annotations

from itertools import islice
from typing import Any, ClassVar

import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import IterableDataset

from rankwise.data.batches import Packing, WorkerBatch
from rankwise.data.map_passes import draw_work_items as draw_map
from rankwise.data.map_reader import MapReader
from rankwise.data.prefetch import _bring_beside
from rankwise.data.sampler import GlobalBatchSampler
from rankwise.data.stream_passes import draw_work_items as draw_stream
from rankwise.data.stream_reader import Dealing, Opening, StreamReader

SMALL = st.integers(1, 5)
OPTIONAL = st.none() | st.integers(1, 3)


class Stream(IterableDataset):
    def __init__(self, size: int, holes: Any) -> None:
        self.size, self.holes = size, holes

    def __iter__(self) -> Any:
        for number in range(self.size):
            yield None if number in self.holes else number


def read_rank(size: int, holes: Any, dealing: Dealing, start: int) -> list[Any]:
    """Return the parcels of a rank up to the last, its workers taking turns as torch's do."""
    packing = Packing(drops_none=True)
    readers = [StreamReader(Stream(size, holes), packing, dealing) for _ in range(dealing.num_shards)]
    openings = [Opening(num_read=start)] * dealing.num_shards
    work_items = draw_stream(dealing, openings, number=1, epoch=0, turn=0, start=start)
    worker_batches = []
    for number, work_item in enumerate(work_items):
        worker_batches.append(readers[number % dealing.num_shards].__getitems__(work_item))
        if worker_batches[-1].is_last:
            return worker_batches
    raise AssertionError("tickets never end")


@given(
    size=st.integers(0, 40),
    global_batch=st.integers(1, 9),
    micro_batch=OPTIONAL,
    world_size=SMALL,
    num_workers=st.integers(1, 3),
    drops_last=st.booleans(),
    start=st.integers(0, 12),
    holes=st.sets(st.integers(0, 39)),
)
@settings(deadline=None, max_examples=60)
def test_a_shared_stream_is_dealt_out_exactly(
    size: int, global_batch: int, micro_batch: int | None, world_size: int, num_workers: int, drops_last: bool,
    start: int, holes: set[int],
) -> None:  # fmt: skip
    """Step k holds the elements kB to (k+1)B that are there; ranks have equally many micro-batches, and all see the end at once."""
    ranks = []
    for rank in range(world_size):
        dealing = Dealing(split="stride", rank=rank, world_size=world_size, num_shards=num_workers, seed=0,
                          global_batch=global_batch, micro_batch=micro_batch, drops_last=drops_last)  # fmt: skip
        ranks.append(read_rank(size, holes, dealing, start))
    assert len({len(worker_batches) for worker_batches in ranks}) == 1
    for number, parts in enumerate(zip(*ranks, strict=True)):
        assert len({(p.global_samples, p.is_last, p.num_read, len(p.batches)) for p in parts}) == 1
        first = start + number * global_batch
        wanted = [one for one in range(first, min(first + global_batch, size)) if one not in holes]
        if drops_last and first + global_batch > size:
            wanted = []
        assert sorted(int(one) for p in parts for batch in p.batches for one in batch) == wanted
        for batch_of_worker in parts:
            assert [len(batch) for batch in batch_of_worker.batches] == batch_of_worker.counts
            assert max(batch_of_worker.counts, default=0) - min(batch_of_worker.counts, default=0) <= 1
            assert micro_batch is None or all(n <= micro_batch for n in batch_of_worker.counts)
        own = [sum(batch_of_worker.counts) for batch_of_worker in parts]
        assert max(own) - min(own) <= 1


class Draws:
    """Samples that say who they are and what they drew."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index), torch.rand(())


@given(size=st.integers(1, 40), global_batch=st.integers(1, 9), micro_batch=OPTIONAL, world_size=SMALL,
       consumed=st.integers(0, 40), epoch=st.integers(0, 3), is_weighted=st.booleans())  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_an_indexed_data_set_gives_each_sample_its_own_numbers(
    size: int,
    global_batch: int,
    micro_batch: int | None,
    world_size: int,
    consumed: int,
    epoch: int,
    is_weighted: bool,
) -> None:
    """What a sample draws depends on seed, epoch and sample (and, if drawn by weight, its place), not on who reads it."""
    consumed = min(consumed, size)
    weights = torch.arange(1, size + 1) if is_weighted else None

    def read(num_replicas: int, micro: int | None) -> list[Any]:
        seen = []
        for rank in range(num_replicas):
            sampler = GlobalBatchSampler(size, global_batch=global_batch, micro_batch=micro, weights=weights,
                                         num_replicas=num_replicas, rank=rank)  # fmt: skip
            reader = MapReader(Draws(size), Packing(), seed=7)
            for work_item in draw_map(sampler, epoch, consumed, draws_twice=is_weighted):
                batch_of_worker = reader.__getitems__(work_item)
                assert batch_of_worker.counts == [len(work_item.indices)] == [len(batch_of_worker.batches[0][0])]
                seen += list(zip(*(part.tolist() for part in batch_of_worker.batches[0]), strict=True))
        return sorted(seen)

    one = read(1, None)
    assert read(world_size, micro_batch) == one
    assert len(set(one)) == size - consumed


def test_batches_are_copied_one_ahead_on_a_stream_of_their_own(monkeypatch: Any) -> None:
    """The copy of the next parcel is started before the last one is handed out, and the current stream waits for each."""
    log: list[str] = []

    class Fake:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            log.append("beside")

        def __exit__(self, *_: object) -> None:
            log.append("current")

        def record_event(self) -> str:
            log.append("record")
            return f"event {log.count('record')}"

        def wait_event(self, event: str) -> None:
            log.append(f"wait {event}")

    monkeypatch.setattr(torch.cuda, "Stream", lambda _: Fake("beside"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Fake("current"))
    sampler = GlobalBatchSampler(3, global_batch=1, shuffle=False, num_replicas=1, rank=0)
    reader = MapReader(Draws(3), Packing(), seed=7)
    worker_batches = map(reader.__getitems__, draw_map(sampler, 0, 0, draws_twice=False))
    brought = _bring_beside(worker_batches, torch.device("meta"))
    (first,) = islice(brought, 1)
    assert log == ["beside", "record", "current"] * 2 + ["wait event 1"]
    assert first.batches[0][0].device.type == "meta"
    assert len(list(brought)) == 2
    assert log[-1] == "wait event 3"


def test_what_moves_itself_is_asked_on_the_current_stream(monkeypatch: Any) -> None:
    """Its memory comes from the stream that it is copied on, and nobody could tell that one who uses it: so it is not the side stream."""
    stream = ["current"]

    class Fake:
        def __enter__(self) -> None:
            stream.append("beside")

        def __exit__(self, *_: object) -> None:
            stream.pop()

        def record_event(self) -> None:
            """Nothing is copied here."""

        wait_event = record_stream = lambda *_: None

    class Own:
        asked: ClassVar[list[str]] = []

        def to(self, device: Any) -> Own:
            self.asked.append(stream[-1])
            return self

    monkeypatch.setattr(torch.cuda, "Stream", lambda _: Fake())
    monkeypatch.setattr(torch.cuda, "stream", lambda one: one)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Fake())
    worker_batches = [WorkerBatch([{"x": torch.ones(2), "own": Own()}], [2]) for _ in range(3)]
    brought = list(_bring_beside(worker_batches, torch.device("meta")))
    assert [one.batches[0]["x"].device.type for one in brought] == ["meta"] * 3
    assert Own.asked == ["current"] * 3
