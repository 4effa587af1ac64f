"""Who a process is, read from the variables of each launcher."""

from __future__ import annotations

import json

import pytest

from rankwise import UsageError
from rankwise.base.host_list import find_first_host
from rankwise.base.identity import Identity, read_identity

_TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2",
             "MASTER_ADDR": "node0", "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "job7"}  # fmt: skip
_SLURM = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
          "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_NODELIST": "gpu[07-08]"}  # fmt: skip
_OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
             "PMIX_NAMESPACE": "prterun-host-4711@1"}  # fmt: skip
_MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
_TF = {
    "cluster": {"chief": ["h0:2222"], "worker": ["h0:2223", "h1:2222"]},
    "task": {"type": "worker", "index": 1},
}


def read(env: dict[str, str]) -> Identity:
    """Return the identity, which must be there."""
    identity = read_identity(env)
    assert identity is not None
    return identity


def place(it: Identity) -> tuple[int, int, int | None, int | None, int | None, int | None]:
    """Return the six numbers that tell where a rank stands."""
    return it.rank, it.world_size, it.local_rank, it.local_world_size, it.node_rank, it.num_nodes


def test_torchruns_variables() -> None:
    """All six numbers and the store's address are read from torchrun's names."""
    it = read(_TORCHRUN)
    assert place(it) == (5, 8, 1, 4, 1, 2)
    assert (it.master_addr, it.master_port) == ("node0", 29400)


def test_a_slurm_step() -> None:
    """An srun step tells all six numbers; the first node serves the store, at a port that all tasks derive alike."""
    it = read(_SLURM)
    assert place(it) == (5, 8, 1, 4, 1, 2)
    assert it.master_addr == "gpu07"
    assert it.master_port == read({**_SLURM, "SLURM_PROCID": "0"}).master_port
    assert it.master_port != read({**_SLURM, "SLURM_JOB_ID": "78"}).master_port


def test_a_slurm_batch_script_is_no_rank() -> None:
    """The batch script itself has SLURM_PROCID=0 and SLURM_NTASKS=8, and is one process all the same."""
    assert read_identity({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}) is None


def test_torchrun_inside_a_slurm_step() -> None:
    """torchrun, started by srun once a node, stands nearer than Slurm."""
    assert read({**_SLURM, **_TORCHRUN}).source == "torchrun's variables"


@pytest.mark.parametrize("env", [_OPEN_MPI, _MPICH], ids=["open-mpi", "mpich"])
def test_mpirun_on_one_host(env: dict[str, str]) -> None:
    """Ranks of mpirun on one host are told rank and size; the store is on this host, at a port that the ranks derive alike."""
    it = read(env)
    assert (it.rank, it.world_size, it.local_rank, it.local_world_size) == (1, 2, 1, 2)
    assert it.master_addr == "127.0.0.1"
    assert 10_000 <= (it.master_port or 0) < 30_000
    assert it.master_port == read(env).master_port


def test_mpirun_on_two_hosts_needs_an_address() -> None:
    """With ranks elsewhere nothing says where rank 0 is: the address stays open, unless MASTER_ADDR is passed on."""
    env = {**_OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    assert read(env).master_addr is None
    assert read({**env, "MASTER_ADDR": "h0"}).master_addr == "h0"


def test_tf_config() -> None:
    """The chief is rank 0, workers follow; the local rank counts entries of the same host."""
    it = read({"TF_CONFIG": json.dumps(_TF)})
    assert place(it) == (2, 3, 0, 1, 1, 2)
    assert (it.master_addr, it.master_port) == ("h0", 2222)
    first = read({"TF_CONFIG": json.dumps({**_TF, "task": {"type": "worker", "index": 0}})})
    assert place(first) == (1, 3, 1, 2, 0, 2)
    assert first.role is None


def test_tf_config_with_parameter_servers() -> None:
    """They are the first ranks, and each process has the role that its task says."""
    cluster = {"worker": ["h1:1", "h2:1"], "chief": ["h1:2"], "ps": ["h0:1", "h0:2"]}
    tasks = [("ps", 0), ("ps", 1), ("chief", 0), ("worker", 0), ("worker", 1)]
    for rank, (kind, index) in enumerate(tasks):
        it = read({"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})})
        assert (it.rank, it.world_size, it.role, it.master_addr) == (rank, 5, kind, "h0")


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ("{", "can't be read"),
        ("[]", "can't be read"),
        (json.dumps({**_TF, "task": {"type": "ps", "index": 0}}), "ps 0"),
        (json.dumps({**_TF, "task": {"type": "evaluator", "index": 0}}), "'evaluator'"),
        (json.dumps({**_TF, "task": {"type": "worker", "index": 2}}), "worker 2"),
    ],
)
def test_a_bad_tf_config_is_named(config: str, text: str) -> None:
    """What can't be read, a task that is no part of the group, and one beyond the cluster are errors."""
    with pytest.raises(UsageError, match=text):
        read_identity({"TF_CONFIG": config})


def test_kubernetes_and_skypilot() -> None:
    """An indexed job tells the rank, and WORLD_SIZE the rest; SkyPilot tells one process a node."""
    env = {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-0.job", "MASTER_PORT": "29500"}
    it = read(env)
    assert (it.rank, it.world_size, it.source) == (1, 2, "Kubernetes")
    sky = read(
        {
            "SKYPILOT_NODE_RANK": "1",
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n",
            "SKYPILOT_TASK_ID": "a",
        }
    )
    assert (sky.rank, sky.world_size, sky.master_addr) == (1, 2, "10.0.0.1")


def test_nobody_told() -> None:
    """Without variables, and with variables that make one process, nobody says that this is one of several."""
    assert read_identity({}) is None
    assert read_identity({"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}) is None
    assert read_identity({**_SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None
    assert read_identity({"JOB_COMPLETION_INDEX": "0"}) is None


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"RANK": "1"}, "RANK=1 is set, but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set, but RANK is not"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x' is not a whole number"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({**_TORCHRUN, "LOCAL_RANK": "4"}, "local rank 4 with 4 ranks"),
        ({**_TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 is more than WORLD_SIZE=8"),
        ({"JOB_COMPLETION_INDEX": "1"}, "WORLD_SIZE is not set"),
    ],
)
def test_variables_that_contradict_each_other(env: dict[str, str], text: str) -> None:
    """Missing, unreadable and contradictory variables are errors that show the values."""
    with pytest.raises(UsageError) as caught:
        read_identity(env)
    assert text in str(caught.value)
    assert caught.value.hint


def test_only_world_size_1_is_a_world_of_one() -> None:
    """WORLD_SIZE=1 without RANK is rank 0 of 1, as there is no other."""
    assert read({"WORLD_SIZE": "1"}).rank == 0


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("gpu[07-09,12],big1", "gpu07"),
        ("a,b", "a"),
        ("rack2n[3,5]", "rack2n3"),
        ("c[1-2]-ib", "c1-ib"),
        ("", ""),
    ],
)
def test_the_first_host_of_slurms_short_form(nodes: str, first: str) -> None:
    """Slurm's bracketed lists are opened up to their first host."""
    assert find_first_host(nodes) == first
