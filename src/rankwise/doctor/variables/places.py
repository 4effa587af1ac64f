"""Where a launcher is to be started: a node that a cluster has set up, and the command that fits it.

Kubernetes, SageMaker, SkyPilot and a Slurm allocation start one process on a node, and tell it which node it is. Such a process is
a rank only if it is meant to be the only one on its node; most often it starts a launcher, which starts a rank for each GPU.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

from rankwise.base.errors import UsageError
from rankwise.base.host import is_loopback, is_unspecified
from rankwise.base.host_list import find_first_host
from rankwise.base.identity_clusters import read_sagemaker, read_skypilot, read_tf_config
from rankwise.base.identity_facts import Identity, derive_port, expand_tasks
from rankwise.base.identity_launchers import is_slurm_step, read_slurm
from rankwise.doctor.network.names import find_mistake, is_plain

_PET_SIGNS = ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT")
#: Who has these is a rank.
_RANKS = ("TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_RANK")
#: Clusters that start one process on each host: how it is read, whose it is and what, the variables with its GPUs, and
#: with a sign of a single host.
_CLUSTERS = (
    (read_tf_config, "TF_CONFIG", "TF_CONFIG lists one process a host", "", ""),
    (read_sagemaker, "SageMaker", "a host of a SageMaker job", "SM_NUM_GPUS", "SM_HOSTS"),
    (read_skypilot, "SkyPilot", "a node of a SkyPilot task", "SKYPILOT_NUM_GPUS_PER_NODE", "SKYPILOT_NODE_RANK"),
)
#: Where torch.distributed meets if nobody says otherwise.
DEFAULT_PORT = 29500
#: The step in which Slurm runs the shell of `salloc`.
_INTERACTIVE = "4294967290"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A node on which a launcher is to be started; what is not told is None.

    Attributes:
        source: Who says so: ``SkyPilot``.
        what: What it is, in words.
        command: What to start here; capital words are to be filled in.
        note: What else must be known about the command.
        is_rank_too: Whether a script that is started here without a launcher is a rank itself, as with `srun`.
    """

    source: str
    what: str
    node_rank: int | None = None
    num_nodes: int | None = None
    command: str
    note: str = ""
    is_rank_too: bool = False


def find_place(env: Mapping[str, str]) -> Place | None:
    """Return where this process stands if a launcher is to be started here; None if it is a rank of one, or nobody says anything."""
    if (env.get("RANK") and env.get("LOCAL_RANK")) or any(name in env for name in _RANKS):
        return None
    readers: tuple[Callable[[Mapping[str, str]], Place | None], ...] = (
        _read_pet, _read_pod, _read_step, _read_cluster, _read_allocation,
    )  # fmt: skip
    return next((place for reader in readers if (place := reader(env)) is not None), None)


def number(env: Mapping[str, str], *names: str) -> int | None:
    """Return the first of some variables that is a number; None if none is."""
    for name in names:
        text = env.get(name, "").strip()
        if re.fullmatch(r"-?\d{1,18}", text):
            return int(text)
    return None


def count(env: Mapping[str, str], *names: str) -> int | None:
    """Return the first of some variables that is a number of things, 1 or more; None if none is."""
    return next((info for name in names if (info := number(env, name)) is not None and info > 0), None)


def find_endpoint(
    env: Mapping[str, str], derived: Identity | None = None, *, blank: str = "NODE0", is_first: bool = False
) -> tuple[str, int]:
    """Return the address and port where nodes are to meet, as they may stand in a command; ``blank`` is for one that is to be filled in.

    ``derived`` is what the cluster says, read without MASTER_ADDR, which may be a slip or mean this host only: that is
    right where the command is for the node itself (``is_first``).
    """
    info, ports = env.get("MASTER_ADDR", ""), [number(env, "MASTER_PORT")]
    mistake = find_mistake(info)
    if mistake is not None:
        info = mistake.host
        ports.append(mistake.port)
    there = (derived.master_addr if derived else "") or ""
    names = (one for one in (info, there) if is_plain(one) and not is_unspecified(one))
    addr = next((one for one in names if is_first or not is_loopback(one)), blank)
    ports.append(derived.master_port if derived else None)
    return addr, next((port for port in ports if port is not None and 0 < port < 65536), DEFAULT_PORT)


