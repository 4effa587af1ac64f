"""Ordinary scripts on a GPU under the launcher: warm as cold, restarted, hung, out of memory; and what is left on the GPU."""

from __future__ import annotations

import os
import re
import subprocess
from typing import TYPE_CHECKING

import pytest

from gpu_ranks import (
    IS_CUDA,
    SCRIPTS,
    find_complaints,
    list_open_devices,
    read_name,
    run,
    run_reported,
    script,
    start,
)
from support import line_of, wait_until, without_patience

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.linux
FAULTS = SCRIPTS / "faults.py"
TWO = ["--nproc-per-node", "2"]
NCCL = "nccl" if IS_CUDA else "gloo"


@pytest.mark.parametrize("words", [["default"], [NCCL, "stay"]], ids=["mixed", "nccl, not destroyed"])
def test_a_script_on_a_gpu_prints_warm_what_it_prints_cold(tmp_path: Path, words: list[str]) -> None:
    """Forked from the warm server, CUDA works; output and errors are those of --cold, to the letter, down to what is said at exit."""
    warm, cold = (run([*flags, script("plain"), *words], tmp_path) for flags in ((), ("--cold",)))
    assert warm.code == cold.code == 0, warm.err
    assert warm.out == cold.out
    assert len(warm.out.splitlines()) == (9 if IS_CUDA else 6)
    if IS_CUDA:
        assert "True" in warm.out.splitlines()[0]
        assert "forked badly: False" in warm.out
        assert ("cuda:nccl" in warm.out) or words[0] == "nccl"
    said = [re.sub(r"[IWE]\d{4} [\d:.]+ ", "", without_patience(one.err)) for one in (warm, cold)]
    assert said[0] == said[1]  # but for the times that C++ puts in front


def test_the_warm_server_never_touches_the_gpu(tmp_path: Path) -> None:
    """While two forked ranks hold memory there, neither the server nor launcher, supervisor and store have a device file of NVIDIA open."""
    # For a restart the server stays while the ranks run.
    job = start([*TWO, "--max-restarts", "1", str(FAULTS), "visit"], tmp_path)
    try:
        wait_until(lambda: all((tmp_path / f"here-{rank}").exists() for rank in range(2)), 90, job.err)
        ranks = {int((tmp_path / f"here-{rank}").read_text()) for rank in range(2)}
        devices = list_open_devices()
        names = {pid: read_name(pid) for pid in devices}
        held = _list_gpu_processes()
    finally:
        (tmp_path / "go").touch()
    result = job.finish(60)
    assert result.code == 0
    assert not find_complaints(result)
    assert "rankwise-warm" in names.values(), names
    if IS_CUDA:
        assert {pid for pid, files in devices.items() if files} == ranks, (devices, names)
        # In a container nvidia-smi may see no processes, or number them as the host does.
        assert not held & {*devices} - ranks
        assert not _list_gpu_processes() & ranks


def _list_gpu_processes() -> set[int]:
    if not IS_CUDA:
        return set()
    words = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    facts = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False).stdout
    return {int(line) for line in facts.split() if line.isdigit()}


def test_a_killed_rank_is_restarted_with_cuda(tmp_path: Path) -> None:
    """With kill -9 of a rank with memory on the GPU: both ranks are forked again, reduce CUDA tensors, and end well."""
    result, report = run_reported([*TWO, "--max-restarts", "1", str(FAULTS), "kill"], tmp_path)
    assert (result.code, report["kind"], report["attempts"]) == (0, "ok", 2), result.err
    assert sorted(result.out.splitlines()) == [f"rank {rank} attempt 1: 4" for rank in range(2)]
    assert "rank 1: killed by SIGKILL" in result.err


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.gpus(2))])
def test_a_rank_that_sleeps_is_named(tmp_path: Path, backend: str) -> None:
    """Rank 1 sleeps, rank 0 waits for its CUDA tensor: at the user's bound both are told, each at its line."""
    words = [*TWO, "--hang-timeout", "4", str(FAULTS), "sleeper", backend]
    result, report = run_reported(words, tmp_path)
    assert (result.code, report["kind"], report["culprits"]) == (1, "hang", [1]), result.err
    assert report["where"] == line_of(FAULTS, "# sleeps")
    wait = "# NCCL's wait" if backend == "nccl" else "dist.all_reduce(x)"
    lines = {line_of(FAULTS, wait), *_lines_of("        dist.all_reduce(x)")}
    assert [one["rank"] for one in report["waiting"]] == [0]
    assert report["waiting"][0]["where"] in lines


def _lines_of(text: str) -> list[str]:
    return [f"{FAULTS}:{number}" for number, line in enumerate(FAULTS.read_text().splitlines(), 1) if line.startswith(text)]  # fmt: skip


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.gpus(2))])
def test_unequal_backward_passes_on_gpus_are_told(tmp_path: Path, backend: str) -> None:
    """DDP's gradients of one rank met the other's barrier: the verdict names both lines, on Gloo by proof, on NCCL at the bound."""
    words = [*TWO, *(["--hang-timeout", "8"] if backend == "nccl" else []), str(FAULTS), "uneven", backend]
    result, report = run_reported(words, tmp_path)
    assert result.code == 1
    assert report["kind"] in ({"mismatch", "hang"} if backend == "nccl" else {"mismatch"}), result.err
    backward, barrier = line_of(FAULTS, "# one pass less"), line_of(FAULTS, "# on rank 1")
    assert backward.rpartition("/")[2] in result.err
    assert barrier.rpartition("/")[2] in result.err


def test_replicas_that_drift_apart_on_a_gpu_are_told(tmp_path: Path) -> None:
    """Digests of GPU tensors reach the launcher: it names the model whose ranks trained each for itself, at its line."""
    result, report = run_reported([*TWO, str(FAULTS), "drift"], tmp_path)
    assert (result.code, report["kind"], report["class"]) == (0, "mismatch", "D7"), result.err
    assert report["where"] == line_of(FAULTS, "# drifts")
    assert "weight" in report["message"]


@pytest.mark.gpus(1)
def test_no_memory_on_the_gpu_is_named(tmp_path: Path) -> None:
    """The report tells torch's words, the user's line, and what helps."""
    result, report = run_reported([str(FAULTS), "memory"], tmp_path)
    assert (result.code, report["culprits"]) == (1, [0])
    assert "CUDA out of memory" in report["message"]
    assert report["where"] == line_of(FAULTS, "activations =")
    assert "a smaller batch" in result.err


@pytest.mark.gpus(1)
def test_an_assert_on_the_gpu_is_named(tmp_path: Path) -> None:
    """An index out of range: the first cause is CUDA's error and not what follows it, with advice on how to find the line."""
    result, report = run_reported([str(FAULTS), "assert"], tmp_path)
    assert report["culprits"] == [0]
    assert result.code != 0
    assert "device-side assert triggered" in report["message"]
    assert report["where"] == line_of(FAULTS, "# where it is noticed")
    assert "CUDA_LAUNCH_BLOCKING=1" in result.err


@pytest.mark.gpus(1)
def test_a_rank_for_each_gpu(tmp_path: Path) -> None:
    """--nproc-per-node gpu starts as many ranks as torch counts GPUs."""
    (tmp_path / "count.py").write_text("import os\nprint(os.environ['WORLD_SIZE'])\n")
    result = run(["--nproc-per-node", "gpu", "count.py"], tmp_path)
    import torch

    count = torch.cuda.device_count()
    assert result.out.split() == [str(count)] * count, os.environ.get("CUDA_VISIBLE_DEVICES")
