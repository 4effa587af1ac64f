"""The loader in one process without a job: its passes and place, empty batches, what it passes on, and what it refuses."""

from __future__ import annotations

import gc
import multiprocessing
import sys
from collections import namedtuple
from dataclasses import dataclass
from itertools import islice
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
@pytest.mark.parametrize("size", [10, 12])
def test_a_pass_that_was_left_early_goes_on(kind: Any, size: int) -> None:
    """next(iter(loader)), and a loop that breaks off, give epoch by epoch what whole passes give."""
    whole = load(kind(size), seed=2)
    wanted = [batch for _ in range(3) for batch in ids(whole)]
    loader = load(kind(size), seed=2)
    assert [next(iter(loader)).tolist() for _ in wanted] == wanted
    loader, seen = load(kind(size), seed=2), []
    while len(seen) < 9:
        for number, batch in enumerate(loader):
            seen.append(batch.tolist())
            if number == 1:
                break
    assert seen[:9] == wanted


@KINDS
def test_a_live_loop_and_a_resumed_one_give_the_same(kind: Any) -> None:
    """Whatever was broken off, and where: a state taken then gives elsewhere what the next pass gives here."""
    for num_steps in range(1, 4):
        live, resumed = load(kind(), seed=2), load(kind(), seed=2)
        list(islice(live, num_steps))
        resumed.load_state_dict(live.state_dict())
        # After the last step the resumed loop is asked once more, so that what stands behind it is done.
        rest = ids(resumed) or ids(resumed)
        assert ids(live) == rest
        assert live.state_dict() == resumed.state_dict()


@KINDS
def test_epochs_begin_from_their_start(kind: Any) -> None:
    """A look before costs nothing there, at a loaded place neither; set_epoch begins anew what was left early."""
    whole = load(kind(), seed=1)
    wanted = [ids(whole) for _ in range(2)]
    loader = load(kind(), seed=1)
    next(iter(loader))
    state = loader.state_dict()
    assert [ids(loader) for _ in loader.epochs(2)] == wanted
    loader.load_state_dict(state)
    next(iter(loader))
    assert [ids(loader) for _ in loader.epochs(2)] == [wanted[0][1:], wanted[1]]
    loader.load_state_dict(state)
    for _ in range(2):
        loader.set_epoch(0)
    next(iter(loader))
    loader.set_epoch(0)
    assert ids(loader) == wanted[0]


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
        first = next(iter(loader)).tolist()
        assert sorted(first + [one for batch in loader for one in batch.tolist()]) == list(range(10))
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


@KINDS
def test_an_error_names_the_samples_of_its_own_batch(kind: Any) -> None:
    """Of a step in several micro-batches, with samples that were left out: those that the collate function has got."""

    class Holes(kind):  # type: ignore[misc]
        def __getitem__(self, index: int) -> Any:
            return None if index == 5 else index

        def __iter__(self) -> Any:
            yield from map(self.__getitem__, range(self.size))

    def collate(samples: list[int]) -> Any:
        return None if 7 in samples else torch.tensor(samples)

    shuffle = None if kind is Stream else False
    loader = load(Holes(), shuffle=shuffle, drop_none=True, micro_batch=2, collate_fn=collate)
    # A stream is shared out after the None is gone; an index is before.
    told = "the batch of sample" + (r"s 6, 7\n" if kind is Numbers else r" 7\n")
    with pytest.raises(DataError, match=told):
        list(loader)


