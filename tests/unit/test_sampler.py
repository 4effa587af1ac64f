"""The global batches: the same samples at any number of ranks, each once an epoch, and a place to go on from."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from rankwise import DataError, UsageError
from rankwise.data.sampler import GlobalBatchSampler

_WORLDS = st.integers(1, 6)
_MICRO = st.none() | st.integers(1, 5)


def make(dataset: Any, rank: int = 0, num_replicas: int = 1, **options: Any) -> GlobalBatchSampler:
    """Return a sampler of one of some ranks."""
    return GlobalBatchSampler(dataset, num_replicas=num_replicas, rank=rank, **options)


def make_all(dataset: Any, num_replicas: int, **options: Any) -> list[GlobalBatchSampler]:
    """Return the samplers of all ranks."""
    return [make(dataset, rank, num_replicas, **options) for rank in range(num_replicas)]


def take_steps(samplers: list[GlobalBatchSampler], num_steps: int | None = None) -> list[list[int]]:
    """Return the samples of each step over all ranks, sorted, and check that the ranks keep step with each other."""
    passes = [iter(sampler) for sampler in samplers]
    consumed, found = samplers[0].consumed, list[list[int]]()
    for step in range(samplers[0].schedule.count_steps(consumed) if num_steps is None else num_steps):
        plans = [sampler.schedule.plan(step, consumed) for sampler in samplers]
        assert len({(plan.index, plan.start, plan.global_samples, len(plan.micro_sizes)) for plan in plans}) == 1
        parts = []
        for plan, sampler_pass, sampler in zip(plans, passes, samplers, strict=True):
            lists = list(islice(sampler_pass, len(plan.micro_sizes)))
            assert tuple(len(indices) for indices in lists) == plan.micro_sizes
            assert sum(plan.micro_sizes) == plan.num_samples
            assert max(plan.micro_sizes) - min(plan.micro_sizes) <= 1
            largest = -(-plan.global_samples // sampler.num_replicas)
            assert len(lists) == -(-largest // (sampler.micro_batch or largest))
            assert max(plan.micro_sizes) <= (sampler.micro_batch or plan.num_samples)
            parts += lists
        assert max(plan.num_samples for plan in plans) - min(plan.num_samples for plan in plans) <= 1
        found.append(sorted(index for indices in parts for index in indices))
        assert len(found[-1]) == plans[0].global_samples
    if num_steps is None:
        for sampler_pass in passes:
            assert next(sampler_pass, None) is None
    return found


# ------------------------------------------------------------------ the same at any number of ranks, each once


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(1, 20), _WORLDS, _MICRO, st.booleans(), st.booleans(), st.integers(0, 3))
def test_steps_are_the_same_at_any_number_of_ranks(
    size: int, global_batch: int, world: int, micro: int | None, shuffle: bool, drop_last: bool, epoch: int
) -> None:
    """Step k holds what one process sees in it, whatever ranks and micro-batches; an epoch holds every sample once."""
    if drop_last and size < global_batch:
        return
    options = {"global_batch": global_batch, "shuffle": shuffle, "drop_last": drop_last, "seed": 3}
    alone, ranks = make(size, **options), make_all(size, world, micro_batch=micro, **options)
    for sampler in (alone, *ranks):
        sampler.set_epoch(epoch)
    steps = take_steps(ranks)
    assert steps == take_steps([alone])
    assert len(steps) == alone.num_steps
    samples = [index for step in steps for index in step]
    assert len(set(samples)) == len(samples) == (size // global_batch * global_batch if drop_last else size)
    if not drop_last:
        assert sorted(samples) == list(range(size))
    assert all(len(sampler) == len(list(sampler.draw(epoch))) for sampler in ranks)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 60), st.integers(1, 20), st.booleans())
def test_it_goes_on_anywhere_at_any_number_of_ranks(
    data: st.DataObject, size: int, global_batch: int, drop_last: bool
) -> None:
    """A job that is broken off after any steps, again and again, with other ranks each time, sees what one pass sees."""
    if drop_last and size < global_batch:
        return
    options = {"global_batch": global_batch, "drop_last": drop_last, "seed": 1}
    alone = make(size, **options)
    expected = take_steps([alone]) + take_steps([alone])
    found, state = list[list[int]](), make(size, **options).state_dict()
    while len(found) < len(expected):
        world = data.draw(_WORLDS)
        ranks = make_all(size, world, micro_batch=data.draw(_MICRO), **options)
        for sampler in ranks:
            sampler.load_state_dict(json.loads(json.dumps(state)))
        left = ranks[0].schedule.count_steps(ranks[0].consumed)
        number = data.draw(st.integers(1, left)) if left else 0
        found += take_steps(ranks, number if number < left else None)
        states = [sampler.state_dict() for sampler in ranks]
        assert all(each == states[0] for each in states)
        state = states[0]
    assert found == expected
    assert state["epoch"] == 2


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 80), st.integers(1, 9), st.integers(1, 9), _WORLDS, st.integers(0, 9))
def test_another_global_batch_goes_on_at_the_next_sample(
    size: int, before: int, after: int, world: int, num_steps: int
) -> None:
    """After a change of the global batch the epoch still holds every sample once, and steps begin where it changed."""
    first = make(size, global_batch=before)
    found = take_steps([first], min(num_steps, first.num_steps))
    ranks = make_all(size, world, global_batch=after)
    for sampler in ranks:
        sampler.load_state_dict(first.state_dict())
    consumed = ranks[0].consumed
    assert consumed == sum(map(len, found))
    rest = take_steps(ranks)
    assert all(len(step) == after for step in rest[:-1])
    assert sorted(index for step in found + rest for index in step) == list(range(size))


def test_10_to_the_12_samples_cost_nothing() -> None:
    """With 10**12 samples, the first and the last steps are there at once, and the ranks' shares don't overlap."""
    ranks = make_all(10**12, 3, global_batch=1000)
    assert ranks[0].num_steps == 10**9
    first = [next(iter(sampler)) for sampler in ranks]
    assert len({index for indices in first for index in indices}) == 1000
    last = [list(sampler.draw(0, 10**12 - 1500)) for sampler in ranks]
    assert [len(lists) for lists in last] == [2, 2, 2]
    assert sum(len(indices) for lists in last for indices in lists) == 1500


def test_the_share_of_a_rank_does_not_depend_on_blocks() -> None:
    """Steps that are computed many at a time hold what each holds by itself."""
    sampler = make(200_000, 1, 3, global_batch=40)
    whole = list(sampler.draw(0))
    assert len(whole) == 5000
    for step in (0, 1, 77, 78, 2500, 4999):
        assert next(sampler.draw(0, 40 * step)) == whole[step]


def test_golden_values() -> None:
    """Ranks 0 and 1 of 2 get in epoch 2 what they always got: a later version goes on with the same order."""
    assert [list(sampler.draw(2)) for sampler in make_all(10, 2, global_batch=4, seed=5)] == [
        [[2, 1], [3, 5], [7]],
        [[0, 8], [4, 6], [9]],
    ]


def test_default_device_is_left_alone() -> None:
    """With another default device set, indices are still computed on the CPU."""
    with torch.device("meta"):
        assert sorted(index for indices in make(70_000, global_batch=7) for index in indices) == list(range(70_000))


# ------------------------------------------------------------------------------------------- passes and state


def test_passes_go_through_the_epochs_by_themselves() -> None:
    """Each pass is the next epoch, and shuffled anew, without set_epoch."""
    sampler = make(50, global_batch=10)
    first, second = list(sampler), list(sampler)
    assert sampler.epoch == 2
    assert sampler.consumed == 0
    assert first != second
    assert [first, second] == [list(sampler.draw(epoch)) for epoch in (0, 1)]


def test_set_epoch_begins_that_epoch() -> None:
    """set_epoch goes to the start of any epoch, also out of the middle of another."""
    sampler = make(50, global_batch=10)
    taken = list(islice(sampler, 3))
    sampler.set_epoch(7)
    assert (sampler.epoch, sampler.consumed) == (7, 0)
    assert list(sampler) == list(sampler.draw(7))
    assert taken == list(sampler.draw(0))[:3]


def test_the_usual_loop_does_not_lose_its_place() -> None:
    """set_epoch with the epoch that was just loaded leaves the cursor where it is, and only the first time."""
    saved = make(50, global_batch=10)
    list(islice(saved, 3))
    sampler = make(50, global_batch=10)
    sampler.load_state_dict(saved.state_dict())
    seen = []
    for epoch in range(sampler.epoch, 2):
        sampler.set_epoch(epoch)
        seen.append(list(sampler))
    assert seen == [list(sampler.draw(0))[3:], list(sampler.draw(1))]
    sampler.set_epoch(0)
    assert list(sampler) == list(sampler.draw(0))


def test_set_epoch_begins_an_epoch_from_its_start() -> None:
    """A look at the first batch, or a loop that was left, costs nothing then; a loaded place is the start, the first time."""
    sampler = make(50, global_batch=10)
    next(iter(sampler))
    sampler.set_epoch(0)
    assert list(sampler) == list(sampler.draw(0))
    state = {**sampler.state_dict(), "epoch": 4, "consumed": 20}
    sampler.load_state_dict(state)
    next(iter(sampler))
    sampler.set_epoch(4)
    next(iter(sampler))
    assert list(sampler) == list(sampler.draw(4, 30))
    assert sampler.epoch == 5
    sampler.load_state_dict(state)
    for start in (20, 0):
        sampler.set_epoch(4)
        assert next(iter(sampler)) == next(sampler.draw(4, start))


@pytest.mark.parametrize("drop_last", [False, True])
def test_between_epochs_a_data_set_may_grow_or_shrink(drop_last: bool) -> None:
    """Saved behind an epoch's last step: the resumed pass is empty, and the next epoch has the samples of now; the other rank does not warn."""
    saved = make(53, 1, 2, global_batch=10, drop_last=drop_last)
    for _ in saved:
        state = saved.state_dict()
    for size in (80, 20):
        sampler = make(size, 0, 2, global_batch=10, drop_last=drop_last)
        with pytest.warns(UserWarning, match=f"two epochs of 53 samples, and the data set has {size} now"):
            sampler.load_state_dict(state)
        assert list(sampler) == []
        assert list(sampler) == list(sampler.draw(1))
        make(size, 1, 2, global_batch=10, drop_last=drop_last).load_state_dict(state)
    fresh = make(80, 1, 2, global_batch=10)
    fresh.load_state_dict(saved.state_dict())  # the start of epoch 1
    assert list(fresh) == list(fresh.draw(1))