def _forget_address(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name != "MASTER_ADDR"}


def _count_gpus(env: Mapping[str, str], *names: str) -> str:
    info = count(env, *names)
    return str(info) if info else "auto"


def _read_pet(env: Mapping[str, str]) -> Place | None:
    """Kubeflow sets torchrun's flags as variables: PyTorchJob (v1), TrainJob (v2)."""
    if not any(env.get(name) for name in _PET_SIGNS):
        return None
    nodes, node = count(env, "PET_NNODES"), number(env, "PET_NODE_RANK")
    flags = []
    if env.get("PET_N_PROC_PER_NODE") and not env.get("PET_NPROC_PER_NODE"):
        # What PyTorchJob set before 1.6.
        flags.append(f"--nproc-per-node {shlex.quote(env['PET_N_PROC_PER_NODE'])}")
    rank = number(env, "RANK")
    if node is None and rank is not None and not env.get("PET_RDZV_ENDPOINT"):
        flags.append(f"--node-rank {rank}")
        node = rank
    is_pod = _is_pod(env)
    return Place(
        source="Kubeflow" if is_pod else "PET_* variables", what="a pod in which Kubeflow has set torchrun's flags" if is_pod else "torchrun's flags are set as variables",
        node_rank=node, num_nodes=nodes,
        command=" ".join(["rankwise run", *flags, "train.py"]), is_rank_too=try_read(read_slurm, env) is not None, note="the PET_* variables stand in for the other flags" + ("; RANK counts pods here" if is_pod and rank is not None else ""),
    )  # fmt: skip


def _is_pod(env: Mapping[str, str]) -> bool:
    return "KUBERNETES_SERVICE_HOST" in env or "JOB_COMPLETION_INDEX" in env


def _read_pod(env: Mapping[str, str]) -> Place | None:
    """An indexed job, a JobSet, or an old PyTorchJob, which counts its pods in RANK and WORLD_SIZE."""
    node = number(env, "RANK", "JOB_COMPLETION_INDEX")
    if not _is_pod(env) or node is None or node < 0 or env.get("LOCAL_RANK"):
        return None
    nodes = count(env, "WORLD_SIZE")
    if nodes == 1 or (nodes is None and "JOB_COMPLETION_INDEX" not in env):
        return None
    is_index = "JOB_COMPLETION_INDEX" in env
    info = "a pod of an indexed job" if is_index else "a pod with RANK and WORLD_SIZE"
    # In Kubernetes the first pod is told `localhost`, and only the others get the name.
    addr, port = find_endpoint(env, blank="POD0", is_first=node == 0)
    return Place(
        source="Kubernetes", what=info, node_rank=node, num_nodes=nodes,
        command=write_static(str(nodes or "NODES"), str(node), addr, str(port), "auto"),
        note="" if nodes else "no variable says how many pods there are: replace NODES with the job's completions",
    )  # fmt: skip


def _read_step(env: Mapping[str, str]) -> Place | None:
    """A step of Slurm with one task on each of several nodes: as good for ranks as for launchers."""
    it = try_read(read_slurm, _forget_address(env))
    if it is None or it.num_nodes is None or it.num_nodes < 2 or it.world_size != it.num_nodes:
        return None
    return Place(
        source="Slurm", what="srun has started one task on each node", node_rank=it.node_rank, num_nodes=it.num_nodes,
        command=_write_c10d(it.num_nodes, *find_endpoint(env, it), env), is_rank_too=True,
    )  # fmt: skip


def _alone(source: str, what: str, ranks: str) -> Place:
    command = f"rankwise run --nproc-per-node {ranks} train.py"
    return Place(source=source, what=what, num_nodes=1, command=command)


