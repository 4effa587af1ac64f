"""The loader on real ranks with real workers: what each step holds, at any number of both, and what a resume goes on with."""

from __future__ import annotations

import io
import random
import threading
from contextlib import redirect_stderr
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, default_collate

import rankwise
from rankwise.base.errors import CollectiveError, DataError, UsageError
from rankwise.data.metrics import Mean
from rankwise.testing.ranks import run_ranks, try_ranks

pytestmark = pytest.mark.linux

N, BATCH = 11, 4


class Numbers(Dataset):
    """Samples that say who they are, and draw an augmentation from each generator that a user may take."""

    def __init__(self, size: int = N) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        import numpy

        return index, torch.rand(2), random.random(), numpy.random.rand()


def workers(number: int) -> dict[str, Any]:
    """Return the arguments for so many workers; what a test defines can be forked but not pickled."""
    return {"num_workers": number, "multiprocessing_context": "fork" if number else None}


def read(loader: Any) -> list[Any]:
    """Return (epoch, step, scale, samples) of one pass; a sample is a number and what it drew."""
    epoch, seen = loader.epoch, []
    for step in loader.steps():
        samples = [
            (int(i), *x.tolist(), float(p), float(n)) for batch in step for i, x, p, n in zip(*batch, strict=True)
        ]
        assert len(samples) == step.num_samples
        seen.append((epoch, step.index, step.global_samples, samples))
    return seen


def merge(ranks: list[list[Any]]) -> list[Any]:
    """Join the ranks' parts of each step."""
    assert len({len(one) for one in ranks}) == 1
    merged = []
    for parts in zip(*ranks, strict=True):
        assert len({part[:3] for part in parts}) == 1
        merged.append((*parts[0][:3], sorted(sample for part in parts for sample in part[3])))
    return merged


def train(num_workers: int, micro_batch: int | None) -> list[Any]:
    with rankwise.init(device="cpu", timeout_s=30):
        loader = rankwise.DataLoader(
            Numbers(), global_batch=BATCH, micro_batch=micro_batch, **workers(num_workers), seed=3
        )
        return [one for _ in loader.epochs(2) for one in read(loader)]


def test_a_step_holds_the_same_samples_at_any_number_of_ranks_and_workers() -> None:
    """Numbers and augmentations of a step are those of one process, in two epochs that differ; each sample comes once."""
    wanted = merge(run_ranks(train, 1, 0, None))
    for epoch in (0, 1):
        assert sorted(one[0] for step in wanted if step[0] == epoch for one in step[3]) == list(range(N))
    assert wanted[0][3] != wanted[3][3]
    for place in (1, 2, 3, 4):
        drawn = [sample[place] for step in wanted for sample in step[3]]
        assert len(set(drawn)) == 2 * N, "each sample in each epoch draws its own numbers"
    for world_size, num_workers, micro_batch in [
        (2, 0, 1),
        (2, 2, None),
        (3, 0, None),
        (3, 2, 1),
        (4, 0, 1),
        (4, 2, None),
    ]:
        assert merge(run_ranks(train, world_size, num_workers, micro_batch)) == wanted, (
            world_size,
            num_workers,
        )


def test_every_rank_has_the_same_number_of_batches() -> None:
    """In a last step with fewer samples than ranks, those without one get tensors of no rows and the right shape."""

    def body() -> list[Any]:
        with rankwise.init(device="cpu", timeout_s=30):
            loader = rankwise.DataLoader(Numbers(5), global_batch=4, shuffle=False)
            batches = list(loader)
            assert len(batches) == len(loader)
            return [[tuple(part.shape) for part in batch] for batch in batches]

    for rank, batches in enumerate(run_ranks(body, 3)):
        sizes = [(2, 1, 1)[rank], (1, 0, 0)[rank]]
        assert batches == [[(n,), (n, 2), (n,), (n,)] for n in sizes]


def resume(state: Any, stop_after: int | None, num_workers: int) -> Any:
    with rankwise.init(device="cpu", timeout_s=30):
        loader = rankwise.DataLoader(Numbers(23), global_batch=4, **workers(num_workers), seed=5)
        if state is not None:
            loader.load_state_dict(state)
        seen = []
        for _ in loader.epochs(2):
            for step in loader.steps():
                seen.append((loader.epoch, step.index, 0, sorted(int(i) for batch in step for i in batch[0])))
                if len(seen) == stop_after:
                    return seen, loader.state_dict()
        return seen, loader.state_dict()


