"""The Trainer on a GPU, in fp32, bf16 and fp16 with accumulation and clipping: cut, resumed in another process, and read without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gpu_ranks import IS_CUDA, Scene, play, script

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.linux
PRECISIONS = ("fp32", "bf16", "fp16")
NUM_STEPS, CUT_AT = 12, 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fit")


@pytest.fixture(scope="module")
def whole(folder: Path) -> Scene:
    """Trainings of twelve steps, and such as end after five."""
    return play([script("fit"), "whole", "runs"], folder)


@pytest.fixture(scope="module")
def rest(whole: Scene, folder: Path) -> Scene:
    """What was cut, from its checkpoint to the twelfth step, in a new process."""
    assert whole.result.code == 0, whole.result.err
    return play([script("fit"), "rest", "runs"], folder)


@pytest.fixture(scope="module")
def read(whole: Scene, folder: Path) -> Scene:
    """The checkpoints of the whole trainings, read by a process that sees no GPU."""
    assert whole.result.code == 0, whole.result.err
    return play([script("fit"), "read", "runs"], folder, CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_precision_is_what_the_model_computes_in(whole: Scene, precision: str) -> None:
    """Outputs have the dtype that was asked for, the optimizer runs fused on the GPU, and only fp16 has a scaler."""
    facts = whole.fact(f"whole {precision}")
    dtype = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[precision]
    assert facts["outputs"] == [f"torch.{dtype}"]
    assert facts["place"] == ("cuda" if IS_CUDA else "cpu")
    assert facts["fused"]
    assert (facts["scale"] is not None) == (precision == "fp16")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_training_goes_down(whole: Scene, precision: str) -> None:
    """A loss and a gradient norm for each step; the last loss is below the first."""
    seen = whole.fact(f"whole {precision}")["seen"]
    assert len(seen) == 2 * NUM_STEPS
    assert seen[-2] < seen[0]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_resumed_training_is_the_whole_one_to_the_bit(whole: Scene, rest: Scene, precision: str) -> None:
    """Cut after five steps and gone on with in another process: the same losses, norms, weights and scale, dropout on the GPU included."""
    expected, cut, ours = whole.fact(f"whole {precision}"), whole.fact(f"cut {precision}"), rest.fact(f"rest {precision}")  # fmt: skip
    assert cut["step"] == CUT_AT
    assert cut["state"] != expected["state"]
    assert ours["step"] == NUM_STEPS
    assert ours["seen"] == expected["seen"]
    assert (ours["state"], ours["scale"]) == (expected["state"], expected["scale"])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_checkpoint_of_a_gpu_is_read_without_one(whole: Scene, read: Scene, precision: str) -> None:
    """Where torch sees no GPU the weights are equal to the bit, the optimizer's state lies in host memory, and a step can follow."""
    assert read.fact("has cuda") is False
    facts = read.fact(f"read {precision}")
    assert facts == {"done": NUM_STEPS, "state": whole.fact(f"whole {precision}")["state"], "held": ["cpu"], "finite": True}  # fmt: skip


def test_a_compiled_training_is_that_of_eager_mode(whole: Scene) -> None:
    """The Trainer's compile=...: weights after four steps to 1e-4, as compiled kernels add up float32 in another order."""
    assert whole.fact("compiled") <= 1e-4
    assert "has compiled no part" not in whole.result.err
