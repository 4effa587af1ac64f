"""Variables of a rank, or of a launcher that is to be started, that contradict each other: both values, what comes of it, what to do.

What is wrong for sure fails; what another launcher may have set by right is a warning. Nothing is said of torchrun in a step of one task a
node, of mpirun inside a Slurm job, of a pod whose RANK counts pods: there variables differ, and all is well. Where a launcher is started, what it sets
for its ranks does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rankwise.base.environ import is_on
from rankwise.base.errors import UsageError
from rankwise.base.host import is_loopback, is_unspecified
from rankwise.base.identity import Identity, read_all, read_identity
from rankwise.base.identity_launchers import read_flux, read_hydra, read_mvapich, read_open_mpi, read_slurm, read_torch
from rankwise.doctor.host import Host
from rankwise.doctor.network.names import find_mistake, write_remedy
from rankwise.doctor.probe import Reading, fail, warn
from rankwise.doctor.variables.masking import make_mask, mask_reading
from rankwise.doctor.variables.places import count, find_exported_node, find_place, number, try_read


def find_contradictions(
    env: Mapping[str, str], *, backend: str = "", has_gpus: bool | None = None
) -> tuple[Reading, ...]:
    """Return what can't be true in the environment of a rank, or of a script that is to become one, without secrets.

    A reading is ``fail`` if the job breaks or hangs, ``warn`` if it may. ``has_gpus`` is None where that is not known.
    """
    checks = (
        _check_readable, _check_rank, _check_against_step, _check_leftover_local_rank, _check_address, _check_loopback, find_half_set,
        _check_pet_nodes, _check_tasks, _check_switches,
    )  # fmt: skip
    found = [one for check in checks for one in check(env)]
    if has_gpus is not False and not is_on("ACCELERATE_USE_CPU", env=env) and (not backend or "nccl" in backend):
        found += _check_devices(env)
    mask = make_mask(env)
    return tuple(mask_reading(one, mask) for one in found)


def _find_outer(env: Mapping[str, str]) -> Identity | None:
    """Return what the launcher of several processes says (MPI, Slurm, Flux), below whatever RANK and WORLD_SIZE say; None if it can't be read."""
    readers = (read_open_mpi, read_hydra, read_mvapich, read_slurm, read_flux)
    outer = try_read(lambda env: next((it for read in readers if (it := read(env)) is not None), None), env)
    return outer if outer is not None and outer.world_size > 1 else None


def _check_readable(env: Mapping[str, str]) -> Iterator[Reading]:
    try:
        read_identity(env)
    except UsageError as error:
        is_other_task = "not part of a process group" in error.message
        if find_place(env) is None or not _is_half(env):
            yield Reading(
                "warn" if is_other_task else "fail", error.message, "rankwise.init() and init_process_group() stop here",
                f"# {error.hint}" if error.hint else ""
            )  # fmt: skip


def _is_half(env: Mapping[str, str]) -> bool:
    """Return whether only one of a pair is set: a pod is told its number, a job script how many ranks there will be; a launcher knows the rest."""
    has_rank = bool(env.get("RANK") or env.get("JOB_COMPLETION_INDEX"))
    names = ("RANK", "WORLD_SIZE", "JOB_COMPLETION_INDEX")
    is_readable = all(number(env, name) is not None for name in names if env.get(name))
    return is_readable and has_rank != bool(env.get("WORLD_SIZE"))


def _check_rank(env: Mapping[str, str]) -> Iterator[Reading]:
    it = try_read(read_identity, env)
    if it is not None and it.rank >= it.world_size:
        rank, world = it.origins.get("rank", ""), it.origins.get("world_size", "")
        yield fail(
            f"rank {it.rank} of {it.world_size}: {rank}, {world}",
            f"ranks are 0 to {it.world_size - 1}: the store refuses it, or all others wait for a rank that never arrives",
            f"# count {it.names[0]} from 0, and let {it.names[1]} be the number of all processes", "I11"
        )  # fmt: skip


