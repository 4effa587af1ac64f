"""Orders by weight and by length: how often, how long, and the same on every machine."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from rankwise import DataError, UsageError
from rankwise.data.epoch_order import (
    GROUP_BATCHES,
    LengthGroupedOrder,
    ShuffledOrder,
    WeightedOrder,
    _log,
    _round_weights,
    _scale,
)
from rankwise.data.sampler import GlobalBatchSampler


def take_all(order: Any, epoch: int = 0) -> torch.Tensor:
    """Return a whole epoch."""
    found: torch.Tensor = order.take(epoch, torch.arange(order.num_samples))
    return found


# ------------------------------------------------------------------------------------------------- by weight


def test_weights_with_replacement_are_kept() -> None:
    """Over 100000 draws each sample comes as often as its weight says, within 5 standard deviations; weight 0 never."""
    weights = torch.tensor([0.0, 1.0, 2.0, 0.5, 0.0, 6.5, 0.0])
    number = 100_000
    counts = torch.bincount(take_all(WeightedOrder(weights, number, seed=0)), minlength=7)
    for count, chance in zip(counts.tolist(), (weights / 10).tolist(), strict=True):
        assert abs(count - number * chance) <= 5 * math.sqrt(number * chance * (1 - chance))


def test_weights_without_replacement_are_kept() -> None:
    """Two of three samples, 5000 epochs: the pairs come as often as drawing one after the other gives them, within 5 sd."""
    weights, epochs = [1.0, 2.0, 5.0], 5000
    order = WeightedOrder(weights, 2, seed=1, replacement=False)
    counts: dict[tuple[int, ...], int] = {}
    for epoch in range(epochs):
        pair = tuple(take_all(order, epoch).tolist())
        counts[pair] = counts.get(pair, 0) + 1
    for first in range(3):
        for second in {0, 1, 2} - {first}:
            chance = weights[first] / 8 * weights[second] / (8 - weights[first])
            deviation = math.sqrt(epochs * chance * (1 - chance))
            assert abs(counts[first, second] - epochs * chance) < 5 * deviation


def test_golden_values() -> None:
    """Weighted draws are what they always were: no library's logarithm or sum has a part in them."""
    weights = [0.1 * number for number in range(1, 1001)]
    first = take_all(WeightedOrder(weights, 6, seed=2), epoch=1)
    second = take_all(WeightedOrder(weights, 6, seed=2, replacement=False), epoch=1)
    assert (first.tolist(), second.tolist()) == (
        [515, 968, 965, 230, 544, 634],
        [798, 507, 902, 910, 906, 290],
    )


@given(st.lists(st.floats(1e-300, 1e300) | st.just(0.0), min_size=1, max_size=50).filter(any))
@example([5e-324])
@example([1.7e308, 1.7e308])
def test_rounded_weights_keep_their_proportion(weights: list[float]) -> None:
    """Weights of any size become whole numbers in their proportion to 2**-50 of the largest; none that is above 0 is lost."""
    rounded = _round_weights(torch.tensor(weights, dtype=torch.float64)).tolist()
    assert sum(rounded) < 1 << 62
    assert all((number > 0) == (weight > 0) for number, weight in zip(rounded, weights, strict=True))
    largest, most = max(weights), max(rounded)
    for number, weight in zip(rounded, weights, strict=True):
        assert abs(number / most - weight / largest) < 2**-50


@given(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(1, (1 << 62) - 1))
@example(-1, (1 << 62) - 1)
def test_scaling_is_exact(bits: int, total: int) -> None:
    """64 random bits are scaled to the sum of weights as Python's integers do it."""
    assert _scale(torch.tensor([bits]), total).tolist() == [(bits % (1 << 64)) * total >> 64]


@given(st.floats(2**-54, 1 - 2**-53))
def test_logarithm_is_right(number: float) -> None:
    """The logarithm by + - * / has 15 right digits, near 1 as well."""
    assert _log(torch.tensor([number], dtype=torch.float64)).item() == pytest.approx(math.log(number), rel=4e-15)


@pytest.mark.parametrize(
    ("weights", "num_samples", "replacement", "words"),
    [
        ([1.0, math.nan], 2, True, "finite"),
        ([1.0, math.inf], 2, True, "finite"),
        ([1.0, -1.0], 2, True, "finite"),
        ([[1.0]], 1, True, r"shape \(1, 1\)"),
        ([0.0, 0.0], 2, True, "all 2 weights are 0"),
        ([0.0, 1.0], 2, False, "num_samples=2 .* 1 weights"),
    ],
)
def test_bad_weights_are_refused(weights: Any, num_samples: int, replacement: bool, words: str) -> None:
    """Weights that can't be weights are named."""
    with pytest.raises(UsageError, match=words):
        WeightedOrder(weights, num_samples, seed=0, replacement=replacement)