def test_a_pass_that_was_left_early_goes_on() -> None:
    """One step or several: the next pass goes on behind them; behind the last step comes the next epoch."""
    sampler = make(50, global_batch=10)
    list(islice(sampler, 2))
    next(iter(sampler))
    assert list(sampler) == list(sampler.draw(0, 30))
    assert [next(iter(sampler)) for _ in range(10)] == [*sampler.draw(1), *sampler.draw(2)]


def test_the_batch_at_hand_counts_and_a_part_of_a_step_does_not() -> None:
    """In the loop's body the batch at hand is consumed; with micro-batches, the step is when its last one is out."""
    sampler = make(20, global_batch=8, micro_batch=3)
    assert [sampler.consumed for _ in sampler] == [0, 0, 8, 8, 8, 16, 16, 20]
    assert (sampler.epoch, sampler.consumed) == (1, 0)


def test_a_state_of_the_last_step_leads_to_the_end_of_its_epoch() -> None:
    """Saved in the last step's body, the resumed pass is empty: what stands behind the loop is done once, not skipped."""
    saved = make(20, global_batch=10)
    for _ in saved:
        state = saved.state_dict()
    assert (state["epoch"], state["consumed"]) == (0, 20)
    sampler = make(20, global_batch=10)
    sampler.load_state_dict(state)
    assert list(sampler) == []
    assert list(sampler) == list(sampler.draw(1))


