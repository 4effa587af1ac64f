"""The loader in one process without a job: its passes and place, empty batches, what it passes on, and what it refuses."""

from __future__ import annotations

import gc
import multiprocessing
import sys
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

import rankwise
from rankwise.base.errors import DataError, UsageError
from rankwise.data.batches import Packing, cut_evenly


class Numbers(Dataset):
    def __init__(self, size: int = 10) -> None:
        self.size, self.epochs = size, []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return index

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Stream(IterableDataset):
    def __init__(self, size: int = 10) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Any:
        yield from range(self.size)


KINDS = pytest.mark.parametrize("kind", [Numbers, Stream])


def load(data: Any, global_batch: int = 4, **more: Any) -> Any:
    return rankwise.DataLoader(data, global_batch=global_batch, **more)


def ids(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


# ------------------------------------------------------------------------------- passes


@KINDS
def test_passes_follow_each_other(kind: Any) -> None:
    """Each pass is an epoch, the data set is told which, and a shuffled order is another one each time."""
    data = kind()
    loader = load(data)
    assert len(loader) == 3
    passes = [[one for batch in ids(loader) for one in batch] for _ in range(2)]
    assert [sorted(one) for one in passes] == [list(range(10))] * 2
    assert loader.epoch == 2
    if kind is Numbers:
        assert passes[0] != passes[1]
        assert data.epochs == [0, 1]


@KINDS
def test_a_pass_that_was_left_early_is_over_unless_somebody_only_looked(kind: Any) -> None:
    """One batch may be looked at; a loop that broke off later goes on with the next epoch."""
    loader = load(kind())
    first = next(iter(loader)).tolist()
    again = iter(loader)
    assert next(again).tolist() == first
    next(again)
    again.close()
    list(loader)
    assert loader.epoch == 2


@KINDS
def test_epochs_go_on_where_the_state_was(kind: Any) -> None:
    """A state from the middle of an epoch: the loop begins with that epoch's rest."""
    loader = load(kind(), seed=1)
    whole = [ids(loader) for _ in loader.epochs(3)]
    loader = load(kind(), seed=1)
    list(loader)
    for number, _ in enumerate(loader):
        if number == 0:
            state = loader.state_dict()
    resumed = load(kind(), seed=1)
    resumed.load_state_dict(state)
    assert [(epoch, ids(resumed)) for epoch in resumed.epochs(3)] == [(1, whole[1][1:]), (2, whole[2])]
    assert list(resumed.epochs(3)) == []


@KINDS
def test_an_epoch_that_is_left_or_not_read_is_over(kind: Any) -> None:
    """The numbers of epochs() go on whatever the loop's body does."""
    loader, seen = load(kind()), []
    for epoch in loader.epochs(4):
        seen.append(epoch)
        if epoch == 1:
            continue
        for number, _ in enumerate(loader):
            if epoch == 2 and number == 1:
                break
    assert seen == [0, 1, 2, 3]


@KINDS
def test_a_step_counts_when_its_last_micro_batch_is_handed_out(kind: Any) -> None:
    """A state taken between two micro-batches begins that step again."""
    loader = load(kind(), micro_batch=2)
    assert len(loader) == 5
    step = next(loader.steps())
    assert (len(step), step.index, step.num_samples, step.global_samples, step.scale) == (2, 0, 4, 4, 0.25)
    micro_batches = iter(step)
    next(micro_batches)
    assert loader.state_dict()["consumed"] == 0
    next(micro_batches)
    assert loader.state_dict()["consumed"] == 4
    assert repr(step) == "Step(index=0, num_samples=4, global_samples=4, micro_batches=2)"


def test_micro_batches_that_a_loop_leaves_are_taken_with_the_next_step() -> None:
    """Whoever looks at the first micro-batch of each step only gets the right ones."""
    loader = load(Numbers(), micro_batch=2, shuffle=False)
    assert [next(iter(step)).tolist() for step in loader.steps()] == [[0, 1], [4, 5], [8, 9]]
    assert loader.epoch == 1


def test_drop_last() -> None:
    """A last step that is not full is left out, of a stream too."""
    assert ids(load(Numbers(), shuffle=False, drop_last=True)) == ids(load(Stream(), drop_last=True))
    assert len(ids(load(Stream(), drop_last=True))) == 2


def test_persistent_workers_read_pass_after_pass() -> None:
    """Also after a pass that was left early, and with a stream, whose tickets never end. They end with the loader."""
    for data in (Numbers(), Stream()):
        loader = load(data, num_workers=2, persistent_workers=True, multiprocessing_context="fork")
        next(iter(loader))
        for _ in range(2):
            assert sorted(one for batch in loader for one in batch.tolist()) == list(range(10))
        # In no cycle: torch ends workers properly only if no garbage collector is needed for it.
        gc.disable()
        try:
            del loader
            assert multiprocessing.active_children() == []
        finally:
            gc.enable()


# ------------------------------------------------------------------------------ the batch

Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True)
class Sample:
    x: Any
    name: Any