def test_a_resume_at_other_numbers_loses_and_repeats_nothing() -> None:
    """Stopped in mid-epoch with workers that had read ahead, and gone on with other ranks and workers: the same steps."""

    def run(world_size: int, *args: Any) -> Any:
        told = run_ranks(resume, world_size, *args)
        assert all(state == told[0][1] for _, state in told)
        return merge([seen for seen, _ in told]), told[0][1]

    whole, _ = run(1, None, None, 0)
    before, state = run(2, None, 3, 2)
    assert state["consumed"] == 12
    middle, state = run(3, state, 5, 0)
    after, _ = run(1, state, None, 2)
    assert before + middle + after == whole


def test_the_training_process_keeps_its_own_random_numbers() -> None:
    """Loading changes no generator of the training process, with and without workers: dropout stays as it was."""

    def body(num_workers: int) -> bool:
        import numpy

        with rankwise.init(device="cpu", timeout_s=30):
            torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
            before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
            for _ in rankwise.DataLoader(Numbers(), global_batch=BATCH, **workers(num_workers)):
                pass
            same = torch.equal(before[0], torch.get_rng_state())
            return same and before[1:] == (random.getstate(), numpy.random.get_state()[1].tolist())

    assert run_ranks(body, 1, 0) == [True]
    assert run_ranks(body, 1, 2) == [True]


def test_ranks_that_hold_different_data_are_told_before_the_first_step() -> None:
    """The error names what differs, and who holds what, on every rank."""

    def body(what: str) -> None:
        with rankwise.init(device="cpu", timeout_s=30) as ctx:
            size, seed = (N + ctx.rank, 0) if what == "num_samples" else (N, ctx.rank)
            list(rankwise.DataLoader(Numbers(size), global_batch=BATCH, seed=seed))

    for what, first, second in (("num_samples", "11", "12"), ("seed", "0", "1")):
        for outcome in try_ranks(body, 2, what):
            assert isinstance(outcome.error, CollectiveError)
            assert f"data loader: {what} differs" in str(outcome.error)
            assert f"rank 0: {what} {first}" in str(outcome.error)
            assert f"rank 1: {what} {second}" in str(outcome.error)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loop_that_takes_one_batch_at_a_time_gets_all_of_them(num_workers: int) -> None:
    """next(iter(loader)) on all ranks gives what a whole pass gives, over the end of the epoch."""

    def body(takes_one: bool) -> list[Any]:
        with rankwise.init(device="cpu", timeout_s=30):
            loader = rankwise.DataLoader(Numbers(), global_batch=BATCH, seed=3, **workers(num_workers))
            if takes_one:
                return [next(iter(loader))[0].tolist() for _ in range(6)]
            return [batch[0].tolist() for _ in range(2) for batch in loader]

    assert run_ranks(body, 2, True) == run_ranks(body, 2, False)


def test_a_rank_that_alone_has_taken_a_step_is_named() -> None:
    """A look at the data on one rank moves it: the next pass says who stands where, on every rank."""

    def body() -> None:
        with rankwise.init(device="cpu", timeout_s=30) as ctx:
            loader = rankwise.DataLoader(Numbers(), global_batch=BATCH)
            if ctx.rank == 1:
                next(iter(loader.sampler))
            list(loader)

    for outcome in try_ranks(body, 2):
        assert isinstance(outcome.error, CollectiveError)
        assert "data loader: consumed differs" in str(outcome.error)
        assert "rank 1: consumed 4" in str(outcome.error)


class Holes(Numbers):
    """A data set that "skips" bad files by returning None."""

    bad = (0, 1, 4, 6)

    def __getitem__(self, index: int) -> Any:
        return None if index in self.bad else super().__getitem__(index)