def test_an_older_pass_does_not_move_the_cursor() -> None:
    """When a new pass has begun, what is still taken from an older one is not counted."""
    sampler = make(50, global_batch=10)
    old = iter(sampler)
    next(old)
    new = iter(sampler)
    list(old)
    assert (sampler.epoch, sampler.consumed) == (0, 10)
    next(new)
    assert sampler.consumed == 20


def test_the_state_is_small() -> None:
    """The state is a few numbers and words, also of 10**12 samples; drawing ahead does not change it."""
    sampler = make(10**12, 5, 8, global_batch=4096, micro_batch=7)
    next(iter(sampler))
    before = sampler.state_dict()
    list(islice(sampler.draw(3, 5), 4))
    assert sampler.state_dict() == before
    assert len(json.dumps(before)) < 200


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_samples": 51}, ["num_samples 51", "50"]),
        ({"seed": 9}, ["seed 9", "0", "seed of the state"]),
        ({"order": "sequential"}, ["'sequential'", "'shuffled'"]),
        ({"consumed": 51}, ["51 of 50"]),
        ({"consumed": -1}, ["-1 of 50"]),
        ({"num_samples": None}, ["10 of None"]),
        ({"global_batch": "10"}, ["damaged"]),
        ({"consumed": 3.0}, ["3.0 of 50"]),
        ({"epoch": "1"}, ["epoch '1'"]),
        ({"version": 2}, ["version 2", "1 is expected"]),
        ({"version": None}, ["version None"]),
    ],
)
def test_states_that_do_not_fit_are_refused(change: dict[str, Any], words: list[str]) -> None:
    """A state of other data, seed or order, or a damaged one, is an error with both values; the cursor stays."""
    sampler = make(50, 1, 2, global_batch=10)
    next(iter(sampler))
    before = sampler.state_dict()
    with pytest.raises(DataError) as caught:
        sampler.load_state_dict({**before, **change})
    assert all(word in str(caught.value) for word in words), caught.value
    assert caught.value.rank == 1
    assert sampler.state_dict() == before
    with pytest.raises(DataError, match="list"):
        sampler.load_state_dict([1])  # type: ignore[arg-type]


