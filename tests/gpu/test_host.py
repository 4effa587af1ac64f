"""The doctor on a host with a GPU, and the benchmark of the Trainer: nvidia-smi as it is, and not as texts in tests have it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from gpu_ranks import ENV, IS_CUDA, ROOT, start
from rankwise.doctor.gpu.nvidia import find_driver_cuda, query, query_nvidia, read_driver_version
from rankwise.doctor.host import Host
from support import make_env

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.linux
PROBES = ("gpus-seen", "gpus-busy", "gpu-links", "gpu-throttle", "torch-build")


@pytest.fixture(scope="module")
def readings(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What `rankwise doctor` says of the GPUs."""
    words = ["doctor", "--only", ",".join(PROBES), "--format", "json"]
    result = start(words, tmp_path_factory.mktemp("doctor"), launcher=(sys.executable, "-m", "rankwise")).finish(240)  # fmt: skip
    assert result.code in {0, 1}, result.err
    (host,) = json.loads(result.out)["hosts"]
    facts: list[dict[str, Any]] = host["readings"]
    return facts


def test_every_probe_reads_what_the_tools_print(readings: list[dict[str, Any]]) -> None:
    """Each probe of GPUs has a reading; none has failed itself, and none says that it could not read an answer."""
    assert {one["probe"] for one in readings} == {*PROBES}
    text = json.dumps(readings)
    for word in ("the probe itself failed", "bug in rankwise", "no answer within", "are not told"):
        assert word not in text
    if IS_CUDA:
        assert "no NVIDIA driver here" not in text
        assert "reports nothing" not in text


@pytest.mark.gpus(1)
def test_the_doctor_counts_the_gpus_that_torch_counts(readings: list[dict[str, Any]]) -> None:
    """`gpus-seen` is well, and its numbers of identity hold all of those that a rank's torch sees."""
    words = "import json, torch; print(json.dumps([str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]))"
    facts = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, timeout=120, check=True)  # fmt: skip
    seen = [one for one in readings if one["probe"] == "gpus-seen" and one["verdict"] == "ok"]
    assert len(seen) == 1, [one["what"] for one in readings]
    assert {f"GPU-{one.removeprefix('GPU-')}" for one in json.loads(facts.stdout)} <= {*seen[0]["facts"]["uuids"]}


@pytest.mark.gpus(1)
def test_the_list_of_cards_is_read_whole() -> None:
    """Name, memory, bus, driver and mode of each GPU have values, and the driver tells its CUDA."""
    host = Host()
    cards = query_nvidia(host)
    assert (cards.status, cards.lost) == ("ok", ())
    assert cards.driver[:1].isdigit()
    assert read_driver_version(host) in {"", cards.driver}
    for one in cards.gpus:
        assert one.uuid.startswith("GPU-")
        assert one.name
        assert one.memory_mib > 1000
        assert 0 <= one.used_mib <= one.memory_mib
        assert one.compute_mode in {"Default", "Exclusive_Process", "Prohibited"}
        assert len(one.bus_id.split(":")) == 3
    assert float(find_driver_cuda(host)) >= 11


@pytest.mark.gpus(1)
def test_further_fields_have_a_row_for_each_gpu() -> None:
    """The fields that the probes ask for are known to this driver, by their newer names."""
    host = Host()
    indices = {one.index for one in query_nvidia(host).gpus}
    for fields in (("ecc.errors.uncorrected.volatile.total",), ("temperature.gpu", "power.limit", "clocks_event_reasons.hw_slowdown")):  # fmt: skip
        assert {*query(host, *fields)} == indices, fields


def test_the_benchmark_of_the_trainer_runs(tmp_path: Path) -> None:
    """`benchmarks/trainer.py --gpu --tiny`: each contender that can be had gets a row, with tokens per second."""
    words = [
        sys.executable,
        str(ROOT / "benchmarks" / "trainer.py"),
        "--gpu",
        "--tiny",
        "--rounds",
        "2",
        "--block",
        "2",
    ]
    facts = subprocess.run(words, cwd=tmp_path, env=make_env(ENV), capture_output=True, text=True, timeout=240, check=False)  # fmt: skip
    assert facts.returncode == 0, facts.stderr
    rows = {line.split()[0]: line.split() for line in facts.stdout.splitlines() if line}
    assert {"raw", "plain", "Trainer"} <= {*rows}, facts.stdout
    assert float(rows["raw"][1].replace(",", "")) > 0