# ------------------------------------------------------------------------------------------------- by length


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 600), st.integers(1, 7), st.integers(0, 2))
def test_every_sample_comes_once(size: int, global_batch: int, epoch: int) -> None:
    """Grouped by length, an epoch still holds every sample once, whatever is left over, and any part of it is the same."""
    order = LengthGroupedOrder([number * 7 % 31 for number in range(size)], global_batch, seed=0)
    found = take_all(order, epoch)
    assert torch.equal(found.sort().values, torch.arange(size))
    backwards = torch.arange(size).flip(0)
    assert torch.equal(order.take(epoch, backwards), found.flip(0))


def _padding(order: Any, lengths: torch.Tensor, global_batch: int) -> float:
    rows = lengths[take_all(order)][: len(lengths) // global_batch * global_batch].view(-1, global_batch)
    return float((rows.max(dim=1).values * global_batch).sum() / rows.sum()) - 1


def test_little_is_padded_and_steps_are_not_sorted() -> None:
    """Batches of like length pad a tenth of what shuffled ones do, and long ones don't all come at one end."""
    lengths = (torch.arange(100_000) * 7919) % 1000 + 1
    order = LengthGroupedOrder(lengths, 32, seed=0)
    assert _padding(order, lengths, 32) < 0.1 * _padding(ShuffledOrder(100_000, 0), lengths, 32)
    firsts = lengths[take_all(order)][::32].double()
    neighbours = torch.corrcoef(torch.stack([firsts[:-1], firsts[1:]]))[0, 1]
    assert abs(float(neighbours)) < 0.1
    tenth = firsts[: len(firsts) // 10].mean()
    assert abs(float(tenth / firsts.mean()) - 1) < 0.1


def test_ranks_get_like_lengths() -> None:
    """Within a step, no rank has the long ones: the ranks' sums differ by less than one length for each sample."""
    lengths = [(number * 7919) % 500 + 1 for number in range(20_000)]
    ranks = [
        GlobalBatchSampler(20_000, global_batch=40, lengths=lengths, num_replicas=4, rank=rank) for rank in range(4)
    ]
    for parts in zip(*(sampler.draw(0) for sampler in ranks), strict=True):
        sums = [sum(lengths[index] for index in part) for part in parts]
        whole = [lengths[index] for part in parts for index in part]
        assert max(sums) - min(sums) <= max(whole) - min(whole)


def test_only_a_group_is_held() -> None:
    """From one group to the next, memory holds the lengths and one group: 64 global batches."""
    order = LengthGroupedOrder(torch.ones(10_000, dtype=torch.int64), 10, seed=0)
    take_all(order)
    assert order._kept is not None
    assert len(order._kept[1]) <= GROUP_BATCHES * 10


# ----------------------------------------------------------------------------------------- on the same cursor


@pytest.mark.parametrize(
    "options",
    [
        {"weights": [1.0 + number % 5 for number in range(101)]},
        {"weights": [1.0 + number % 5 for number in range(101)], "num_samples": 350},
        {"weights": [1.0 + number % 5 for number in range(101)], "num_samples": 90, "replacement": False},
        {"lengths": [number * 13 % 17 for number in range(101)]},
    ],
    ids=["weighted", "more than there are", "without replacement", "by length"],
)
def test_any_order_is_the_same_at_any_number_of_ranks(options: dict[str, Any]) -> None:
    """Weighted and length-grouped steps hold the same samples at 1 and 3 ranks, and go on in the middle at 2."""

    def step_sets(world: int, consumed: int = 0) -> list[list[int]]:
        ranks = [
            GlobalBatchSampler(101, global_batch=8, num_replicas=world, rank=rank, **options) for rank in range(world)
        ]
        return [
            sorted(chain.from_iterable(parts))
            for parts in zip(*(each.draw(1, consumed) for each in ranks), strict=True)
        ]

    assert step_sets(3) == step_sets(1)
    assert step_sets(2, 24) == step_sets(1)[3:]


def test_a_state_belongs_to_its_weights_and_lengths() -> None:
    """A state is refused where weights, lengths, or with lengths the global batch, are others."""

    def make(**options: Any) -> GlobalBatchSampler:
        return GlobalBatchSampler(4, **{"global_batch": 2, "num_replicas": 1, "rank": 0, **options})

    weighted, by_length = make(weights=[1.0, 2, 3, 4]), make(lengths=[1, 2, 3, 4])
    make(weights=[1.0, 2, 3, 4]).load_state_dict(weighted.state_dict())
    make(weights=[1.0, 2, 3, 4], global_batch=3).load_state_dict(weighted.state_dict())
    make(lengths=torch.tensor([1, 2, 3, 4])).load_state_dict(by_length.state_dict())
    for other, state in (
        (make(), weighted.state_dict()),
        (make(weights=[1.0, 2, 4, 3]), weighted.state_dict()),
        (make(weights=[1.0, 2, 3, 4], replacement=False), weighted.state_dict()),
        (make(lengths=[1, 2, 4, 3]), by_length.state_dict()),
        (make(lengths=[1, 2, 3, 4], global_batch=1), by_length.state_dict()),
    ):
        with pytest.raises(DataError, match="saved with order"):
            other.load_state_dict(state)
