"""Which place the loader says a sample has: the one where it stands in the epoch's order, at any number of ranks and micro-batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import rankwise
from rankwise.base.errors import UsageError
from rankwise.data.sample_position import current_place, find_place
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.linux

N, BATCH = 11, 4
#: Ranks, workers, micro-batch.
SHAPES = [(2, 2, None), (3, 0, 1), (5, 0, None)]


class Numbers(Dataset):
    """Samples that say who they are, but for those that are bad."""

    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return None if index in self.bad else index


class Stream(IterableDataset):
    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        self.bad = bad

    def __iter__(self) -> Iterator[Any]:
        yield from (None if number in self.bad else number for number in range(N))


class Split(Stream):
    """Gives each worker a part that nobody else has."""

    def shard(self, *, num_shards: int, index: int) -> Any:
        own = Stream()
        own.__class__ = _Part
        own.part = (index, num_shards)  # type: ignore[attr-defined]
        return own


class _Part(Stream):
    part: tuple[int, int]

    def __iter__(self) -> Iterator[Any]:
        yield from range(self.part[0], N, self.part[1])


def load(data: Any, num_workers: int = 0, **more: Any) -> Any:
    context = "fork" if num_workers else None
    return rankwise.DataLoader(
        data, global_batch=BATCH, num_workers=num_workers, multiprocessing_context=context, seed=3, **more
    )


def read(loader: Any, num_epochs: int = 2, stop_after: int | None = None) -> Any:
    """Return (epoch, step, position, sample) of what this rank got, and the state at the end."""
    seen: list[Any] = []
    for _ in loader.epochs(num_epochs):
        for step in loader.steps():
            for batch in step:
                place = current_place()
                assert place is current_place()
                seen += [(place.epoch, step.index, *pair) for pair in zip(place.positions, batch.tolist(), strict=True)]
            stop_after = None if stop_after is None else stop_after - 1
            if stop_after == 0:
                return seen, loader.state_dict()
    assert find_place() is None
    return seen, loader.state_dict()


def merge(ranks: list[Any]) -> list[Any]:
    return sorted(one for seen, _ in ranks for one in seen)


def body(
    data: Any,
    num_workers: int,
    micro_batch: int | None,
    more: dict[str, Any],
    state: Any = None,
    stop_after: Any = None,
) -> Any:
    with rankwise.init(device="cpu", timeout_s=30):
        loader = load(data, num_workers, micro_batch=micro_batch, **more)
        if state is not None:
            loader.load_state_dict(state)
        return read(loader, stop_after=stop_after)


@pytest.mark.parametrize(
    ("data", "more"),
    [
        (Numbers(), {}),
        (Numbers(), {"drop_last": True}),
        (Numbers(), {"lengths": [5, 1, 4, 2, 8, 6, 3, 9, 7, 2, 5]}),
        (Numbers(), {"weights": [1.0, 2.0, *[0.5] * 9], "num_samples": 9}),
        (Numbers(), {"drop_none": True}),
        (Numbers(bad=(0, 4, 5, 9)), {"drop_none": True}),
        (Stream(), {}),
        (Stream(bad=(2, 5, 6)), {"drop_none": True}),
    ],
    ids=["shuffled", "drop_last", "lengths", "weights", "drop_none", "dropped", "stream", "stream_drop_none"],
)
def test_a_sample_has_its_place_at_any_number_of_ranks(data: Any, more: dict[str, Any]) -> None:
    """Place and sample of each step are those of one process; each place comes once an epoch; the order says the same."""
    wanted = merge(run_ranks(body, 1, data, 0, None, more))
    for epoch in (0, 1):
        places = [one[2] for one in wanted if one[0] == epoch]
        assert len(set(places)) == len(places)
    if isinstance(data, Numbers):
        order = load(data, **more).sampler.order
        for epoch, step, position, sample in wanted:
            assert step == position // BATCH
            assert int(order.take(epoch, torch.tensor([position]))[0]) == sample
    for world_size, num_workers, micro_batch in SHAPES:
        found = merge(run_ranks(body, world_size, data, num_workers, micro_batch, more))
        assert found == wanted, (world_size, num_workers, micro_batch)


@pytest.mark.parametrize("data", [Numbers(), Stream()])
def test_a_place_outlives_a_resume_and_another_global_batch(data: Any) -> None:
    """Stopped in mid-epoch and gone on with other ranks: the same places; with another global batch, too."""
    whole = merge(run_ranks(body, 1, data, 0, None, {}))
    for first, second in ((2, 3), (4, 1)):
        before = run_ranks(body, first, data, 0, 1, {}, None, 2)
        after = run_ranks(body, second, data, 0, None, {}, before[0][1])
        assert sorted(merge(before) + merge(after)) == whole

    def go_on(state: Any) -> Any:
        with rankwise.init(device="cpu", timeout_s=30):
            loader = rankwise.DataLoader(data, global_batch=5, micro_batch=2, seed=3)
            loader.load_state_dict(state)
            return read(loader)

    before = run_ranks(body, 2, data, 0, None, {}, None, 1)
    both = merge(before) + merge(run_ranks(go_on, 2, before[0][1]))
    assert sorted((epoch, *rest) for epoch, _, *rest in both) == [(epoch, *rest) for epoch, _, *rest in whole]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_streams_of_their_own_have_places_that_nobody_else_has(num_workers: int) -> None:
    """Where each rank reads its own part, no two samples of an epoch share a place, also across a resume."""
    data, more = Split(), {"split": "shard"}
    whole = merge(run_ranks(body, 2, data, num_workers, 1, more))
    for epoch in (0, 1):
        places = [one[2] for one in whole if one[0] == epoch]
        assert len(set(places)) == len(places) == N

    def stop(rank_states: Any = None) -> Any:
        with rankwise.init(device="cpu", timeout_s=30) as ctx:
            loader = load(data, num_workers, micro_batch=1, **more)
            if rank_states is not None:
                loader.load_state_dict(rank_states[ctx.rank])
            return read(loader, stop_after=None if rank_states else 1)

    before = run_ranks(stop, 2)
    after = run_ranks(stop, 2, [state for _, state in before])
    assert sorted(merge(before) + merge(after)) == whole


# ------------------------------------------------------------------------------- one process will do


def test_outside_of_a_step_there_is_no_place() -> None:
    """Before the first batch and behind the last there is none; an evaluation in between takes none away from the next step."""
    with pytest.raises(UsageError, match="no micro-batch"):
        current_place()
    for step in load(Numbers()).steps():
        for _ in step:
            assert current_place().positions.start == step.index * BATCH
        list(load(Numbers()))
        with pytest.raises(UsageError, match="no micro-batch"):
            current_place()
    with pytest.raises(UsageError, match="no micro-batch"):
        current_place()


def test_micro_batches_that_were_taken_ahead_are_refused() -> None:
    """list(step) leaves nobody knowing whose samples are at hand: an error. With one micro-batch in a step it is clear."""
    for step in load(Numbers(), micro_batch=2).steps():
        list(step)
        for _ in range(2):
            with pytest.raises(UsageError, match=r"one by one"):
                current_place()
        break
    for step in load(Numbers()).steps():
        list(step)
        assert list(current_place().positions) == list(range(step.index * BATCH, min(N, step.index * BATCH + BATCH)))