def test_more_than_an_epoch_is_not_advanced() -> None:
    """advance() beyond the epoch is an error with both numbers."""
    sampler = make(50, global_batch=10)
    sampler.begin_pass()
    with pytest.raises(UsageError, match=r"60 samples .* epoch 0 has 50 left"):
        sampler.advance(60)


# ------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"global_batch": 0}, "global_batch=0"),
        ({"global_batch": 2.5}, "global_batch=2.5"),
        ({"global_batch": True}, "global_batch=True"),
        ({"micro_batch": 0}, "micro_batch=0"),
        ({"seed": "a"}, "seed='a'"),
        ({"global_batch": 11, "drop_last": True}, "10 samples and a global batch of 11"),
        ({"weights": [1.0] * 9}, "9 weights for 10 samples"),
        ({"lengths": [1] * 11}, "11 lengths for 10 samples"),
        ({"lengths": iter([1])}, "a list_iterator as lengths for 10 samples"),
        ({"weights": [1.0] * 10, "lengths": [1] * 10}, "lengths= can't go together with weights"),
        ({"lengths": [1] * 10, "shuffle": False}, "shuffle= can't go together with lengths"),
        ({"num_samples": 3}, "num_samples= can't go together with no weights"),
        ({"replacement": False}, "replacement= can't go together with no weights"),
        ({"rank": 2}, "rank=2 of num_replicas=2"),
        ({"num_replicas": None, "rank": 1}, "rank=1"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(options: dict[str, Any], words: str) -> None:
    """Each bad argument is named with its value."""
    arguments: dict[str, Any] = {"global_batch": 4, "num_replicas": 2, "rank": 0, **options}
    with pytest.raises(UsageError) as caught:
        GlobalBatchSampler(10, **arguments)
    assert words in str(caught.value)


def test_a_data_set_tells_its_length_or_is_refused() -> None:
    """Anything with a length will do, or the number itself; an iterable data set is refused with a way out."""
    assert make([5, 6, 7], global_batch=2).num_samples == 3
    assert make(0, global_batch=2).num_steps == 0
    assert list(make(0, global_batch=2)) == []
    with pytest.raises(UsageError, match="generator does not report how many"):
        make((number for number in range(3)), global_batch=2)
    with pytest.raises(UsageError, match="-1"):
        make(-1, global_batch=2)
    with pytest.raises(UsageError, match="epoch=-1"):
        make(3, global_batch=2).set_epoch(-1)
    with pytest.raises(UsageError, match="step 2 was asked for, and 2 steps"):
        make(3, global_batch=2).schedule.plan(2)


def test_a_rank_of_several_must_have_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the environment tells of four ranks and none has joined a job, no rank silently takes every sample."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(UsageError, match=r"WORLD_SIZE=4 .* no process group") as caught:
        GlobalBatchSampler(10, global_batch=2)
    assert caught.value.rank == 2
    assert make(10, global_batch=2).num_replicas == 1
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert GlobalBatchSampler(10, global_batch=2).rank == 0
