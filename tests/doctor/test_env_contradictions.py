"""Variables that can't all be true are found, with both values; what is legal beside them is not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from fake_hosts import look, make_host
from field_environments import FOLDER, load
from rankwise.doctor.host import JobShape
from rankwise.doctor.probes.launcher_variables import PROBE
from rankwise.doctor.variables.contradictions import count_devices, find_contradictions, find_launch_contradictions

if TYPE_CHECKING:
    from pathlib import Path

    from rankwise.doctor.probe import Reading

_STEP = load(FOLDER / "sbatch_srun.json").ranks[3]
_ONE_TASK_A_NODE = load(FOLDER / "srun_where_a_launcher_starts.json").ranks[1]
_UNDER_TORCHRUN = load(FOLDER / "srun_torchrun.json").ranks[3]
_ONE_NODE = {
    **_STEP,
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}
_MPI = load(FOLDER / "openmpi.json").ranks[1]
_HAND = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node01", "MASTER_PORT": "29500"}
_LOCAL = {**_HAND, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}

_NODE_1 = {"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "node01", "MASTER_PORT": "1"}  # fmt: skip


def only(readings: tuple[Reading, ...] | list[Reading]) -> Reading:
    """Return the only reading."""
    assert len(readings) == 1, readings
    return readings[0]


@pytest.mark.parametrize(
    ("env", "verdict", "class_id", "texts"),
    [
        ({**_STEP, "RANK": "0", "WORLD_SIZE": "4"}, "fail", "I10", ["RANK=0", "SLURM_PROCID=3"]),
        ({**_STEP, "RANK": "0", "WORLD_SIZE": "1"}, "fail", "I12", ["WORLD_SIZE=1", "SLURM_STEP_NUM_TASKS=4"]),
        ({**_STEP, "WORLD_SIZE": "8"}, "fail", "I12", ["WORLD_SIZE=8", "4 processes"]),
        ({**_ONE_TASK_A_NODE, "RANK": "0", "WORLD_SIZE": "1"}, "fail", "I12", ["WORLD_SIZE=1", "SLURM_STEP_NUM_TASKS=2"]),
        ({**_MPI, "RANK": "0", "WORLD_SIZE": "2"}, "fail", "I10", ["RANK=0", "OMPI_COMM_WORLD_RANK=1"]),
        ({**_MPI, "RANK": "0", "WORLD_SIZE": "1"}, "fail", "I12", ["WORLD_SIZE=1", "OMPI_COMM_WORLD_SIZE=2"]),
        ({**_STEP, "LOCAL_RANK": "0"}, "fail", "I10", ["LOCAL_RANK=0", "SLURM_LOCALID=1"]),
        ({**_STEP, "LOCAL_RANK": "2"}, "warn", "I10", ["LOCAL_RANK=2", "SLURM_LOCALID=1"]),
        ({**_ONE_TASK_A_NODE, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "10.0.0.2", "MASTER_PORT": "4000"}, "warn", "I10", ["RANK=0", "SLURM_PROCID=1"]),
        ({**_MPI, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": _MPI["OMPI_COMM_WORLD_LOCAL_RANK"]}, "warn", "I10", ["RANK=0", "OMPI_COMM_WORLD_RANK=1"]),
        ({**_ONE_NODE, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "warn", "I10", ["RANK=0", "SLURM_PROCID=1", "of 2 both"]),
        ({**_STEP, "RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "node01", "MASTER_PORT": "4000"}, "warn", "I12", ["WORLD_SIZE=3", "4 processes"]),
        ({**_STEP, "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "4001", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "4"}, "warn", "I12", ["WORLD_SIZE=2", "4 processes"]),
        ({**_STEP, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "4001", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "4"}, "warn", "I12", ["WORLD_SIZE=2", "4 processes"]),
        ({**_LOCAL, "LOCAL_RANK": "4"}, "fail", "", ["local rank 4 with 4 ranks"]),
        ({**_LOCAL, "LOCAL_WORLD_SIZE": "5"}, "fail", "", ["LOCAL_WORLD_SIZE=5", "WORLD_SIZE=4"]),
        ({**_HAND, "RANK": "4"}, "fail", "I11", ["RANK=4", "WORLD_SIZE=4"]),
        ({**_STEP, "MASTER_ADDR": "localhost"}, "fail", "I4", ["MASTER_ADDR=localhost", "SLURM_STEP_NUM_NODES=2"]),
        ({**load(FOLDER / "skypilot.json").ranks[1], "MASTER_ADDR": "127.0.0.1"}, "fail", "I4", ["MASTER_ADDR=127.0.0.1", "SKYPILOT_NUM_NODES=2"]),
        ({**load(FOLDER / "openmpi_2_hosts.json").ranks[1], "MASTER_ADDR": "::1"}, "fail", "I4", ["MASTER_ADDR=::1", "OMPI_COMM_WORLD_LOCAL_SIZE=2"]),
        ({**_HAND, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, "warn", "I4", ["MASTER_ADDR=localhost", "LOCAL_WORLD_SIZE=2"]),
        ({**_ONE_TASK_A_NODE, "PET_NNODES": "4"}, "fail", "I1", ["PET_NNODES=4", "SLURM_STEP_NUM_NODES=2"]),
        ({**load(FOLDER / "sbatch_script.json").ranks[0], "PET_NNODES": "3:4"}, "fail", "I1", ["PET_NNODES=3:4", "SLURM_NNODES=2"]),
        ({**_STEP, "PET_NNODES": "2"}, "warn", "I24", ["PET_NNODES=2", "SLURM_STEP_TASKS_PER_NODE=2(x2)"]),
        ({**_UNDER_TORCHRUN, **{name: value for name, value in _STEP.items() if name.startswith("SLURM_")}}, "fail", "I24", ["2 tasks on this node", "2 nodes"]),
        ({**_UNDER_TORCHRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NUM_TASKS": "4"}, "warn", "I24", ["2 tasks on this node"]),
        ({"TF_CONFIG": "{"}, "fail", "", ["TF_CONFIG can't be read"]),
        ({"TF_CONFIG": json.dumps({"cluster": {"ps": ["a:1"], "worker": ["b:1"]}, "task": {"type": "evaluator", "index": 0}})}, "warn", "", ["'evaluator'"]),
        ({"SM_HOSTS": "algo-1", "SM_CURRENT_HOST": "algo-1"}, "fail", "", ["SM_HOSTS can't be read"]),
        ({"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-3"}, "fail", "", ["SM_CURRENT_HOST=algo-3", "algo-1, algo-2"]),
        ({"RANK": "1"}, "fail", "", ["RANK=1 is set, but WORLD_SIZE is not"]),
        ({"WORLD_SIZE": "2"}, "fail", "", ["WORLD_SIZE=2 is set, but RANK is not"]),
        ({**_HAND, "MASTER_ADDR": "tcp://node0:29500"}, "fail", "I3", ["MASTER_ADDR=tcp://node0:29500 is more than the name of a host"]),
        ({**_HAND, "MASTER_ADDR": "node0:29500"}, "fail", "I3", ["MASTER_ADDR=node0:29500 is more than the name of a host"]),
        ({**_HAND, "MASTER_ADDR": "node0 "}, "fail", "I3", ["MASTER_ADDR='node0 ' is more than the name of a host"]),
        ({**_HAND, "MASTER_ADDR": "[fd00::1]"}, "fail", "I3", ["MASTER_ADDR=[fd00::1] is more than the name of a host"]),
        ({"MASTER_ADDR": "node0:29500"}, "warn", "I3", ["is more than the name of a host"]),
        ({**_STEP, "MASTER_ADDR": "localhost:29500"}, "fail", "I3", ["is more than the name of a host"]),
        ({**_HAND, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "0.0.0.0"}, "warn", "I4", ["MASTER_ADDR=0.0.0.0", "LOCAL_WORLD_SIZE=2"]),
        ({**_STEP, "MASTER_ADDR": "::"}, "fail", "I4", ["MASTER_ADDR=::", "SLURM_STEP_NUM_NODES=2"]),
        ({**_STEP, "SLURM_NODEID": "0", "MASTER_ADDR": "::"}, "warn", "I4", ["MASTER_ADDR=::"]),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n1:12345"}, "fail", "I3", ["MASTER_ADDR=n1:12345 is more than the name of a host"]),
        ({**_HAND, "MASTER_ADDR": "n1,n2"}, "fail", "I3", ["MASTER_ADDR=n1,n2 is not a host name"]),
        ({**_HAND, "MASTER_ADDR": "n1 n2"}, "fail", "I3", ["MASTER_ADDR='n1 n2' is not a host name"]),
        ({**_HAND, "MASTER_ADDR": "n[1-2]"}, "fail", "I3", ["MASTER_ADDR=n[1-2] is not a host name"]),
        ({**_HAND, "MASTER_ADDR": "n1/"}, "fail", "I3", ["MASTER_ADDR=n1/ is more than the name of a host"]),
        ({"LOCAL_RANK": "3"}, "warn", "", ["LOCAL_RANK=3 is set, but neither RANK nor WORLD_SIZE is"]),
        ({"PMIX_RANK": "2", "PMIX_NAMESPACE": "ns"}, "warn", "", ["PMIX_RANK=2", "how many processes"]),
        ({"NODE_RANK": "2", "NNODES": "2"}, "warn", "I11", ["NODE_RANK=2", "0 to 1"]),
        ({**_LOCAL, "RANK": "3", "LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "0,1"}, "fail", "L7", ["CUDA_VISIBLE_DEVICES=0,1", "LOCAL_WORLD_SIZE=4", "LOCAL_RANK=3"]),
        ({**_LOCAL, "CUDA_VISIBLE_DEVICES": "0,1"}, "warn", "L7", ["2 GPUs", "LOCAL_WORLD_SIZE=4"]),
        ({"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_DEEPSPEED": "true"}, "fail", "L16", ["ACCELERATE_USE_FSDP=true", "ACCELERATE_USE_DEEPSPEED=true"]),
    ],
)  # fmt: skip
def test_a_contradiction_is_found(env: dict[str, str], verdict: str, class_id: str, texts: list[str]) -> None:
    """It is the only one, with the values that contradict each other, the consequence and what to do."""
    one = only(find_contradictions(env))
    assert (one.verdict, one.class_id) == (verdict, class_id)
    for text in texts:
        assert text in one.what
    assert one.why
    assert one.fix


@pytest.mark.parametrize(
    "env",
    [
        {**_STEP, "SLURM_HET_SIZE": "2", "WORLD_SIZE": "8"},
        {**_STEP, "RANK": "6", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "x", "GROUP_WORLD_SIZE": "4", "MASTER_ADDR": "node01", "MASTER_PORT": "1"},
        {**_ONE_NODE, "RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "MASTER_ADDR": "node01", "MASTER_PORT": "1"},
        {**_ONE_NODE, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "node01", "MASTER_PORT": "1"},
        {**_ONE_TASK_A_NODE, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "node01", "MASTER_PORT": "1"},
        {**_LOCAL, "CUDA_VISIBLE_DEVICES": "1"},
        {**_LOCAL, "CUDA_VISIBLE_DEVICES": "-1"},
        {**_ONE_TASK_A_NODE, "PET_NNODES": "1:2"},
        {**_ONE_TASK_A_NODE, "PET_NNODES": "1"},
        {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_DEEPSPEED": "false"},
        {**_LOCAL, "RANK": "3", "LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "0,1", "ACCELERATE_USE_CPU": "true"},
        {**_STEP, "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "1"},
        {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
        {**_HAND, "MASTER_ADDR": "fd00::1:2950"},
        {**_HAND, "MASTER_ADDR": "fe80::1%eth0"},
        {**_HAND, "MASTER_ADDR": "fe80::1%br+0@1"},
        {**_HAND, "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"},
        {"NODE_RANK": "0", "MASTER_ADDR": "10.0.0.1"},
        {"NODE_RANK": "0"},
        {**load(FOLDER / "sbatch_script.json").ranks[0], "PET_NNODES": "2", "SLURM_NNODES": "-2", "SLURM_JOB_NUM_NODES": "-2"},
        {**_HAND, "MASTER_ADDR": "0.0.0.0", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
        _NODE_1,
        {**_NODE_1, "RANK": "5"},
        {**_NODE_1, "RANK": "4", "LOCAL_WORLD_SIZE": "6"},
        {**_NODE_1, "RANK": "3", "GROUP_WORLD_SIZE": "3"},
        {**_NODE_1, "RANK": "3", "LOCAL_RANK": "0"},
        {**_HAND, "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"},
        {"LOCAL_RANK": "-1"},
        {"NODE_RANK": "1", "NNODES": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        {"NODE_RANK": "0", "NNODES": "1"},
    ],
)  # fmt: skip
def test_what_is_legal_is_left_alone(env: dict[str, str]) -> None:
    """Jobs of several components, agents as many as tasks, a GPU of one's own, an address without a job: nothing is found."""
    assert find_contradictions(env) == ()