def test_a_sample_that_is_none_is_seen_before_anybody_waits() -> None:
    """Each rank that meets one names the samples, itself, and drop_none."""

    def body(num_workers: int) -> None:
        with rankwise.init(device="cpu", timeout_s=30):
            list(rankwise.DataLoader(Holes(), global_batch=BATCH, shuffle=False, **workers(num_workers)))

    for num_workers in (0, 2):
        outcomes = try_ranks(body, 2, num_workers)
        for rank, outcome in enumerate(outcomes):
            assert isinstance(outcome.error, DataError)
            assert outcome.error.rank == rank
            assert f"None for sample {rank}" in str(outcome.error)
            assert "drop_none=True" in str(outcome.error)


def test_drop_none_keeps_the_ranks_in_step_and_counts_what_is_left() -> None:
    """Ranks have equally many batches; scale goes by the samples that are left; a step of which none is left is left out."""

    def body() -> Any:
        with rankwise.init(device="cpu", timeout_s=30) as ctx:
            data = Holes(12)
            data.bad = (0, 2, 4, 5, 6, 7, 9)
            loader = rankwise.DataLoader(data, global_batch=4, micro_batch=1, shuffle=False, drop_none=True)
            told = []
            for step in loader.steps():
                ids = [batch[0].tolist() for batch in step]
                told.append((step.index, len(step), step.num_samples, step.global_samples, step.scale, ids))
            assert loader.epoch == 1
            assert ctx.world_size == 2
            return told

    first, second = run_ranks(body, 2)
    assert first == [(0, 2, 0, 2, 1.0, [[], []]), (2, 2, 2, 3, 2 / 3, [[8], [10]])]
    assert second == [(0, 2, 2, 2, 1.0, [[1], [3]]), (2, 2, 1, 3, 2 / 3, [[], [11]])]


def test_a_data_sets_own_data_error_comes_back_from_a_worker() -> None:
    """Its kind may be one that no other process can make: what it says travels, and never keeps the rank waiting."""

    class LocalError(DataError):
        def __init__(self, path: str, line: int) -> None:
            super().__init__(f"{path}:{line} is broken", hint="fetch it again")
            self.lock = threading.Lock()

    class Broken(Numbers):
        def __getitem__(self, index: int) -> Any:
            raise LocalError("data.bin", index)

    def body() -> None:
        with rankwise.init(device="cpu", timeout_s=30):
            list(rankwise.DataLoader(Broken(), global_batch=4, shuffle=False, **workers(1)))

    (outcome,) = try_ranks(body, 1)
    assert isinstance(outcome.error, DataError)
    assert "data.bin:0 is broken" in str(outcome.error)
    assert outcome.error.hint == "fetch it again"


def test_a_collate_function_that_returns_nothing_is_named() -> None:
    """None in the place of a batch would leave a rank without one."""

    def body() -> None:
        with rankwise.init(device="cpu"):
            list(rankwise.DataLoader(Numbers(), global_batch=4, shuffle=False, collate_fn=lambda _: None))

    (outcome,) = try_ranks(body, 1)
    assert isinstance(outcome.error, DataError)
    assert "collate_fn returned None for the batch of samples 0, 1, 2, 3" in str(outcome.error)


def test_accumulated_steps_equal_one_process() -> None:
    """With accumulate() and step.scale, gradients of 3 ranks with uneven micro-batches are those of one process."""

    def body() -> list[float]:
        with rankwise.init(device="cpu", timeout_s=30):
            model = torch.nn.Linear(2, 1).double()
            torch.nn.init.ones_(model.weight), torch.nn.init.zeros_(model.bias)
            ddp = rankwise.apply_ddp(model)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            loader = rankwise.DataLoader(Numbers(), global_batch=5, micro_batch=1, seed=2)
            for step in loader.steps():
                for _, inputs, target, _ in rankwise.accumulate(ddp, step):
                    loss = (ddp(inputs.double()).squeeze(1) - target).square().sum()
                    (loss * step.scale).backward()
                optimizer.step()
                optimizer.zero_grad()
            return [*model.weight.flatten().tolist(), model.bias.item()]

    one, three = run_ranks(body, 1)[0], run_ranks(body, 3)
    for rank in three:
        # The same float64 products, added in another order.
        assert rank == pytest.approx(one, rel=1e-13)


