"""A model on several devices of one process is that on one; the checks are in scripts/placement.py, and one launch runs them."""

from __future__ import annotations

import pytest

from gpu_ranks import IS_CUDA, Scene, find_complaints, play, script

pytestmark = pytest.mark.linux
DEVICE = "cuda:0" if IS_CUDA else "cpu"
#: Float64 has 53 bits; the GPU's sums are in another order, and five steps carry that on.
TOLERANCE = 1e-12


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return play([script("placement")], tmp_path_factory.mktemp("placement"))


@pytest.mark.parametrize("check", ["beside_the_cpu", "checkpointed"])
def test_the_gpu_beside_the_cpu_trains_as_the_cpu(scene: Scene, check: str) -> None:
    """Losses and weights of five steps, with blocks computed again in backward, too; parts lie on both."""
    facts = scene.fact(check)
    assert facts["losses"] <= TOLERANCE
    assert facts["weights"] <= TOLERANCE
    assert facts["devices"] == sorted({"cpu", DEVICE})


@pytest.mark.parametrize("check", ["over_two_devices", "under_ddp"])
def test_two_devices_train_as_one(scene: Scene, check: str) -> None:
    """By hooks alone and under DistributedDataParallel; with one GPU the second device is the CPU, and DDP's the same GPU."""
    facts = scene.fact(check)
    assert facts["losses"] <= TOLERANCE
    assert facts["weights"] <= TOLERANCE


@pytest.mark.gpus(2)
@pytest.mark.parametrize("check", ["over_two_devices", "under_ddp"])
def test_two_gpus_both_hold_parts(scene: Scene, check: str) -> None:
    """The parameters lie on both GPUs, under DistributedDataParallel, too."""
    assert scene.fact(check)["devices"] == ["cuda:0", "cuda:1"]


def test_the_automatic_placement_keeps_to_the_bound(scene: Scene) -> None:
    """Within 60 KB of the GPU, trained as on the CPU."""
    facts = scene.fact("automatic")
    assert facts["total"] <= facts["free"] == (60 * 2**10 if IS_CUDA else 2**30)
    assert facts["losses"] <= TOLERANCE


def test_what_the_gpu_cannot_hold_is_refused_with_its_free_memory(scene: Scene) -> None:
    """Eight layers of 64 GiB with AdamW: the error has the device, the need and what is free."""
    told = scene.fact("too_much")
    assert f"{DEVICE} needs 2.0 TiB of " in told
    assert "TOO MUCH" in told


def test_the_trainer_takes_a_placed_model(scene: Scene) -> None:
    """Its weights after six steps are those of the Trainer in one place."""
    assert scene.fact("trainer") <= TOLERANCE


def test_nothing_complains(scene: Scene) -> None:
    """The launch ends well, and standard error has no word of an error."""
    assert scene.result.code == 0, scene.result.err
    assert find_complaints(scene.result) == []