def _read_allocation(env: Mapping[str, str]) -> Place | None:
    """The batch script of Slurm, a shell of `salloc`, or a single task."""
    if not env.get("SLURM_JOB_ID"):
        return None
    nodes = count(env, "SLURM_JOB_NUM_NODES", "SLURM_NNODES") or 1
    gpus, what = _count_gpus(env, "SLURM_GPUS_ON_NODE"), "inside a Slurm job, outside srun"
    if is_slurm_step(env) and env.get("SLURM_STEP_ID") != _INTERACTIVE:
        # Of several tasks each is a rank.
        is_single = (count(env, "SLURM_STEP_NUM_TASKS") or 1) == 1
        return _alone("Slurm", "the only task of a step", gpus) if is_single else None
    if nodes == 1:
        return _alone("Slurm", what, gpus)
    first = find_first_host(env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST", ""))
    port = derive_port(env["SLURM_JOB_ID"]) or DEFAULT_PORT
    inner = _write_c10d(nodes, first if is_plain(first) else "NODE0", port, env)
    return Place(
        source="Slurm", what=what, num_nodes=nodes, command=f"srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 {inner}",
        note="one task a node: each starts a launcher, which starts the node's ranks; a job that asked for CPUs or GPUs by task gives srun those of a whole node: --cpus-per-task, --gpus-per-node",
    )  # fmt: skip


def try_read(read: Callable[[Mapping[str, str]], Identity | None], env: Mapping[str, str]) -> Identity | None:
    """Return what a launcher's variables say; None where they say nothing, or can't be read."""
    try:
        return read(env)
    except UsageError:
        return None


def _read_cluster(env: Mapping[str, str]) -> Place | None:
    """One process on each host, as TF_CONFIG lists them, or SageMaker and SkyPilot start them."""
    for read, source, what, gpus, sign in _CLUSTERS:
        ranks, it = _count_gpus(env, gpus), try_read(read, _forget_address(env))
        if it and it.local_world_size == 1 and (it.num_nodes or 1) > 1 and it.node_rank is not None:
            addr, port = find_endpoint(env, it)
            command = write_static(str(it.num_nodes), str(it.node_rank), addr, str(port), ranks)
            return Place(source=it.source, what=what, node_rank=it.node_rank, num_nodes=it.num_nodes, command=command)
        if env.get(sign):
            return _alone(source, what.replace("a ", "the only ", 1), ranks)
    return None


def write_static(nodes: str, node: str, addr: str, port: str, ranks: str) -> str:
    """Return the command that starts a launcher on one of several nodes, of which each knows its number."""
    return f"rankwise run --nnodes {nodes} --node-rank {node} --nproc-per-node {ranks} --master-addr {addr} --master-port {port} train.py"


def _write_c10d(nodes: int, addr: str, port: int, env: Mapping[str, str]) -> str:
    job = shlex.quote(env.get("SLURM_JOB_ID", "JOB"))
    # Each node counts its own where they differ.
    is_even = len(set(expand_tasks(env.get("SLURM_TASKS_PER_NODE", "")))) < 2
    gpus = _count_gpus(env, "SLURM_GPUS_ON_NODE") if is_even else "auto"
    return f"rankwise run --nnodes {nodes} --nproc-per-node {gpus} --rdzv-backend c10d --rdzv-endpoint {addr}:{port} --rdzv-id {job} train.py"


def find_exported_node(env: Mapping[str, str]) -> Place | None:
    """Return the place for a launcher that NODE_RANK and NNODES tell, as scripts set them by hand; None if they don't.

    Nobody but such scripts knows these names, so only who asks for a command gets one: no probe waits for other hosts
        by them.
    """
    node, nodes = number(env, "NODE_RANK"), number(env, "NNODES", "NUM_NODES")
    # What lies around by itself says nothing; node 0 of several is told where the others come, as they are.
    is_met = node == 0 and nodes is None and bool(env.get("MASTER_ADDR")) and find_endpoint(env)[0] != "NODE0"
    if not (nodes is None or nodes > 1) or not ((nodes or 0) > 1 or (node or 0) > 0 or is_met):
        return None
    if node is not None and not 0 <= node < (nodes or node + 1):
        return None
    name = "NNODES" if number(env, "NNODES") is not None else "NUM_NODES"
    names = [one for one, value in (("NODE_RANK", node), (name, nodes)) if value is not None]
    names += ["MASTER_ADDR"] if is_met else []
    lacking = "" if nodes else "no variable says how many nodes there are: replace NODES with their number"
    if node is None:
        lacking = "no variable says which node this is: replace NODE with its number, counted from 0"
    addr, port = find_endpoint(env)
    return Place(
        source=" and ".join(names), what="one of several nodes, by " + " and ".join(names), node_rank=node, num_nodes=nodes,
        command=write_static(str(nodes or "NODES"), "NODE" if node is None else str(node), addr, str(port), "auto"), note=lacking,
    )  # fmt: skip