def test_one_loop_at_a_time() -> None:
    """A loop whose loader was moved by another one says so, instead of counting samples that it did not get."""

    def body() -> str:
        with rankwise.init(device="cpu"):
            loader = rankwise.DataLoader(Numbers(), global_batch=4)
            first = iter(loader)
            next(first), next(first)
            next(iter(loader))
            with pytest.raises(UsageError, match="this loop is at sample 8 of epoch 0"):
                next(first)
            return "told"

    assert run_ranks(body, 1) == ["told"]


def test_weights_draw_the_same_at_any_number_of_ranks_and_each_draw_is_augmented_anew() -> None:
    """A sample that comes twice in an epoch draws other numbers each time, and the same ones at any number of ranks."""

    def body(num_workers: int) -> list[Any]:
        with rankwise.init(device="cpu", timeout_s=30):
            weights = torch.tensor([5.0, *[0.1] * (N - 1)])
            return read(rankwise.DataLoader(Numbers(), global_batch=4, weights=weights, **workers(num_workers)))

    one = merge(run_ranks(body, 1, 0))
    assert merge(run_ranks(body, 3, 0)) == merge(run_ranks(body, 2, 2)) == one
    drawn = [sample for step in one for sample in step[3] if sample[0] == 0]
    assert len(drawn) > 2
    assert len(set(drawn)) == len(drawn)


def test_a_group_of_torchs_own_is_enough_where_no_rank_must_tell_another() -> None:
    """With init_process_group alone samples are dealt out; what needs an exchange asks for init()."""

    def body() -> list[int]:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        seen = [int(i) for batch in rankwise.DataLoader(Numbers(), global_batch=4) for i in batch[0]]
        with pytest.raises(UsageError, match="drop_none=True with 2 ranks"):
            rankwise.DataLoader(Numbers(), global_batch=4, drop_none=True)
        with pytest.raises(UsageError, match="evaluate: 2 ranks that have not joined by rankwise"):
            rankwise.evaluate(torch.nn.Identity(), Numbers(), {"m": Mean(lambda x, _: x)}, batch_size=2)
        dist.barrier()  # a rank that ends while the other one still connects takes the connection with it
        return seen

    first, second = run_ranks(body, 2)
    assert sorted(first + second) == list(range(N))


def _hear_uneven(global_batch: int, is_training: bool) -> str:
    with rankwise.init(device="cpu"), redirect_stderr(io.StringIO()) as said:
        loader = rankwise.DataLoader(torch.arange(24), global_batch=global_batch)
        for _ in range(2):
            with torch.set_grad_enabled(is_training):
                list(loader)
            for step in loader.steps():
                list(step)
        return said.getvalue()


@pytest.mark.parametrize(
    ("global_batch", "is_training", "is_told"), [(8, True, True), (9, True, False), (8, False, False)]
)
def test_unequal_shares_in_a_plain_loop_are_told_once(global_batch: int, *, is_training: bool, is_told: bool) -> None:
    """A mean over each rank's batch is not the mean of all: rank 0 says so, once, where somebody trains; steps() is exact."""
    first, *others = run_ranks(_hear_uneven, 3, global_batch, is_training)
    assert first.count("has 8 samples, of which rank 0 holds 3") == is_told
    assert bool(first) == is_told
    assert others == ["", ""]


def _mix(samples: list[Any]) -> Any:
    batch = default_collate(samples)
    return [batch[0], batch[1] * torch.rand(()), *batch[2:]]


def _hear_drawing(num_workers: int, collate: Any) -> str:
    with rankwise.init(device="cpu"), redirect_stderr(io.StringIO()) as said:
        loader = rankwise.DataLoader(Numbers(), global_batch=BATCH, collate_fn=collate, **workers(num_workers))
        for _ in range(2):
            list(loader.steps())
        return said.getvalue()


def test_a_collate_function_that_draws_is_told_once() -> None:
    """Mixup in collate_fn is another one at each number of ranks: rank 0 says so; what samples draw, and one rank, bring no word."""
    for num_workers in (0, 2):
        first, second = run_ranks(_hear_drawing, 2, num_workers, _mix)
        assert first.count("collate_fn draws random numbers") == 1
        assert second == ""
    assert run_ranks(_hear_drawing, 2, 0, None) == ["", ""]
    assert run_ranks(_hear_drawing, 1, 0, _mix) == [""]
