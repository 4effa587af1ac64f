"""The loss curve of W ranks is that of one process: the Trainer against a loop by hand that knows nothing of ranks."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch

from one_process import (
    FEW_STEPS,
    MODELS,
    NUM_STEPS,
    OPTIMIZERS,
    TOLERANCE,
    TOLERANCE_FLOAT32,
    assert_same,
    fit,
    fit_all,
    train_by_hand,
)
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

WORLDS = (1, 2, 3, 4, 8)


@pytest.mark.parametrize("world_size", WORLDS)
def test_curves_are_those_of_one_process(world_size: int) -> None:
    """MLP, BatchNorm net and transformer with uneven tokens, SGD to 1e-12 and AdamW to 1e-9 in float64, on up to two ranks over 50 steps, on more over twelve."""
    steps = {"num_steps": NUM_STEPS if world_size <= 2 else FEW_STEPS}
    cases = [(kind, optimizer, steps) for kind in MODELS for optimizer in OPTIMIZERS]
    for rank, found in enumerate(run_ranks(fit_all, world_size, cases)):
        for (kind, optimizer, _), ours in zip(cases, found, strict=True):
            expected = train_by_hand(kind, optimizer, **steps)
            assert_same(ours, expected, TOLERANCE[optimizer], f"rank {rank} of {world_size}, {kind}, {optimizer}")


@pytest.mark.parametrize("world_size", [2, 4])
def test_float32_curves_differ_by_rounding_only(world_size: int) -> None:
    """In float32 the curves are equal to 2e-5 of the loss: what a change in the order of sums makes in 50 steps."""
    cases = [(kind, "sgd", {"dtype": torch.float32}) for kind in MODELS]
    for ours, kind in zip(run_ranks(fit_all, world_size, cases)[0], MODELS, strict=True):
        assert_same(ours, train_by_hand(kind, "sgd", dtype=torch.float32), TOLERANCE_FLOAT32, kind)


@pytest.mark.parametrize("world_size", [2, 3])
def test_accumulation_and_clipping_change_nothing(world_size: int) -> None:
    """Two micro-batches a step, with other numbers of samples and tokens on each rank, clipped gradients: one process's curve."""
    # 195 samples: the last step of an epoch has 3, so that ranks have 2 and 1, or a micro-batch of none.
    options = {"num_micro": 2, "clip_norm": 0.3, "num_samples": 195}
    cases = [(kind, optimizer, options) for kind in ("mlp", "transformer") for optimizer in OPTIMIZERS]
    expected = [train_by_hand(kind, optimizer, clip_norm=0.3, num_samples=195) for kind, optimizer, _ in cases]
    for found in run_ranks(fit_all, world_size, cases):
        for (kind, optimizer, _), ours, by_hand in zip(cases, found, expected, strict=True):
            assert_same(ours, by_hand, TOLERANCE[optimizer], f"{world_size} ranks, {kind}, {optimizer}")


@pytest.mark.parametrize("world_size", [2, 4])
def test_accumulation_with_batchnorm_is_that_of_one_process(world_size: int) -> None:
    """Synced BatchNorm sees one micro-batch of all ranks, as one process sees its own."""
    options = {"num_micro": 2, "num_samples": 192}
    expected = train_by_hand("batchnorm", "sgd", num_micro=2, num_samples=192)
    for ours in run_ranks(fit_all, world_size, [("batchnorm", "sgd", options)]):
        assert_same(ours[0], expected, TOLERANCE["sgd"], f"{world_size} ranks")


def go_on(kind: str, optimizer: str, folder: Path, stop_after: int | None) -> tuple[list[float], dict[str, Tensor]]:
    return fit(kind, optimizer, folder=folder, stop_after=stop_after)


@pytest.mark.parametrize("kind", MODELS)
def test_a_stop_and_another_number_of_ranks_change_nothing(kind: str, tmp_path: Path) -> None:
    """Stopped at a random step by one rank's wish, and again, each time going on with another number of ranks: one curve."""
    dice = random.Random(kind)
    first = dice.randrange(3, 20)
    second = first + dice.randrange(3, 20)
    worlds = dice.sample([1, 2, 3, 4], 3)
    for world_size, stop_after in zip(worlds, [first, second, None], strict=True):
        found = run_ranks(go_on, world_size, kind, "adamw", tmp_path / "run", stop_after)
    expected = train_by_hand(kind, "adamw")
    for ours in found:
        assert_same(ours, expected, TOLERANCE["adamw"], f"worlds {worlds}, stops {first} and {second}")