def test_an_empty_batch_looks_like_a_full_one() -> None:
    """The dim that grows with the samples is cut to 0, wherever it is; the structure stays."""
    sample = {
        "x": torch.ones(2, 3),
        "y": 1,
        "name": "a",
        "pair": Pair(torch.ones(()), 0.5),
        "both": ("a", "b"),
    }
    empty = Packing().pack_empty(sample)
    assert empty["x"].shape == (0, 2, 3)
    assert (empty["y"].shape, empty["y"].dtype) == ((0,), torch.int64)
    assert empty["name"] == []
    assert isinstance(empty["pair"], Pair)
    assert empty["pair"].right.dtype == torch.float64
    assert empty["both"] == [(), ()]

    def time_first(samples: Any) -> Any:
        return Sample(torch.stack([one.x for one in samples], dim=1), [one.name for one in samples])

    empty = Packing(collate=time_first).pack_empty(Sample(torch.ones(5), "a"))
    assert empty.x.shape == (5, 0)
    assert empty.name == []


def test_parts_are_nearly_equal() -> None:
    """The first are larger by one at most."""
    assert [list(part) for part in cut_evenly(range(7), 3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [list(part) for part in cut_evenly(range(1), 2)] == [[0], []]


def test_a_data_sets_own_way_to_read_several_is_used_without_seeds() -> None:
    """__getitems__ can't be seeded by sample: it is taken with sample_seeds=False only."""

    class Several(Numbers):
        def __getitems__(self, indices: Any) -> Any:
            return [100 + index for index in indices]

    assert ids(load(Several(), shuffle=False))[0] == [0, 1, 2, 3]
    assert ids(load(Several(), shuffle=False, sample_seeds=False))[0] == [100, 101, 102, 103]


def test_without_seeds_the_data_set_draws_from_the_process_as_in_torch() -> None:
    """sample_seeds=False leaves random numbers to the user."""

    class Draws(Numbers):
        def __getitem__(self, index: int) -> Any:
            return torch.rand(())

    torch.manual_seed(4)
    wanted = torch.rand(10)
    torch.manual_seed(4)
    assert torch.equal(torch.cat(list(load(Draws(), sample_seeds=False))), wanted)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from 3.11 on")
@KINDS
def test_an_exception_of_the_data_set_says_which_sample(kind: Any) -> None:
    """The exception stays what it was, and carries a note."""

    class Broken(kind):  # type: ignore[misc]
        def __getitem__(self, index: int) -> Any:
            if index == 5:
                raise FileNotFoundError("5.jpg")
            return index

        def __iter__(self) -> Any:
            yield from map(self.__getitem__, range(self.size))

    with pytest.raises(FileNotFoundError, match=r"5\.jpg") as told:
        list(load(Broken(), shuffle=None if kind is Stream else False))
    wanted = "element 5 of the stream" if kind is Stream else "sample 5 of the data set"
    assert f"rankwise: while reading {wanted}, in epoch 0" in told.value.__notes__


def test_batches_go_to_the_device() -> None:
    """Here the meta device stands for one that is not the CPU; what is no tensor stays as it is."""
    data = [(torch.ones(2), "a")] * 4
    (batch,) = load(data, device="meta")
    assert batch[0].device.type == "meta"
    assert batch[1] == ("a",) * 4


# ----------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("data", "more", "told"),
    [
        (Stream(), {"shuffle": True}, "shuffle=True with a data set that can only be iterated"),
        (Stream(), {"lengths": [1]}, "lengths with a data set that can only be iterated"),
        (Stream(), {"split": "shard"}, r"Stream has no shard\(num_shards, index\)"),
        (Stream(), {"split": "half"}, "split='half'.*'stride', 'shard', 'dataset'"),
        (Stream(), {"split": "dataset", "drop_last": True}, "drop_last=True with split='dataset'"),
        (Stream(), {"global_batch": 0}, "global_batch=0"),
        (Numbers(), {"split": "stride"}, "split='stride' with a data set that has an index"),
        (Numbers(), {"num_workers": -1}, "num_workers option should be non-negative"),
        (Numbers(), {"prefetch_factor": 3}, "prefetch_factor"),
        (
            Numbers(),
            {"num_workers": 1, "multiprocessing_context": "thread"},
            "cannot find context for 'thread'",
        ),
        (Numbers(), {"micro_batch": 0}, "micro_batch=0"),
        (7, {}, "a int is no data set"),
        (iter(range(5)), {"num_workers": 2}, "can be read once, by one process, and there are 2 workers"),
    ],
)
def test_what_can_not_be_meant_is_refused(data: Any, more: dict[str, Any], told: str) -> None:
    """At once, with the value that is wrong."""
    with pytest.raises(UsageError, match="(?s)" + told):
        load(data, **more)


def test_a_one_shot_iterator_is_read_once() -> None:
    """The second epoch would be empty in silence."""
    loader = load(iter(range(5)))
    assert ids(loader) == [[0, 1, 2, 3], [4]]
    with pytest.raises(DataError, match="a one-shot iterator, and has been read"):
        list(loader)


def test_a_stream_that_tells_no_length_has_none() -> None:
    """As in torch: TypeError, so that list() and tqdm do without."""

    class Endless(IterableDataset):
        def __iter__(self) -> Any:
            yield 1

    with pytest.raises(TypeError, match="a Endless can only be iterated"):
        len(load(Endless()))


def test_a_state_of_other_data_is_refused() -> None:
    """For a stream as for a data set with an index, with both values."""
    with pytest.raises(DataError, match="num_samples 10, and this sampler has 11"):
        load(Numbers(11)).load_state_dict(load(Numbers(10)).state_dict())
    with pytest.raises(DataError, match="seed 0, and this loader has 1"):
        load(Stream(), seed=1).load_state_dict(load(Stream(), seed=0).state_dict())
    with pytest.raises(DataError, match="version None"):
        load(Stream()).load_state_dict({})


def test_several_ranks_without_a_job_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank would take every sample."""
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    for data in (Numbers(), Stream()):
        with pytest.raises(UsageError, match="WORLD_SIZE=2"):
            load(data)


def test_the_same_words_as_torch() -> None:
    """A TensorDataset and torch's arguments work as they do there."""
    data = TensorDataset(torch.arange(6), torch.arange(6) * 2)
    seen = []
    loader = load(data, shuffle=False, collate_fn=default_collate, num_workers=1, prefetch_factor=1, pin_memory=False,
                  worker_init_fn=seen.append, timeout_s=60, multiprocessing_context="fork")  # fmt: skip
    assert [[part.tolist() for part in batch] for batch in loader] == [
        [[0, 1, 2, 3], [0, 2, 4, 6]],
        [[4, 5], [8, 10]],
    ]