@pytest.mark.parametrize(
    ("backend", "has_gpus", "is_told"),
    [("", None, True), ("nccl", True, True), ("gloo", True, False), ("", False, False), ("nccl", False, False), ("cpu:gloo,cuda:nccl", None, True)],
)  # fmt: skip
def test_gpus_matter_where_ranks_take_them(backend: str, has_gpus: bool | None, is_told: bool) -> None:
    """On a host without GPUs, or with Gloo, CUDA_VISIBLE_DEVICES says nothing of the number of ranks."""
    rank = {**_LOCAL, "RANK": "3", "LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert bool(find_contradictions(rank, backend=backend, has_gpus=has_gpus)) == is_told


@pytest.mark.parametrize(
    ("addr", "port", "fix"),
    [
        ("foo:123", "", "export MASTER_ADDR=foo MASTER_PORT=123  # a port belongs in MASTER_PORT"),
        ("foo:123", "123", "export MASTER_ADDR=foo  # its port is in MASTER_PORT"),
        (
            "foo:123",
            "9",
            "export MASTER_ADDR=foo  # MASTER_PORT is 9; if 123 is meant: export MASTER_PORT=123",
        ),
        ("foo:99999", "", "export MASTER_ADDR=foo"),
        ("foo:65535", "", "export MASTER_ADDR=foo MASTER_PORT=65535  # a port belongs in MASTER_PORT"),
        ("foo:65536", "", "export MASTER_ADDR=foo"),
        (f"foo:{'9' * 5000}", "", "export MASTER_ADDR=foo"),
        ("foo:", "", "export MASTER_ADDR=foo"),
        ("tcp://foo:123/", "123", "export MASTER_ADDR=foo  # its port is in MASTER_PORT"),
        ("[fd00::1]:123", "123", "export MASTER_ADDR=fd00::1  # its port is in MASTER_PORT"),
        ("foo:123\r", "123", "export MASTER_ADDR=foo  # its port is in MASTER_PORT"),
        ("fd00::1:29500", "29500", "export MASTER_ADDR=fd00::1  # its port is in MASTER_PORT"),
        ("foo:123\r", "", "export MASTER_ADDR=foo MASTER_PORT=123  # a port belongs in MASTER_PORT"),
        (" fd00::1", "", "export MASTER_ADDR=fd00::1"),
        ("fd00::1:29500", "", "export MASTER_ADDR=fd00::1 MASTER_PORT=29500  # a port belongs in MASTER_PORT"),
        ("tcp://a;rm:1", "", "export MASTER_ADDR=…  # the name or an address of the first host"),
        (" ", "", "export MASTER_ADDR=…  # the name or an address of the first host"),
        ("n1,n2", "1", "export MASTER_ADDR=…  # the name or an address of the first host"),
        ("n1/", "1", "export MASTER_ADDR=n1"),
    ],
)
def test_an_address_is_cleared_of_what_is_none(addr: str, port: str, fix: str) -> None:
    """What stands beside the host's name is taken away, and its port goes where ports belong, unless one is there already."""
    told = find_contradictions({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": addr, "MASTER_PORT": port})
    assert next(one for one in told if one.class_id == "I3").fix == fix


def test_what_another_launcher_may_have_ordered_is_said_so() -> None:
    """The warning names the legal reason beside the broken one; a sure failure does not."""
    ordered = {**_ONE_TASK_A_NODE, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    assert "or another launcher ordered them, as Ray does" in only(find_contradictions(ordered)).why
    assert "another launcher" not in only(find_contradictions({**_STEP, "RANK": "0", "WORLD_SIZE": "4"})).why


def test_devices_are_counted_as_cuda_does() -> None:
    """Counting stops at the first entry that is no device; none at all means that GPUs are hidden on purpose."""
    told = {"0,1": 2, "": None, "-1": None, "0,-1,1": 1, "GPU-1a2b,MIG-3c4d": 2, "NoDevFiles": None}
    assert {text: count_devices({"CUDA_VISIBLE_DEVICES": text}) for text in told} == told
    assert count_devices({}) is None


@pytest.mark.parametrize(
    ("env", "nodes", "verdict", "class_id"),
    [
        (_STEP, 2, "fail", "I24"),
        ({**_STEP, "SLURM_LOCALID": "0"}, 2, "warn", "I24"),
        (_STEP, 1, "warn", "I24"),
        (_MPI, 1, "warn", "I24"),
        (_ONE_TASK_A_NODE, 3, "warn", "I1"),
        ({"ACCELERATE_USE_FSDP": "1", "ACCELERATE_USE_MEGATRON_LM": "1"}, 1, "fail", "L16"),
    ],
)
def test_where_a_launcher_is_started(env: dict[str, str], nodes: int, verdict: str, class_id: str) -> None:
    """What contradicts the launch is told above it."""
    one = only(find_launch_contradictions(env, num_nodes=nodes))
    assert (one.verdict, one.class_id) == (verdict, class_id)


@pytest.mark.parametrize(
    ("env", "nodes"),
    [
        (_ONE_TASK_A_NODE, 2),
        (_STEP, 4),
        ({"RANK": "9", "WORLD_SIZE": "2", "MASTER_PORT": "x", "LOCAL_RANK": "7"}, 1),
        ({"SLURM_PROCID": "x", "SLURM_STEP_NUM_TASKS": "2"}, 1),
        ({}, None),
    ],
)
def test_a_launch_is_not_told_what_it_replaces(env: dict[str, str], nodes: int | None) -> None:
    """A launcher sets RANK and its kin anew: what they said before does not matter, nor do as many agents as tasks."""
    assert find_launch_contradictions(env, num_nodes=nodes) == ()


def test_the_doctor_tells_contradictions_and_slips() -> None:
    """The probe tells both, as readings that travel; a slip is a warning only."""
    from rankwise.doctor.host import Host

    env = {"RANK": "4", "WORLD_SIZE": "4", "GLOO_SOCKT_IFNAME": "eth0"}
    told = list(PROBE.look(Host(env=env, name="host0")))
    assert [one.verdict for one in told] == ["fail", "warn"]
    assert "GLOO_SOCKET_IFNAME" in told[1].what


def test_the_doctor_of_a_launch_leaves_ranks_variables_alone(tmp_path: Path) -> None:
    """Where the job to be launched is known, a leftover RANK does no harm, and what harms the launch is told."""
    env = {"RANK": "4", "WORLD_SIZE": "4"}

    def tell(**more: str) -> list[tuple[str, str]]:
        host = make_host(tmp_path, env={**env, **more}, job=JobShape(num_ranks=2, is_launch=True))
        return [(one.verdict, one.class_id) for one in look(PROBE, host)]

    assert tell() == [("ok", "")]
    assert tell(ACCELERATE_USE_FSDP="1", ACCELERATE_USE_DEEPSPEED="1") == [("fail", "L16")]
