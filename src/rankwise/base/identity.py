"""Who a process is in its job, read from the variables of whatever started it.

torchrun's names win, as whoever sets them stands nearest to the process. After them come an srun step, Open MPI,
MPICH and its kin, TF_CONFIG, an indexed Kubernetes job and SkyPilot.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwise.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Below the range from which kernels hand out ports by themselves (Linux: 32768 and up).
_FIRST_PORT, _NUM_PORTS = 10_000, 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who a process is. What the variables don't tell is None: the handshake finds it out by the hosts' names.

    Attributes:
        rank: Global rank. It may be wrong (``>= world_size``): the handshake tells all ranks.
        world_size: How many ranks the job has.
        local_rank: Rank among those of this host.
        local_world_size: How many ranks this host has.
        node_rank: Which host this is.
        num_nodes: How many hosts the job has.
        master_addr: Where the store is, or None where only a file or a given store is used.
        master_port: Its port.
        source: Who told, in words: "torchrun's variables", "Slurm", …
        names: The variables that told rank and world size.
    """

    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    num_nodes: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    source: str
    names: tuple[str, str] = ("RANK", "WORLD_SIZE")


def read_identity(env: Mapping[str, str]) -> Identity | None:
    """Return who this process is, as the first launcher tells that has left complete traces in ``env``.

    Args:
        env: The environment.

    Returns:
        The identity; None if no variable says that this process is one of several.

    Raises:
        UsageError: Variables are incomplete, contradict each other, or are no numbers.
    """
    for reader in (
        _read_torch,
        _read_slurm,
        _read_open_mpi,
        _read_mpich,
        _read_tf_config,
        _read_kubernetes,
        _read_skypilot,
    ):
        identity = reader(env)
        if identity is not None:
            _check(identity)
            return identity
    return None


def read_int(env: Mapping[str, str], name: str) -> int | None:
    """Return a variable as a number.

    Args:
        env: The environment.
        name: The variable.

    Returns:
        The number; None if the variable is not set, or empty.

    Raises:
        UsageError: It is something else.
    """
    text = env.get(name, "").strip()
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise UsageError(
            f"{name}={text!r} is not a whole number", hint=f"set {name} to a number, or unset it"
        ) from None


def _check(it: Identity) -> None:
    rank, world = it.names
    if it.world_size < 1:
        raise UsageError(
            f"{world}={it.world_size}: a job has at least one rank",
            hint=f"set {world} to the number of processes",
        )
    if it.rank < 0:
        raise UsageError(
            f"{rank}={it.rank}: ranks are 0 to {it.world_size - 1}", hint=f"give each process its own {rank}"
        )
    if (
        it.local_rank is not None
        and it.local_world_size is not None
        and not 0 <= it.local_rank < it.local_world_size
    ):
        raise UsageError(
            f"[{it.source}] local rank {it.local_rank} with {it.local_world_size} ranks on this host",
            rank=it.rank,
            hint=f"LOCAL_RANK is 0 to LOCAL_WORLD_SIZE - 1 ({it.local_world_size - 1})",
        )
    if it.local_world_size is not None and it.local_world_size > it.world_size:
        raise UsageError(
            f"LOCAL_WORLD_SIZE={it.local_world_size} is more than {world}={it.world_size}",
            rank=it.rank,
            hint="LOCAL_WORLD_SIZE counts the ranks of this host, and WORLD_SIZE those of all hosts",
        )


