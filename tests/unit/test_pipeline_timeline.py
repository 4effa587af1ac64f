"""What a schedule would take at best, played through; and what a profile proposes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from rankwise.parallel.pipeline_profile import (
    PipelineProfile,
    Span,
    Timeline,
    Work,
    find_bubble,
    find_length,
    replay,
)

_COSTS: dict[Work, float] = {"forward": 1.0, "backward": 2.0, "input gradients": 1.0, "weight gradients": 1.0}


def order(rank: int, works: list[tuple[Work, int]], stage: int | None = None) -> list[Span]:
    return [Span(rank if stage is None else stage, work, number, 0.0, 0.0) for work, number in works]


def gpipe(ranks: int, number: int) -> Timeline:
    return [order(rank, [*(("forward", one) for one in range(number)), *(("backward", one) for one in range(number))]) for rank in range(ranks)]  # fmt: skip


def one_f_one_b(ranks: int, number: int) -> Timeline:
    rows = []
    for rank in range(ranks):
        warm = min(number, ranks - rank)
        works: list[tuple[Work, int]] = [("forward", one) for one in range(warm)]
        for one in range(number):
            works.append(("backward", one))
            works += [("forward", warm + one)] if warm + one < number else []
        rows.append(order(rank, works))
    return rows


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("ranks", "number"), [(2, 4), (4, 8), (4, 4)])
def test_equal_stages_have_the_published_bubble(make: object, ranks: int, number: int) -> None:
    """GPipe and 1F1B: (p - 1) / (m + p - 1), and both take m + p - 1 forward and backward passes."""
    timeline: Timeline = make(ranks, number)  # type: ignore[operator]
    played = replay(timeline, lambda one: _COSTS[one.work])
    assert find_bubble(played) == pytest.approx((ranks - 1) / (number + ranks - 1))
    assert find_length(played) == pytest.approx(3 * (number + ranks - 1))


def test_weight_gradients_wait_for_nobody() -> None:
    """They fill the time until the next stage's gradients come; a second stage of a rank needs the first stage's output."""
    first = order(0, [("forward", 0), ("forward", 1), ("input gradients", 0), ("weight gradients", 0), ("input gradients", 1), ("weight gradients", 1)])  # fmt: skip
    last = order(1, [("forward", 0), ("input gradients", 0), ("forward", 1), ("input gradients", 1), ("weight gradients", 0), ("weight gradients", 1)])  # fmt: skip
    played = replay([first, last], lambda one: _COSTS[one.work])
    assert [one.start_s for one in played[0]] == [0, 1, 3, 4, 5, 6]
    assert [one.start_s for one in played[1]] == [1, 2, 3, 4, 5, 6]
    looped = [order(0, [("forward", 0)]) + order(0, [("forward", 0)], stage=2), order(1, [("forward", 0)])]
    assert [one.start_s for one in replay(looped, lambda _: 1.0)[0]] == [0, 2]
    with pytest.raises(ValueError, match="each waits for another"):
        replay(
            [order(0, [("backward", 0), ("forward", 0)]), order(1, [("forward", 0), ("backward", 0)])],
            lambda _: 1.0,
        )


def profile(costs: tuple[float, float], blocks: tuple[int, int], num_samples: int) -> PipelineProfile:
    """Return a profile of two stages by 1F1B with four micro-batches, none of whose time is lost."""
    names = [f"layers.{number}" for number in range(sum(blocks))]
    bounds = [0, blocks[0], sum(blocks)]
    found = PipelineProfile("1f1b", 4, (2, 3), [names[begin:end] for begin, end in pairwise(bounds)])
    step = replay(one_f_one_b(2, 4), lambda one: _COSTS[one.work] * costs[one.stage])
    found._take([step, step, step], num_samples)
    return found


def test_what_would_help_is_proposed() -> None:
    """Uneven stages: another cut, with what it gains; a large bubble: twice the micro-batches, if there are samples; even ones: nothing."""
    uneven = profile((3.0, 1.0), (6, 2), 8)
    assert uneven.schedule_bubble == pytest.approx(0.2)
    assert uneven.bubble == pytest.approx(uneven.uneven_bubble)
    assert uneven.bubble == pytest.approx(1 / 3)
    assert [one.partition(":")[0] for one in uneven.proposals] == ["cut=[4, 4]", "microbatches=8"]
    assert "a step takes 17% less" in uneven.proposals[0]
    assert "falls from 20% to 11%" in uneven.proposals[1]
    even = profile((1.0, 1.0), (4, 4), 7)
    assert even.proposals == []
    assert "the schedule 20%, uneven stages 0%, messages and the rest 0%" in str(even)
    assert "layers.4 to layers.7" in str(even)
