"""One rank, one GPU: NCCL at world size 1, and all that needs no second rank. The checks are in scripts/one_rank.py; one launch runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gpu_ranks import IS_CUDA, Scene, find_complaints, play, script

if TYPE_CHECKING:
    from typing import Any

pytestmark = pytest.mark.linux
DEVICE = "cuda" if IS_CUDA else "cpu"


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return play([script("one_rank")], tmp_path_factory.mktemp("one"))


def test_init_takes_the_gpu_and_a_backend_for_each_kind_of_tensor(scene: Scene) -> None:
    """Without an argument: this rank's GPU, made the current one, NCCL for its tensors and Gloo for those of the CPU."""
    wanted = ("cuda:0", "cpu:gloo,cuda:nccl", 0) if IS_CUDA else ("cpu", "gloo", None)
    facts = scene.fact("who")
    assert (facts["device"], facts["backend"], facts["current"]) == wanted


def test_torchs_own_collectives_work_on_both_kinds_of_tensors(scene: Scene) -> None:
    """all_reduce, broadcast, all_gather, all_to_all and barrier: at world size 1 each returns what was given."""
    assert scene.fact("torchs_collectives") == {name: [0.0, 1.0, 2.0, 3.0] for name in {"cpu", DEVICE}}


def test_our_collectives_leave_tensors_on_the_gpu(scene: Scene) -> None:
    """all_reduce, all_gather and broadcast of a tree return the same values on the same device."""
    assert scene.fact("our_collectives") == {"values": [[0.0, 1.0, 2.0, 3.0]] * 3, "devices": [DEVICE]}


#: One rank averages with nobody, so that only what a hook itself rounds is left: float16 keeps 11 bits, bfloat16 8. Gradients are
#: below 2, and four steps of 0.05 with momentum move a weight by less than 1. PowerSGD keeps one direction of each matrix; it must
#: stay in the neighbourhood.
HOOKS = {"None": (0.0, 0.0), "fp16": (0.0, 1e-3), "bf16": (0.0, 1e-2), "powersgd": (0.0, 0.3)}


@pytest.mark.parametrize("hook", HOOKS)
def test_ddp_on_one_rank_is_the_bare_model(scene: Scene, hook: str) -> None:
    """Equal to the bit in float64; with a hook it differs by the hook's own rounding, and does differ."""
    difference, (_, most) = scene.fact("ddp_equals_plain")[hook], HOOKS[hook]
    assert difference <= most
    assert (difference > 0) == (hook != "None")


def test_sync_batchnorm_is_torchs_own_on_nccl(scene: Scene) -> None:
    """On NCCL the layer that is tuned for GPUs is taken (elsewhere ours); at world size 1 it is BatchNorm, to 1e-12 in float64."""
    facts = scene.fact("sync_batchnorm")
    assert facts["class"].startswith("torch.nn" if IS_CUDA else "rankwise.parallel")
    assert facts["difference"] <= 1e-12


@pytest.mark.parametrize("dtype", ["torch.bfloat16", "torch.float16"])
def test_autocast_reaches_through_the_wrapper(scene: Scene, dtype: str) -> None:
    """The wrapped model computes in the short dtype, equal to the bare model to the bit, and not as in full precision."""
    facts = scene.fact("autocast")[dtype]
    assert facts["given"] == dtype
    assert facts["to plain"] == 0
    assert facts["to full precision"] > 0


def test_a_compiled_model_trains_as_in_eager_mode(scene: Scene) -> None:
    """Graphs were made, and the weights are those of eager mode to 1e-4: float32 sums in another order, carried on by four steps."""
    facts = scene.fact("compiled")
    assert facts["graphs"] > 0
    assert facts["difference"] <= 1e-4


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_on_the_gpu_are_those_of_the_cpu(scene: Scene, num_workers: int) -> None:
    """Copied ahead on another stream while kernels run, pinned or from workers: the same values, also of what has a `to` of its own."""
    facts = scene.fact("prefetched_batches")[str(num_workers)]
    assert facts["batches"] == 12
    assert facts["worst"] <= 1e-9  # the noise of eight samples, summed up in another order


def test_data_on_the_gpu_is_batched_there(scene: Scene) -> None:
    """A TensorDataset with one tensor on the device and one in host memory: no error of pinning, and the right rows."""
    rows = [[4.0 * step + one for one in range(4)] for step in range(3)]
    assert scene.fact("data_on_the_device") == {"devices": [DEVICE], "values": [one for row in rows for one in (row, row)]}  # fmt: skip


def test_checkpoints_of_gpu_state_go_through_pinned_memory(scene: Scene) -> None:
    """Every dtype and layout comes back to the bit, on the GPU, though the state was overwritten right after the call."""
    facts = scene.fact("staging")
    assert all(facts["equal"].values()), facts["equal"]
    assert facts["devices"] == [DEVICE]
    assert facts["pinned"] == [IS_CUDA]


def test_the_gpus_random_numbers_are_restored(scene: Scene) -> None:
    """After loading the generators' states the device draws the same numbers again."""
    facts = scene.fact("random_states")
    assert facts["first"] == facts["again"]


def test_checksums_of_a_gpu_are_those_of_the_rule(scene: Scene) -> None:
    """The sums of the bits of a GPU's tensors equal those that the CPU adds up by the same rule."""
    facts = scene.fact("checksums_of_parameters")
    if IS_CUDA:  # tensors of the CPU have sums of another kind
        assert facts["sums"] == facts["wanted"]
    assert len(set(facts["sums"])) == 4


def test_dropout_by_position_has_the_same_masks_on_all_devices(scene: Scene) -> None:
    """Whole numbers only: equal to the bit; and about p of them are dropped."""
    facts = scene.fact("dropout_masks")
    assert facts["equal"]
    assert abs(facts["kept"] - 0.7) < 0.01


@pytest.mark.gpus(1)
def test_a_captured_step_of_ddp_is_a_step(scene: Scene) -> None:
    """Eleven steps, one captured and three replays equal fourteen steps of the bare model to 1e-5, with the recorder around all."""
    facts: Any = scene.fact("captured_training")
    assert facts["difference"] <= 1e-5  # float32, Adam: the division by a small root enlarges rounding
    assert facts["moved"] > 0.05


@pytest.mark.gpus(1)
def test_a_thread_of_ours_may_ask_while_another_captures(scene: Scene) -> None:
    """The guard around NCCL's flight recorder: the event is seen, and the graph is whole."""
    assert scene.fact("question_while_capturing") == {"seen": [True], "y": [3.0, 3.0, 3.0]}


def test_the_rank_ends_without_a_word(scene: Scene) -> None:
    """Exit code 0, and on standard error nothing of ours, of C++ or of a traceback; torch's compiler may have given advice."""
    assert scene.result.code == 0
    assert not find_complaints(scene.result)