def _check_against_step(env: Mapping[str, str]) -> Iterator[Reading]:
    """RANK and WORLD_SIZE against the launcher that has started this very process, if no other launcher stands in between."""
    outer = _find_outer(env)
    if outer is None or "TORCHELASTIC_RUN_ID" in env or env.get("SLURM_HET_SIZE"):
        return
    local, world, rank = number(env, "LOCAL_RANK"), number(env, "WORLD_SIZE"), number(env, "RANK")
    is_alone = outer.local_world_size in {None, 1}
    shares_node = (outer.local_world_size or 1) > 1 or bool(outer.local_rank)
    if local not in {None, outer.local_rank} and not (shares_node and world == outer.world_size):
        return  # a launcher of another make, started by some of the step's processes
    if world is None or (world == outer.world_size and rank in {None, outer.rank}):
        return
    if world != outer.world_size:
        # With one process a node, each may start the rest of its node's ranks itself.
        if is_alone and not (local is None and (world < outer.world_size or world % outer.world_size)):
            return
        what = f"WORLD_SIZE={world}, and {outer.source} has started {outer.world_size} processes ({outer.origins['world_size']})"
        why = f"all {outer.world_size} have the same WORLD_SIZE: they form other worlds, or wait for ranks that are not started"
    else:
        what = f"RANK={rank}, and {outer.source} says rank {outer.rank} ({outer.origins['rank']}), of {world} both"
        why = "a RANK that was exported once is the same in all processes: two claim one rank, and others never arrive"
    is_stale = _is_stale(env)
    yield Reading(
        "fail" if is_stale else "warn", what, why + ("" if is_stale else "; or another launcher ordered them, as Ray does, and they are correct"),
        "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE  # left over from an export? then also in ~/.bashrc",
        "I10" if world == outer.world_size else "I12"
    )  # fmt: skip


def _is_this_host(addr: str) -> bool:
    return is_loopback(addr) or is_unspecified(addr)


def _is_stale(env: Mapping[str, str]) -> bool:
    """Return whether RANK and WORLD_SIZE are what people export by hand: rank 0, and of one, or without the rest that launchers set.

    Ray orders its nodes itself, a step may hold trainers beside servers, and each task may spawn a world of its own on
    its node.
    """
    if number(env, "RANK") not in {None, 0}:
        return False
    world = number(env, "WORLD_SIZE")
    is_own_world = world is not None and world > 1 and _is_this_host(env.get("MASTER_ADDR", ""))
    return world == 1 or (number(env, "LOCAL_RANK") is None and not is_own_world)


def _check_leftover_local_rank(env: Mapping[str, str]) -> Iterator[Reading]:
    outer, local = _find_outer(env), number(env, "LOCAL_RANK")
    if outer is None or local is None or env.get("RANK") or outer.local_rank in {None, local}:
        return
    # Another launcher's ranks on this node; or a GPU of its own for each task, which is number 0 there.
    if outer.local_world_size in {None, 1} or (local == 0 and count_devices(env) == 1):
        return
    yield Reading(
        "fail" if local == 0 else "warn", f"LOCAL_RANK={local}, and {outer.source} says {outer.local_rank} ({outer.origins['local_rank']})",
        "scripts that choose their GPU by LOCAL_RANK all take the same one", "unset LOCAL_RANK  # left over from an export?", "I10"
    )  # fmt: skip


def _check_address(env: Mapping[str, str]) -> Iterator[Reading]:
    mistake = find_mistake(env.get("MASTER_ADDR", ""))
    if mistake is None:
        return
    place = find_place(env)
    is_rank = try_read(read_identity, env) is not None and (place is None or place.is_rank_too)
    yield Reading(
        "fail" if is_rank else "warn", f"MASTER_ADDR={mistake.what}",
        "no host has such a name: `The client socket has timed out`, with no mention of the name", write_remedy(mistake, number(env, "MASTER_PORT")), "I3"
    )  # fmt: skip


