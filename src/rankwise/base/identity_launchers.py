"""Who a process is, as told by what has started it: torchrun, srun, mpirun, flux.

Whoever starts processes through something else stands nearer to them. mpirun reaches other nodes through `srun`, so its ranks
have the variables of a Slurm step as well, but those are of its own daemon there: one a node. It is asked before Slurm.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rankwise.base.errors import UsageError
from rankwise.base.host_list import find_first_host
from rankwise.base.identity_facts import Identity, Traces, expand_tasks, read_int

if TYPE_CHECKING:
    from collections.abc import Mapping


def read_torch(env: Mapping[str, str]) -> Identity | None:
    """torchrun, rankwise run, Kubeflow's PyTorchJob, or a person with `export`."""
    it = Traces(env)
    rank, world_size = it.number("rank", "RANK"), it.number("world_size", "WORLD_SIZE")
    if rank is None and world_size == 1:
        rank = it.derive("rank", 0, "the only one of WORLD_SIZE=1")
    if world_size is None and rank is None:
        return None
    if rank is None:
        if "JOB_COMPLETION_INDEX" in env or is_slurm_step(env):
            return None  # who knows the rank knows the world size too, or is asked for it
        raise UsageError(
            f"WORLD_SIZE={world_size} is set, but RANK is not",
            hint="start it with `rankwise run`, or give each process its RANK",
        )
    if world_size is None:
        raise UsageError(
            f"RANK={rank} is set, but WORLD_SIZE is not",
            rank=rank,
            hint="start it with `rankwise run`, or set WORLD_SIZE to the number of processes",
        )
    return Identity(
        rank=rank, world_size=world_size, local_rank=it.number("local_rank", "LOCAL_RANK"), local_world_size=it.number("local_world_size", "LOCAL_WORLD_SIZE"),
        node_rank=it.number("node_rank", "GROUP_RANK"), num_nodes=it.number("num_nodes", "GROUP_WORLD_SIZE"), master_addr=it.addr(), master_port=it.port(),
        source="torchrun's variables" if "TORCHELASTIC_RUN_ID" in env else "RANK and WORLD_SIZE", origins=it.origins,
    )  # fmt: skip


def is_slurm_step(env: Mapping[str, str]) -> bool:
    """Tell whether srun has started this: the batch script itself has SLURM_PROCID=0 too, but is no step."""
    return "SLURM_STEP_NUM_TASKS" in env and "SLURM_PROCID" in env


def read_slurm(env: Mapping[str, str]) -> Identity | None:
    """A step of `srun` with several tasks, whichever kind of MPI it was told to serve."""
    if not is_slurm_step(env):
        return None
    it = Traces(env)
    num_tasks, rank = it.number("world_size", "SLURM_STEP_NUM_TASKS"), it.number("rank", "SLURM_PROCID")
    if num_tasks is None or rank is None or (num_tasks == 1 and read_int(env, "WORLD_SIZE") is None):
        return None  # `srun python train.py` with one task is one process
    node = it.number("node_rank", "SLURM_NODEID")
    seed = f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}"
    nodes = "SLURM_STEP_NODELIST" if env.get("SLURM_STEP_NODELIST") else "SLURM_NODELIST"
    per_node = env.get("SLURM_STEP_TASKS_PER_NODE", "")
    tasks = expand_tasks(per_node)
    here = tasks[node or 0] if (node or 0) in range(len(tasks)) else None
    return Identity(
        rank=rank, world_size=num_tasks, local_rank=it.number("local_rank", "SLURM_LOCALID"),
        local_world_size=it.derive("local_world_size", here, f"SLURM_STEP_TASKS_PER_NODE={per_node}"),
        node_rank=node, num_nodes=it.number("num_nodes", "SLURM_STEP_NUM_NODES"),
        master_addr=it.addr(find_first_host(env.get(nodes, "")), f"first host of {nodes}={env.get(nodes, '')}"),
        master_port=it.port(seed, f"SLURM_JOB_ID.SLURM_STEP_ID={seed}"),
        source="Slurm", names=("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"), origins=it.origins,
    )  # fmt: skip


def read_open_mpi(env: Mapping[str, str]) -> Identity | None:
    """`mpirun` of Open MPI 4 and 5, and of what is built from it."""
    job = "PMIX_NAMESPACE" if env.get("PMIX_NAMESPACE") else "OMPI_MCA_ess_base_jobid"
    return _read_mpirun(env, "OMPI_COMM_WORLD", job, "Open MPI")