def test_a_collate_function_that_changes_its_samples_sees_each_once() -> None:
    """An empty batch is made after a sample, which is packed as well, or was read from memory that the user keeps."""

    def pop(samples: list[dict[str, Any]]) -> Any:
        return torch.tensor([one.pop("x") for one in samples])

    kept = {"x": 1.0}
    assert Packing(collate=pop).pack_empty(kept).shape == (0,)
    assert kept == {"x": 1.0}


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
        (Numbers(), {"num_workers": -1}, "num_workers=-1"),
        (Stream(), {"num_workers": "2"}, "num_workers='2'"),
        (Stream(), {"seed": 1.5}, "seed=1.5"),
        (Stream(), {"replacement": False}, "replacement=False with a data set that can only be iterated"),
        (Numbers(), {"num_workers": "2"}, "num_workers='2'"),
        (Numbers(), {"device": "bogus"}, "device='bogus'"),
        (Stream(), {"device": 1.5}, "device=1.5"),
        (Numbers(), {"num_workers": 1, "timeout_s": -1}, "timeout"),
        (Numbers(), {"prefetch_factor": 3}, "prefetch_factor"),
        (
            Numbers(),
            {"num_workers": 1, "multiprocessing_context": "thread"},
            "cannot find context for 'thread'",
        ),
        (Numbers(), {"micro_batch": 0}, "micro_batch=0"),
        (7, {}, "a int is not a data set"),
        (
            torch.utils.data.DataLoader(Numbers(), batch_size=2),
            {},
            "is a DataLoader, which yields batches.*loader.dataset",
        ),
        (Numbers(), {"sampler": range(3)}, "no argument 'sampler'.*set_epoch.*shuffle=False"),
        (Numbers(), {"bach": 3}, "no argument 'bach'"),
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
    begun = load(Numbers(10))
    next(iter(begun))
    with pytest.raises(DataError, match="num_samples 10, in the middle of epoch 0, and this sampler has 11"):
        load(Numbers(11)).load_state_dict(begun.state_dict())
    with pytest.raises(DataError, match="seed 0, and this loader has 1"):
        load(Stream(), seed=1).load_state_dict(load(Stream(), seed=0).state_dict())
    with pytest.raises(DataError, match="version None"):
        load(Stream()).load_state_dict({})


@KINDS
def test_a_state_of_the_other_kind_is_told_as_such(kind: Any) -> None:
    """Not as other data or another seed: both kinds are named."""
    other = Stream if kind is Numbers else Numbers
    words = {Numbers: "a data set that has an index", Stream: "a data set that can only be iterated"}
    with pytest.raises(DataError, match=f"saved for {words[other]}, but this is {words[kind]}"):
        load(kind()).load_state_dict(load(other()).state_dict())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"streams": None}, "a NoneType as streams"),
        ({"streams": []}, "0 streams, but 1 are expected"),
        ({"streams": [{}, {}]}, "2 streams, but 1 are expected"),
        ({"streams": [7]}, "None elements read of a stream"),
        ({"streams": [{"num_read": "x", "state": None}]}, "'x' elements read of a stream"),
        ({"streams": [{"num_read": -1}]}, "-1 elements read of a stream"),
        ({"consumed": -1}, "turn \\[0, -1,"),
        ({"epoch": True}, "turn \\[True,"),
        ({"kind": 3}, "saved for something unknown"),
    ],
)
def test_a_damaged_state_of_a_stream_is_refused(change: dict[str, Any], told: str) -> None:
    """Before anything moves: the loader stays where it was."""
    loader = load(Stream())
    next(iter(loader))
    before = loader.state_dict()
    with pytest.raises(DataError, match=told):
        loader.load_state_dict({**before, **change})
    with pytest.raises(DataError, match="version 'list'"):
        loader.load_state_dict([1])
    assert loader.state_dict() == before


def test_a_state_of_streams_of_their_own_must_fit_the_workers() -> None:
    """As many streams as there are parts, and the turn is one of them."""
    loader = load(Stream(), split="dataset", num_workers=2, multiprocessing_context="fork")
    state = loader.state_dict()
    with pytest.raises(DataError, match="1 streams, but 2 are expected"):
        loader.load_state_dict({**state, "streams": state["streams"][:1]})
    with pytest.raises(DataError, match="turn 2 of 2 streams"):
        loader.load_state_dict({**state, "turn": 2})
    loader.load_state_dict(state)


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