def _read_torch(env: Mapping[str, str]) -> Identity | None:
    """torchrun, rankwise run, Kubeflow's PyTorchJob, or a person with `export`."""
    rank, world_size = read_int(env, "RANK"), read_int(env, "WORLD_SIZE")
    if rank is None and world_size == 1:
        rank = 0
    if world_size is None and rank is None:
        return None
    if rank is None:
        if "JOB_COMPLETION_INDEX" in env or _is_slurm_step(env):
            return None  # who knows the rank knows the world size too, or is asked for it
        raise UsageError(
            f"WORLD_SIZE={world_size} is set, and RANK is not",
            hint="start it with `rankwise run`, or give each process its RANK",
        )
    if world_size is None:
        raise UsageError(
            f"RANK={rank} is set, and WORLD_SIZE is not",
            rank=rank,
            hint="start it with `rankwise run`, or set WORLD_SIZE to the number of processes",
        )
    return Identity(
        rank=rank, world_size=world_size, local_rank=read_int(env, "LOCAL_RANK"), local_world_size=read_int(env, "LOCAL_WORLD_SIZE"),
        node_rank=read_int(env, "GROUP_RANK"), num_nodes=read_int(env, "GROUP_WORLD_SIZE"), master_addr=env.get("MASTER_ADDR"), master_port=_port(env),
        source="torchrun's variables" if "TORCHELASTIC_RUN_ID" in env else "RANK and WORLD_SIZE",
    )  # fmt: skip


def _port(env: Mapping[str, str], derived: int | None = None) -> int | None:
    """Return MASTER_PORT, else what the launcher lets us derive."""
    told = read_int(env, "MASTER_PORT")
    return derived if told is None else told


def _is_slurm_step(env: Mapping[str, str]) -> bool:
    # The batch script itself has SLURM_PROCID=0 too, but is no step.
    return "SLURM_STEP_NUM_TASKS" in env and "SLURM_PROCID" in env