def read_hydra(env: Mapping[str, str]) -> Identity | None:
    """`mpiexec` of MPICH and Intel MPI, whose process manager is Hydra.

    Slurm's own PMI does not set these local names.
    """
    return _read_pmi(env) if "MPI_LOCALRANKID" in env else None


def read_pmi(env: Mapping[str, str]) -> Identity | None:
    """Another process manager that speaks PMI: PALS on Cray's machines, and others."""
    return None if "MPI_LOCALRANKID" in env else _read_pmi(env)


def _read_pmi(env: Mapping[str, str]) -> Identity | None:
    it = Traces(env)
    rank, world_size = it.number("rank", "PMI_RANK"), it.number("world_size", "PMI_SIZE")
    if rank is None or world_size is None:
        return None
    local_size = it.number("local_world_size", "MPI_LOCALNRANKS", "PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE")
    seed, how = env.get("PALS_APID", ""), f"PALS_APID={env.get('PALS_APID', '')}"
    if not seed and local_size == world_size:  # then all ranks have Hydra's proxy as their parent
        seed, how = f"parent {os.getppid()}", f"the parent process, {os.getppid()}"
    kind = "PALS" if "PALS_APID" in env else "MPICH" if "MPI_LOCALRANKID" in env else "PMI"
    return Identity(
        rank=rank, world_size=world_size, local_rank=it.number("local_rank", "MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"), local_world_size=local_size,
        node_rank=it.number("node_rank", "PALS_NODEID"), master_addr=_addr_on_one_host(it, local_size, world_size), master_port=it.port(seed, how),
        source="Intel MPI" if any(name.startswith("I_MPI_") for name in env) else kind, names=("PMI_RANK", "PMI_SIZE"), origins=it.origins,
    )  # fmt: skip


def read_mvapich(env: Mapping[str, str]) -> Identity | None:
    """`mpirun_rsh` of MVAPICH2; its mpiexec is Hydra."""
    # The process id of mpirun_rsh, the same for all ranks.
    return _read_mpirun(env, "MV2_COMM_WORLD", "MPIRUN_ID", "MVAPICH2", "MV2_NUM_NODES_IN_JOB")


def _read_mpirun(env: Mapping[str, str], world: str, job: str, source: str, *nodes: str) -> Identity | None:
    """Read what an mpirun tells of its communicator of all ranks; ``job`` tells jobs apart, ``nodes`` counts the nodes."""
    it = Traces(env)
    rank, world_size = it.number("rank", f"{world}_RANK"), it.number("world_size", f"{world}_SIZE")
    if rank is None or world_size is None:
        return None
    local_size = it.number("local_world_size", f"{world}_LOCAL_SIZE")
    return Identity(
        rank=rank, world_size=world_size, local_rank=it.number("local_rank", f"{world}_LOCAL_RANK"), local_world_size=local_size,
        num_nodes=it.number("num_nodes", *nodes), master_addr=_addr_on_one_host(it, local_size, world_size),
        master_port=it.port(env.get(job, ""), f"{job}={env.get(job, '')}"),
        source=source, names=(f"{world}_RANK", f"{world}_SIZE"), origins=it.origins,
    )  # fmt: skip


def read_flux(env: Mapping[str, str]) -> Identity | None:
    """A job of `flux run` with several tasks."""
    it = Traces(env)
    rank, world_size = it.number("rank", "FLUX_TASK_RANK"), it.number("world_size", "FLUX_JOB_SIZE")
    if rank is None or world_size is None or world_size < 2:
        return None
    nodes = it.number("num_nodes", "FLUX_JOB_NNODES")
    local_size = it.derive("local_world_size", world_size if nodes == 1 else None, "FLUX_JOB_SIZE on one node")
    job = env.get("FLUX_JOB_ID", "")
    return Identity(
        rank=rank, world_size=world_size, local_rank=it.number("local_rank", "FLUX_TASK_LOCAL_ID"), local_world_size=local_size, num_nodes=nodes,
        master_addr=_addr_on_one_host(it, local_size, world_size), master_port=it.port(job, f"FLUX_JOB_ID={job}"),
        source="Flux", names=("FLUX_TASK_RANK", "FLUX_JOB_SIZE"), origins=it.origins,
    )  # fmt: skip


def _addr_on_one_host(it: Traces, local_size: int | None, world_size: int) -> str | None:
    """MASTER_ADDR, or this host if all ranks are on it: nothing else tells on which host rank 0 is."""
    return it.addr("127.0.0.1" if local_size == world_size else None, "all ranks are on this host")