def _check_loopback(env: Mapping[str, str]) -> Iterator[Reading]:
    addr = env.get("MASTER_ADDR", "")
    # Nodes that met there through torchrun are on this host, all of them.
    if not addr or find_mistake(addr) is not None or not _is_this_host(addr) or "TORCHELASTIC_RUN_ID" in env:
        return
    own = try_read(read_torch, env)
    if own is not None and own.local_world_size == own.world_size:
        return
    for it in read_all(env):
        if not isinstance(it, Identity):
            continue
        is_spread = it.local_world_size is not None and it.local_world_size < it.world_size
        if (it.num_nodes or 1) < 2 and not is_spread:
            continue
        by = it.origins
        how = by["num_nodes"] if it.num_nodes else f"{by['local_world_size']} of {by['world_size']}"
        # On the first node it does no harm by itself: the others may be told another address.
        is_first, is_by_hand = is_unspecified(addr) and it.node_rank == 0, it.source == "RANK and WORLD_SIZE"
        yield Reading(
            "warn" if is_by_hand or is_first else "fail", f"MASTER_ADDR={addr}, and the job has several nodes ({how})",
            "on each node it is that node: the ranks of all nodes but one wait for a store that is not there",
            f"{'export MASTER_ADDR=HOST  #' if is_by_hand else 'unset MASTER_ADDR  # or give it'} an address of node 0 that the others reach", "I4"
        )  # fmt: skip
        return