def _read_slurm(env: Mapping[str, str]) -> Identity | None:
    if not _is_slurm_step(env):
        return None
    num_tasks, rank = read_int(env, "SLURM_STEP_NUM_TASKS"), read_int(env, "SLURM_PROCID")
    if num_tasks is None or rank is None or (num_tasks == 1 and read_int(env, "WORLD_SIZE") is None):
        return None  # `srun python train.py` with one task is one process
    seed = f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}"
    addr = find_first_host(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST", ""))
    per_node = env.get("SLURM_STEP_TASKS_PER_NODE", "")
    # "4(x2)" or "4": the same on every node; "4,3" is not.
    number = per_node.partition("(")[0]
    return Identity(
        rank=rank, world_size=num_tasks, local_rank=read_int(env, "SLURM_LOCALID"),
        local_world_size=int(number) if number.isdigit() and "," not in per_node else None,
        node_rank=read_int(env, "SLURM_NODEID"), num_nodes=read_int(env, "SLURM_STEP_NUM_NODES"),
        master_addr=env.get("MASTER_ADDR") or addr or None, master_port=_port(env, _derive_port(seed)), source="Slurm", names=("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    )  # fmt: skip


def _read_open_mpi(env: Mapping[str, str]) -> Identity | None:
    rank, world_size = read_int(env, "OMPI_COMM_WORLD_RANK"), read_int(env, "OMPI_COMM_WORLD_SIZE")
    if rank is None or world_size is None:
        return None
    local_size = read_int(env, "OMPI_COMM_WORLD_LOCAL_SIZE")
    seed = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid", "")
    return Identity(
        rank=rank, world_size=world_size, local_rank=read_int(env, "OMPI_COMM_WORLD_LOCAL_RANK"), local_world_size=local_size,
        master_addr=env.get("MASTER_ADDR") or ("127.0.0.1" if local_size == world_size else None),
        master_port=_port(env, _derive_port(seed)),
        source="Open MPI", names=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    )  # fmt: skip


def _read_mpich(env: Mapping[str, str]) -> Identity | None:
    rank, world_size = read_int(env, "PMI_RANK"), read_int(env, "PMI_SIZE")
    if rank is None or world_size is None:
        return None
    local_size = read_int(env, "MPI_LOCALNRANKS")
    is_one_host = local_size == world_size  # then all ranks have Hydra's proxy as their parent
    return Identity(
        rank=rank, world_size=world_size, local_rank=read_int(env, "MPI_LOCALRANKID"), local_world_size=local_size,
        master_addr=env.get("MASTER_ADDR") or ("127.0.0.1" if is_one_host else None),
        master_port=_port(env, _derive_port(f"parent {os.getppid()}") if is_one_host else None),
        source="MPICH", names=("PMI_RANK", "PMI_SIZE"),
    )  # fmt: skip


def _read_tf_config(env: Mapping[str, str]) -> Identity | None:
    """TensorFlow's: the chief is rank 0, the workers follow; each entry is one process."""
    text = env.get("TF_CONFIG", "").strip()
    if not text:
        return None
    how = 'it is JSON: {"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}'
    try:
        config = json.loads(text)
        cluster, task = config["cluster"], config["task"]
        kind, index = str(task["type"]), int(task["index"])
        chiefs = [str(entry) for entry in cluster.get("chief", cluster.get("master", []))]
        addresses = [*chiefs, *(str(entry) for entry in cluster.get("worker", []))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"TF_CONFIG can't be read: {type(error).__name__}: {error}", hint=how) from error
    if kind not in {"chief", "master", "worker"}:
        raise UsageError(f"TF_CONFIG says task type {kind!r}, which is no part of a process group",
                         hint="only chief and workers train together")  # fmt: skip
    rank = index + (len(chiefs) if kind == "worker" else 0)
    if not 0 <= rank < len(addresses):
        raise UsageError(
            f"TF_CONFIG says task {kind} {index}, and its cluster has {len(addresses)} chiefs and workers",
            hint=how,
        )
    hosts = [address.rpartition(":")[0] or address for address in addresses]
    port = addresses[0].rpartition(":")[2]
    order = list(dict.fromkeys(hosts))
    return Identity(
        rank=rank, world_size=len(addresses), local_rank=hosts[:rank].count(hosts[rank]), local_world_size=hosts.count(hosts[rank]),
        node_rank=order.index(hosts[rank]), num_nodes=len(order),
        master_addr=env.get("MASTER_ADDR") or hosts[0],
        master_port=_port(env, int(port) if port.isdigit() else None), source="TF_CONFIG", names=("TF_CONFIG task index", "TF_CONFIG cluster size"),
    )  # fmt: skip


def _read_kubernetes(env: Mapping[str, str]) -> Identity | None:
    """An indexed job: Kubernetes tells the index; the number of pods must be told by WORLD_SIZE."""
    index, world_size = read_int(env, "JOB_COMPLETION_INDEX"), read_int(env, "WORLD_SIZE")
    if index is None:
        return None
    if world_size is None:
        if index == 0:
            return None
        raise UsageError(f"JOB_COMPLETION_INDEX={index} says that this pod is one of several, and WORLD_SIZE is not set",
                         rank=index, hint="set WORLD_SIZE to the job's completions in the pod's env")  # fmt: skip
    return Identity(rank=index, world_size=world_size, master_addr=env.get("MASTER_ADDR"), master_port=_port(env), source="Kubernetes",
                    names=("JOB_COMPLETION_INDEX", "WORLD_SIZE"))  # fmt: skip


def _read_skypilot(env: Mapping[str, str]) -> Identity | None:
    rank, num_nodes = read_int(env, "SKYPILOT_NODE_RANK"), read_int(env, "SKYPILOT_NUM_NODES")
    if rank is None or num_nodes is None or num_nodes < 2:
        return None
    addr = next(iter(env.get("SKYPILOT_NODE_IPS", "").split()), None)
    return Identity(
        rank=rank, world_size=num_nodes, local_rank=0, local_world_size=1, node_rank=rank, num_nodes=num_nodes,
        master_addr=env.get("MASTER_ADDR") or addr, master_port=_port(env, _derive_port(env.get("SKYPILOT_TASK_ID", ""))), source="SkyPilot", names=("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"),
    )  # fmt: skip


def _derive_port(seed: str) -> int | None:
    """Return a port that all processes of a job find by themselves; None if nothing tells jobs apart."""
    return _FIRST_PORT + zlib.crc32(seed.encode()) % _NUM_PORTS if seed.strip(".") else None


def find_first_host(nodes: str) -> str:
    """Return the first host of Slurm's short form: ``gpu[07-09,12],big1`` starts with ``gpu07``."""
    name, bracket, rest = nodes.partition("[")
    if not bracket or "," in name:
        return name.partition(",")[0]
    inside, _, after = rest.partition("]")
    first = inside.partition(",")[0].partition("-")[0]
    return name + first + find_first_host(after) if after and not after.startswith(",") else name + first
