"""Who a process is, where launchers stand inside one another, and how each value is known."""

from __future__ import annotations

import pytest

from rankwise import UsageError
from rankwise.base.identity import Identity, read_all, read_identity
from rankwise.base.identity_facts import expand_tasks

_STEP_OF_PROXIES = {"SLURM_JOB_ID": "9", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
                    "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "node[01-02]"}  # fmt: skip
_HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
_OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}  # fmt: skip
_MVAPICH = {"MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_LOCAL_RANK": "1", "MV2_COMM_WORLD_LOCAL_SIZE": "2", "MPIRUN_ID": "4711"}  # fmt: skip
_HOSTS = '["algo-1", "algo-2"]'


def read(env: dict[str, str]) -> Identity:
    """Return the identity, which must be there."""
    identity = read_identity(env)
    assert identity is not None
    return identity


@pytest.mark.parametrize(("env", "place"), [(_HYDRA, (1, 4, 1, 2)), (_OPEN_MPI, (3, 4, 1, 2)), (_MVAPICH, (3, 4, 1, 2))],
                         ids=["hydra", "open-mpi", "mvapich"])  # fmt: skip
def test_mpirun_reaches_other_nodes_by_srun(env: dict[str, str], place: tuple[int, int, int, int]) -> None:
    """The variables of the step are those of mpirun's own daemon, one a node: the rank is mpirun's."""
    it = read({**_STEP_OF_PROXIES, **env})
    assert (it.rank, it.world_size, it.local_rank, it.local_world_size) == place


def test_srun_that_speaks_pmi() -> None:
    """With --mpi=pmi2 there are PMI's variables too; the step's say more."""
    step = {**_STEP_OF_PROXIES, "SLURM_PROCID": "1", "SLURM_NODEID": "1", "PMI_RANK": "1", "PMI_SIZE": "2"}
    assert read(step).source == "Slurm"
    assert read(step).master_addr == "node01"


def test_tasks_of_each_node() -> None:
    """Slurm's short form is opened up, and each task knows how many are on its own node."""
    assert expand_tasks("2(x3),1") == [2, 2, 2, 1]
    assert expand_tasks("4") == [4]
    assert expand_tasks("") == []
    assert expand_tasks("many") == []
    uneven = {**_STEP_OF_PROXIES, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "3,1"}
    assert read(uneven).local_world_size == 3
    assert read({**uneven, "SLURM_PROCID": "3", "SLURM_NODEID": "1"}).local_world_size == 1


def test_sagemaker() -> None:
    """Several hosts are a process each, in the order of their names; one host is no job of several."""
    it = read({"SM_HOSTS": _HOSTS, "SM_CURRENT_HOST": "algo-2"})
    assert (it.rank, it.world_size, it.local_rank, it.local_world_size, it.node_rank, it.num_nodes) == (
        1,
        2,
        0,
        1,
        1,
        2,
    )
    assert (it.master_addr, it.master_port, it.source) == ("algo-1", 7777, "SageMaker")
    assert read({"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": "algo-2"}).rank == 1
    assert read_identity({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}) is None
    config = {"SM_RESOURCE_CONFIG": '{"current_host": "algo-2", "hosts": ["algo-1", "algo-2"]}'}
    assert read(config).rank == 1
    assert read({**config, "RANK": "5", "WORLD_SIZE": "8"}).rank == 5


@pytest.mark.parametrize(
    "env",
    [
        {"SM_HOSTS": "algo-1", "SM_CURRENT_HOST": "algo-1"},
        {"SM_HOSTS": '"algo-1"', "SM_CURRENT_HOST": "algo-1"},
        {"SM_HOSTS": _HOSTS, "SM_CURRENT_HOST": "algo-9"},
        {"SM_RESOURCE_CONFIG": '{"hosts": 2}'},
    ],
)
def test_a_bad_sagemaker_is_named(env: dict[str, str]) -> None:
    """What is no list, and a host that is not in it, are errors with a hint."""
    with pytest.raises(UsageError, match="SM_") as caught:
        read_identity(env)
    assert caught.value.hint


def test_skypilot_before_it_counted() -> None:
    """Old versions tell the number of nodes by their addresses."""
    it = read({"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n"})
    assert (it.rank, it.world_size) == (1, 2)


def test_flux_and_pals() -> None:
    """On one node both tell all that ranks need; a job of one task is one process."""
    flux = {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_JOB_NNODES": "1", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_ID": "f2"}  # fmt: skip
    assert (read(flux).local_world_size, read(flux).master_addr) == (2, "127.0.0.1")
    assert read_identity({**flux, "FLUX_JOB_SIZE": "1", "FLUX_TASK_RANK": "0"}) is None
    pals = read({"PMI_RANK": "1", "PMI_SIZE": "2", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2", "PALS_APID": "a"})  # fmt: skip
    assert (pals.local_rank, pals.local_world_size, pals.source) == (1, 2, "PALS")


def test_each_value_says_where_it_came_from() -> None:
    """The variable, or what it was derived from; what is not known has no source. Two that say the same are equal."""
    it = read(_STEP_OF_PROXIES)
    assert it.origins["rank"] == "SLURM_PROCID=0"
    assert it.origins["master_addr"] == "first host of SLURM_STEP_NODELIST=node[01-02]"
    assert it.origins["master_port"] == "derived from SLURM_JOB_ID.SLURM_STEP_ID=9.0"
    assert "master_addr" not in read(_HYDRA).origins
    assert read({**_STEP_OF_PROXIES, "MASTER_PORT": "29500"}).origins["master_port"] == "MASTER_PORT=29500"
    assert read({"WORLD_SIZE": "1"}) == read({"WORLD_SIZE": "1", "RANK": "0"})


def test_all_that_say_something() -> None:
    """The winner is the first, the others follow, and what can't be read is an error among them."""
    told = list(read_all({"RANK": "0", "WORLD_SIZE": "2", **_OPEN_MPI, "TF_CONFIG": "{"}))
    assert [one.source if isinstance(one, Identity) else type(one) for one in told] == ["RANK and WORLD_SIZE", "Open MPI", UsageError]  # fmt: skip
