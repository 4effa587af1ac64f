"""Which checkpoints stay is a pure function of what there is; the newest always stays."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, strategies as st

from rankwise.base.errors import UsageError
from rankwise.checkpoint.manifest import Manifest
from rankwise.checkpoint.retention import Keep, plan_removal


def make(*steps: int, losses: dict[int, float] | None = None) -> list[Manifest]:
    """Manifests in the order in which they were saved."""
    losses = losses or {}
    return [
        Manifest(step=step, serial=serial, world_size=1, files=(), metrics={"loss": losses[step]} if step in losses else {})
        for serial, step in enumerate(steps, 1)
    ]  # fmt: skip


def left(manifests: list[Manifest], keep: Keep | None) -> list[int]:
    """The steps that stay, in the order of their saving."""
    gone = plan_removal(manifests, keep)
    return [manifest.step for manifest in manifests if manifest not in gone]


@pytest.mark.parametrize(
    ("keep", "stays"),
    [
        (None, [10, 20, 30, 40, 50]),
        (Keep(), [10, 20, 30, 40, 50]),
        (Keep(last=1), [50]),
        (Keep(last=2), [40, 50]),
        (Keep(last=9), [10, 20, 30, 40, 50]),
        (Keep(last=1, every=20), [20, 40, 50]),
        (Keep(last=1, best=2), [20, 40, 50]),
        (Keep(last=1, best=2, mode="max"), [10, 30, 50]),
        (Keep(last=1, best=1, metric="accuracy"), [50]),
        (Keep(last=1, every=30, best=1), [20, 30, 50]),
    ],
)
def test_each_rule_keeps_what_it_says(keep: Keep | None, stays: list[int]) -> None:
    """What any rule keeps stays, and nothing else."""
    losses = {10: 5.0, 20: 1.0, 30: 4.0, 40: 2.0, 50: math.nan}
    assert left(make(10, 20, 30, 40, 50, losses=losses), keep) == stays


def test_going_back_makes_the_last_saved_the_newest() -> None:
    """Newest is what was saved last, not the greatest step; of one step saved twice the later one stays."""
    assert left(make(10, 20, 15), Keep(last=1)) == [15]
    again = make(10, 20, 15, 20)
    assert [one.serial for one in plan_removal(again, None)] == [2]
    assert [one.serial for one in plan_removal(again, Keep(last=2))] == [1, 2]


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=12),
    st.builds(Keep, last=st.none() | st.integers(1, 5), every=st.none() | st.integers(1, 7), best=st.integers(0, 3)),
    st.randoms(),
)
def test_the_newest_always_stays(steps: list[int], keep: Keep, chance: Any) -> None:
    """Whatever the rules and the order of looking, the newest stays, and so do as many as ``last`` says."""
    manifests = make(*steps, losses={step: chance.choice([math.nan, math.inf, 1.0, chance.random()]) for step in steps})
    shuffled = chance.sample(manifests, len(manifests))
    gone = plan_removal(shuffled, keep)
    assert gone == plan_removal(manifests, keep)
    stays = [manifest for manifest in manifests if manifest not in gone]
    assert manifests[-1] in stays
    assert len({manifest.step for manifest in stays}) == len(stays)
    assert len(stays) >= min(keep.last or (1 if keep.every or keep.best else 99), len(set(steps)))


@pytest.mark.parametrize("wrong", [{"last": 0}, {"last": -1}, {"every": 0}, {"best": -1}, {"mode": "low"}])
def test_rules_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    """A rule that would keep nothing, or nothing sane, is an error when it is made and not when it is used."""
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Keep(**wrong)
