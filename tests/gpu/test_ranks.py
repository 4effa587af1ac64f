"""Two ranks with tensors on GPUs are one process: on one GPU by Gloo, and on two by NCCL. The checks are in scripts/ranks.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gpu_ranks import IS_CUDA, Scene, play, run_reported, script

if TYPE_CHECKING:
    from pathlib import Path

#: NCCL refuses two ranks on one GPU; Gloo carries CUDA tensors by way of the host.
BACKENDS = ["gloo", pytest.param("nccl", marks=pytest.mark.gpus(2))]
pytestmark = pytest.mark.linux


@pytest.fixture(scope="module", params=BACKENDS)
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    folder = tmp_path_factory.mktemp(request.param)
    return play([script("ranks"), request.param], folder, 2)


def test_each_rank_has_the_device_and_backend_that_it_asked_for(scene: Scene) -> None:
    """On Gloo both have the first GPU; on NCCL each its own, and Gloo for tensors of the CPU."""
    facts = scene.facts("who")
    if facts[0]["backend"] == "gloo":
        assert {one["device"] for one in facts} == {"cuda:0" if IS_CUDA else "cpu"}
    else:
        assert [(one["device"], one["backend"]) for one in facts] == [(f"cuda:{rank}", "cpu:gloo,cuda:nccl") for rank in range(2)]  # fmt: skip


def test_reductions_are_exact_and_stay_on_the_device(scene: Scene) -> None:
    """Sum, minimum, maximum and product of eight dtypes, a mean, flags, complex numbers, reduce_scatter: as one process finds them."""
    for rank, facts in enumerate(scene.facts("reductions")):
        assert facts["wrong"] == []
        assert facts["is there"]
        assert (facts["mean"], facts["flags"], facts["pair"]) == (
            [0.5, 0.5],
            [False, True, False],
            ["1j", "(4+0j)"],
        )
        assert facts["scattered"] == [4.0 * rank, 4.0 * rank + 2.0] or facts["scattered"] == [4.0 * rank]


def test_movements_bring_what_was_sent(scene: Scene) -> None:
    """all_gather of unequal shapes with objects, gather, broadcast of 2 MiB, all_to_all, scatter, all_gather_into."""
    rows = [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
    for rank, facts in enumerate(scene.facts("movements")):
        assert facts["gathered"] == [[rows[:1], "rank 0"], [rows[1:], "rank 1"]]
        assert facts["joined"] == facts["out"] == rows
        assert facts["root"] == ([rows[:1], rows[1:]] if rank == 1 else None)
        assert (facts["sent"], facts["swapped"], facts["dealt"]) == ([1.0], [[rank], [10 + rank]], [rank])
        assert facts["is there"]


def test_gradients_flow_through_collectives(scene: Scene) -> None:
    """The gradient of a sum or of gathered rows is the sum over the ranks' losses: 1 + 2."""
    assert scene.facts("gradients_through_collectives") == [{"reduced": [3.0] * 2, "gathered": [[3.0] * 2]}] * 2


def test_a_group_of_some_ranks_can_be_made(scene: Scene) -> None:
    """Ranks outside a group get through as well, whatever carries the job's tensors."""
    assert scene.facts("some_ranks") == [{"inside": 1.0, "all": 2.0}, {"inside": None, "all": 2.0}]


#: Without a hook only the order of float64 sums differs. With hooks: see test_one_rank.py; there are two roundings now.
HOOKS = {"None": 1e-12, "fp16": 2e-3, "bf16": 2e-2, "powersgd": 0.3}


@pytest.mark.parametrize("hook", HOOKS)
def test_ddp_is_one_process(scene: Scene, hook: str) -> None:
    """Weights after four steps, from other weights on each rank: to 1e-12 in float64, with a hook to what it rounds."""
    for facts in scene.facts("ddp_equals_one_process"):
        assert facts[hook] <= HOOKS[hook]
        assert (facts[hook] > 1e-9) == (hook != "None")


def test_accumulation_and_batchnorm_are_one_process(scene: Scene) -> None:
    """Unequal micro-batches and synced BatchNorm, to 1e-12 in float64; on Gloo by our layer, on NCCL by torch's."""
    is_nccl = scene.facts("who")[0]["backend"] != "gloo"
    for facts in scene.facts("accumulated_and_uneven"):
        assert facts["class"].startswith("torch.nn" if is_nccl else "rankwise.parallel")
        assert facts["difference"] <= 1e-12


@pytest.mark.gpus(1)
def test_torchs_sync_batchnorm_is_one_process(scene: Scene) -> None:
    """The layer of torch, on NCCL and on Gloo with CUDA tensors: to 1e-10; it adds up squares, which rounds more than ours does."""
    assert max(scene.facts("torchs_sync_batchnorm")) <= 1e-10


def test_autocast_is_one_process(scene: Scene) -> None:
    """In bfloat16 (8 bits) four steps differ by less than 0.01; the replicas are equal to the bit."""
    assert max(scene.facts("autocast")) <= 1e-2


def test_an_overflow_on_one_rank_is_skipped_by_all(scene: Scene) -> None:
    """The second step moves no weight on any rank and halves the scale of all; the third one moves again."""
    assert scene.facts("grad_scaler") == [{"moved": [True, False, True], "scales": [1024.0, 512.0, 512.0]}] * 2  # fmt: skip


def test_the_trainer_is_one_process(scene: Scene) -> None:
    """Nine steps with accumulation and clipping against a loop by hand: losses and weights to 1e-11, and the exact accuracy."""
    for facts in scene.facts("trainer_equals_one_process"):
        assert facts["losses"] <= 1e-11
        assert facts["weights"] <= 1e-11
        assert facts["accuracy"][0] == pytest.approx(facts["accuracy"][1], abs=1e-12)


@pytest.mark.gpus(1)
def test_a_digest_on_its_way_does_not_spoil_a_capture(scene: Scene) -> None:
    """With a digest still on the GPU, a step is captured and replayed: five steps in eager mode have the same weights, to the bit."""
    for facts in scene.facts("digests_and_capture"):
        assert facts["pending"] > 0  # else this shows nothing
        assert facts["is on"]
        assert facts["difference"] == 0


@pytest.mark.gpus(1)
def test_two_ranks_on_one_gpu_by_nccl_are_refused_by_name(tmp_path: Path) -> None:
    """NCCL would say `Duplicate GPU detected`; the handshake says before it which ranks they are."""
    (tmp_path / "both.py").write_text("import rankwise\nwith rankwise.init(device='cuda:0'):\n    pass\n")
    result, report = run_reported(["--nproc-per-node", "2", "both.py"], tmp_path)
    assert result.code == 1
    assert "HandshakeError" in report["message"]
    assert "GPU" in report["message"]