def _check_pet_nodes(env: Mapping[str, str]) -> Iterator[Reading]:
    """PET_NNODES, which torchrun takes for --nnodes, against the nodes that Slurm has given."""
    low, _, high = env.get("PET_NNODES", "").partition(":")
    in_step = count(env, "SLURM_STEP_NUM_NODES") if "TORCHELASTIC_RUN_ID" not in env else None
    have = in_step or count(env, "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    if have is None or not low.isdecimal() or not (high or low).isdecimal():
        return
    given, source = f"PET_NNODES={env['PET_NNODES']}", "SLURM_STEP_NUM_NODES" if in_step else "SLURM_NNODES"
    if int(low) > have:
        what, class_id = f"{given}, but Slurm has allocated {have} ({source}={have})", "I1"
        why = "the launcher waits for nodes that are not started"
    elif in_step is not None and 1 < int(high or low) < have:
        what, class_id = f"{given}, but the step runs on {have} nodes ({source}={have})", "I12"
        why = "some nodes are in no world"
    else:
        return
    yield fail(what, why, f"export PET_NNODES={have}", class_id)


def _check_tasks(env: Mapping[str, str]) -> Iterator[Reading]:
    is_rank = "TORCHELASTIC_RUN_ID" in env
    nodes = number(env, "GROUP_WORLD_SIZE" if is_rank else "PET_NNODES")
    each = f"each of them a launcher of a job of {nodes} nodes"
    # The first task of a node may be the only one that starts a launcher: scripts do that. And variables alone start
    # none.
    if not is_rank:
        each = f"PET_NNODES={nodes} is for launchers on {nodes} nodes"
    if (nodes or 0) > 1:
        yield from _check_launchers(env, nodes, each, is_sure=is_rank)


def _check_devices(env: Mapping[str, str]) -> Iterator[Reading]:
    ranks, local, devices = number(env, "LOCAL_WORLD_SIZE"), number(env, "LOCAL_RANK"), count_devices(env)
    # One device may well be this rank's own.
    if ranks is None or devices is None or not 2 <= devices < ranks:
        return
    is_beyond = local is not None and local >= devices
    yield Reading(
        "fail" if is_beyond else "warn",
        f"CUDA_VISIBLE_DEVICES={env['CUDA_VISIBLE_DEVICES']} is {devices} GPUs for LOCAL_WORLD_SIZE={ranks} ranks" + (f", this one with LOCAL_RANK={local}" if is_beyond else ""),
        "ranks that take the GPU of their LOCAL_RANK end with `CUDA error: invalid device ordinal`", f"rankwise run --nproc-per-node {devices} …", "L7"
    )  # fmt: skip


def find_half_set(env: Mapping[str, str]) -> Iterator[Reading]:
    """Yield the warning of a lone LOCAL_RANK or PMIX_RANK, or of a node's number beyond the nodes, if there is one.

    Nobody reads them as a rank, and yet such a process is not alone.
    """
    if find_place(env) is not None or next(read_all(env), None) is not None:
        return
    node, nodes = number(env, "NODE_RANK"), number(env, "NNODES", "NUM_NODES")
    if node is not None and nodes is not None and node >= nodes > 1:
        yield warn(
            f"NODE_RANK={node}, but there are {nodes} nodes: they are numbered 0 to {nodes - 1}",
            "a launcher with this number is refused, or the others wait for a node that never arrives", "# count NODE_RANK from 0", "I11"
        )  # fmt: skip
        return
    if find_exported_node(env) is not None:
        return
    local, pmix = number(env, "LOCAL_RANK"), number(env, "PMIX_RANK")
    if pmix is not None and pmix >= 0:
        yield warn(
            f"PMIX_RANK={pmix} is set, but no variable says how many processes there are",
            "a process manager that speaks PMIx has started this one, perhaps among others: each believes it is the only one",
            "export RANK=$PMIX_RANK WORLD_SIZE=N MASTER_ADDR=HOST MASTER_PORT=29500  # in what each process runs; HOST: where rank 0 is"
        )  # fmt: skip
    elif local is not None and local >= 0:
        yield warn(
            f"LOCAL_RANK={local} is set, but neither RANK nor WORLD_SIZE is",
            f"libraries treat the process as one of several (accelerate: `environment variable RANK expected, but not set`), and scripts take GPU {local}",
            "unset LOCAL_RANK  # if it is left over from an export; if a launcher has set it, export RANK and WORLD_SIZE as well"
        )  # fmt: skip


def find_launch_contradictions(env: Mapping[str, str], *, num_nodes: int | None = None) -> tuple[Reading, ...]:
    """Return what can't be true in the environment of a launcher; whoever examines a host masks the secrets in it.

    A reading is ``fail`` if the job breaks or hangs, ``warn`` if it may. ``num_nodes`` is the most of a range; None is
    what is not known.
    """
    return (*_check_launchers(env, num_nodes), *_check_nodes(env, num_nodes), *_check_switches(env))


def count_devices(env: Mapping[str, str]) -> int | None:
    """Return how many GPUs CUDA_VISIBLE_DEVICES shows; None if it is not set, or hides all, as jobs on CPUs do."""
    entries = [one.strip() for one in env.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    # CUDA stops at the first entry that is no device.
    shown = next(
        (n for n, one in enumerate(entries) if not one or one.startswith("-") or one == "NoDevFiles"), len(entries)
    )
    return shown or None


def _check_switches(env: Mapping[str, str]) -> Iterator[Reading]:
    """Report settings of accelerate that were left over from another launch."""
    names = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM")
    on = [name for name in names if is_on(name, env=env)]
    if len(on) > 1:
        yield fail(
            f"{' and '.join(f'{name}={env[name]}' for name in on)}: one way to spread the model can be chosen",
            "one of them is left over from another launch: the model is spread in a way that was not intended, or accelerate stops",
            f"unset {on[1]}  # or {on[0]}", "L16"
        )  # fmt: skip


def _check_launchers(
    env: Mapping[str, str], num_nodes: int | None, each: str = "each of them starts a launcher", *, is_sure: bool = True
) -> Iterator[Reading]:
    """Report a launcher in each of several tasks on one node. One agent a task is right if --nnodes says so."""
    outer = _find_outer(env)
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
