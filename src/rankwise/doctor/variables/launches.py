"""Variables that contradict each other where a launcher is started: what it sets for its ranks does not matter there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rankwise.base.identity import Identity
from rankwise.base.identity_launchers import read_flux, read_hydra, read_mvapich, read_open_mpi, read_slurm
from rankwise.doctor.host import Host
from rankwise.doctor.probe import Reading, fail, warn
from rankwise.doctor.variables.places import count, number, try_read

#: What accelerate takes for yes.
_YES = {"1", "true", "yes", "on", "y", "t"}


def find_launch_contradictions(env: Mapping[str, str], *, num_nodes: int | None = None) -> tuple[Reading, ...]:
    """Return what can't be true in the environment of a launcher; whoever examines a host masks the secrets in it.

    A reading is ``fail`` if the job breaks or hangs, ``warn`` if it may. ``num_nodes`` is the most of a range; None is
    what is not known.
    """
    return (*check_tasks(env, num_nodes), *_check_nodes(env, num_nodes), *check_switches(env))


def count_devices(env: Mapping[str, str]) -> int | None:
    """Return how many GPUs CUDA_VISIBLE_DEVICES shows; None if it is not set, or hides all, as jobs on CPUs do."""
    entries = [one.strip() for one in env.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    # CUDA stops at the first entry that is no device.
    shown = next(
        (n for n, one in enumerate(entries) if not one or one.startswith("-") or one == "NoDevFiles"), len(entries)
    )
    return shown or None


def may_use_gpus(env: Mapping[str, str], *, backend: str, has_gpus: bool | None) -> bool:
    """Return whether the ranks may take GPUs: there may be some, and neither the backend nor accelerate says that CPUs are meant."""
    is_on_cpu = env.get("ACCELERATE_USE_CPU", "").strip().lower() in _YES
    return has_gpus is not False and not is_on_cpu and (not backend or "nccl" in backend)


def check_switches(env: Mapping[str, str]) -> Iterator[Reading]:
    """Report settings of accelerate that were left over from another launch."""
    names = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM")
    on = [name for name in names if env.get(name, "").strip().lower() in _YES]
    if len(on) > 1:
        yield fail(
            f"{' and '.join(f'{name}={env[name]}' for name in on)}: one way to spread the model can be chosen",
            "one of them is left over from another launch: the model is spread in a way that was not intended, or accelerate stops",
            f"unset {on[1]}  # or {on[0]}", "L16"
        )  # fmt: skip


def find_outer(env: Mapping[str, str]) -> Identity | None:
    """Return what the launcher of processes says (MPI, Slurm, Flux), below whatever RANK and WORLD_SIZE say; None if it can't be read."""
    readers = (read_open_mpi, read_hydra, read_mvapich, read_slurm, read_flux)
    return try_read(lambda env: next((it for read in readers if (it := read(env)) is not None), None), env)


def check_tasks(
    env: Mapping[str, str],
    num_nodes: int | None,
    each: str = "each of them starts a launcher",
    *,
    is_sure: bool = True,
) -> Iterator[Reading]:
    """Report a launcher in each of several tasks on one node. Agents may be as many as tasks, if they are told so."""
    outer = find_outer(env)
    if outer is None or (outer.local_world_size or 1) < 2 or num_nodes in {None, outer.world_size}:
        return
    tasks = (
        f"{outer.source} has started {outer.local_world_size} tasks on this node ({outer.origins['local_world_size']})"
    )
    why = f"more launchers than the {num_nodes} nodes of the job: worlds that overlap, ports that are taken, or ranks that wait forever"
    yield Reading(
        "fail" if num_nodes > 1 and outer.local_rank and is_sure else "warn", f"{tasks}, and {each}",
        f"{outer.world_size} worlds, each for itself" if num_nodes == 1 else why,
        "# srun --ntasks-per-node=1 …" if outer.source == "Slurm" else "# one process on each node: mpirun -npernode 1 …", "I24"
    )  # fmt: skip


def _check_nodes(env: Mapping[str, str], num_nodes: int | None) -> Iterator[Reading]:
    in_step = count(env, "SLURM_STEP_NUM_NODES") if "SLURM_STEP_NUM_TASKS" in env else None
    have = in_step or count(env, "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    # More launchers than nodes are possible: a task each.
    tasks = number(env, "SLURM_STEP_NUM_TASKS") or 1
    if num_nodes is None or have is None or "SLURM_JOB_ID" not in env:
        return
    if num_nodes > max(have, tasks) > 0:
        yield warn(
            f"the job is to have {num_nodes} nodes, but Slurm has allocated {have}",
            "the launcher waits for nodes that are not started, unless they come from another Slurm job", f"rankwise run --nnodes {have} …", "I1"
        )  # fmt: skip


#: The drivers of NVIDIA (also in containers, in WSL, on Jetson) and AMD.
_SIGNS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/nvhost-gpu", "/dev/nvgpu", "/dev/kfd")


def may_have_gpus(host: Host) -> bool | None:
    """Return whether a host may have GPUs that torch can use; None where files don't tell."""
    return any(map(host.has, _SIGNS)) if host.has("/proc") or host.has("/dev") else None
