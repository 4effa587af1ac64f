"""Ranks that run right now and that somebody else has started: found by their environment, looked at twice, told as a scene."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, final

from rankwise.base.errors import UsageError
from rankwise.base.os_calls import SUPERVISOR_NAME
from rankwise.evidence.in_rank.ring import SIZE_BYTES
from rankwise.evidence.reader import pyspy
from rankwise.evidence.reader.merge_records import Merger
from rankwise.evidence.reader.offline_layout import FILES
from rankwise.evidence.reader.own_processes import with_stacks
from rankwise.evidence.reader.process_looks import BETWEEN_LOOKS_S, describe_rank, find_share, look_at
from rankwise.evidence.reader.process_state import IDLE_SHARE, read_process
from rankwise.evidence.reader.process_table import list_below, list_processes
from rankwise.evidence.reader.scene import Evidence, RankFacts, Scene
from rankwise.evidence.reader.source_lines import with_sources
from rankwise.evidence.reader.thread_choice import choose_stack

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rankwise.base.clock import Clock
    from rankwise.evidence.reader.notes import Stack
    from rankwise.evidence.reader.pyspy import SpyDump

#: How launchers tell a process its rank, and how many there are.
_NAMES = (
    ("RANK", "WORLD_SIZE"),
    # mpirun stands nearer to its ranks than the batch script's step.
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
_MPI = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
#: What the ranks of one job have in common.
_JOB = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")
_OURS = "RANKWISE_RANK"
_AT_ONCE = 8
_STACKS_ONLY = "a stack shows where a rank is, not which of its collectives it is in"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRank:
    """A process that is a rank.

    Attributes:
        is_ours: Whether `rankwise run` or `rankwise.watch` has started it: then it records its collectives.
    """

    rank: int
    pid: int
    world_size: int
    is_ours: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What a rank shows of itself at one moment: its stacks, or why there are none; and what it has recorded."""

    dump: SpyDump | str
    evidence: Evidence | None


def find_ranks(pid: int) -> tuple[LiveRank, ...]:
    """Return the ranks below a launcher, or all ranks of the job that a rank belongs to, as far as they run on this host.

    Args:
        pid: A launcher's, or a rank's.

    Raises:
        UsageError: There is no such process, its environment can't be read, or it is neither.
    """
    if read_process(pid) is None:
        raise UsageError(
            f"there is no process {pid} on this host",
            hint="has it ended, or does the job run on another host?"
            if Path("/proc/self/stat").exists()
            else "`rankwise why` needs /proc, which this system does not have",
        )
    parents = _list_parents()
    below = [pid, *list_below(pid, parents)]
    found = _pick(below, parents)
    if found and all(rank.pid == pid for rank in found):
        found = _pick(_list_alike(pid, parents), parents)
    if found:
        return found
    if _read_environ(pid) is None:
        raise UsageError(
            f"the environment of process {pid} can't be read",
            hint="run it as the user who runs the job, or as root",
        )
    raise UsageError(
        f"process {pid} is not a rank, and "
        + (f"none of its {len(below) - 1} descendants is one" if below[1:] else "has started no process"),
        hint="ranks are recognized by RANK, SLURM_PROCID or the like in their environment; pass the PID of torchrun, or of a rank",
    )


def take_scene(ranks: Sequence[LiveRank], clock: Clock) -> tuple[Scene, tuple[str, ...]]:
    """Look at ranks twice, a little more than a second apart; return them as a scene, and what could not be seen."""
    pids = [one.pid for one in ranks]
    was, first = look_at(pids, clock), _see_all(ranks)
    clock.sleep(BETWEEN_LOOKS_S)
    now, second = look_at(pids, clock), _see_all(ranks)
    stacks = {rank: seen.dump.stack for rank, seen in second.items() if not isinstance(seen.dump, str)}
    joined = pyspy.have_joined({one.rank: stacks.get(one.rank) for one in ranks})
    facts = []
    for one in ranks:
        seen, share = second[one.rank], find_share(was[one.pid], now[one.pid])
        is_idle = share is None or share < IDLE_SHARE
        is_still = is_idle and _stack_of(first[one.rank]) == _stack_of(seen)
        facts.append(
            replace(
                describe_rank(one.rank, one.pid, was[one.pid], now[one.pid], is_still=is_still),
                evidence=seen.evidence or Evidence(has_joined=one.rank in joined, missing=(_STACKS_ONLY,)),
                stack=_stack_of(seen, is_idle=is_idle),
            )
        )
    world_size = max(one.world_size for one in ranks)
    scene = with_stacks(
        Scene(
            ranks=tuple(facts),
            world_size=world_size,
            now_s=clock.monotonic(),
            is_whole=len(ranks) == world_size,
        )
    )
    refusals = dict.fromkeys(seen.dump for seen in second.values() if isinstance(seen.dump, str) and seen.dump)
    missing = dict.fromkeys(text for one in facts if one.evidence for text in one.evidence.missing)
    if refusals:
        return with_sources(scene), (*refusals, _describe_kernels(ranks, facts))
    return with_sources(scene), tuple(f"not known: {text}" for text in missing)


def _see_all(ranks: Sequence[LiveRank]) -> dict[int, _Seen]:
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(pool.map(lambda one: (one.rank, _see(one)), ranks))


def _see(one: LiveRank) -> _Seen:
    process = read_process(one.pid)
    # What is stopped would have to be woken to be read.
    can_tell = process is not None and process.state == "running" and not process.is_traced
    return _Seen(
        dump=pyspy.take(one.pid) if can_tell else "", evidence=_read_evidence(one.pid) if one.is_ours else None
    )


def _stack_of(seen: _Seen, *, is_idle: bool = False) -> Stack | None:
    """Return the main thread's stack; of a rank of ours that does nothing, also the one that it has told last."""
    if not isinstance(seen.dump, str):
        return seen.dump.stack
    return choose_stack(seen.evidence) if seen.evidence and is_idle else None


def _describe_kernels(ranks: Sequence[LiveRank], facts: Sequence[RankFacts]) -> str:
    """Return what the kernel says of ranks without a stack."""
    lines = []
    for one, fact in zip(ranks, facts, strict=True):
        with suppress(OSError):
            place = Path(f"/proc/{one.pid}/wchan").read_text(encoding="ascii").strip("0")
            share = f", {100 * fact.cpu_share:.0f} % CPU" if fact.cpu_share is not None else ""
            lines.append(f"rank {one.rank} {fact.state}{share}{f', in {place}' if place else ''}")
    return "the kernel says: " + "; ".join(lines)


def _pick(pids: Iterable[int], parents: Mapping[int, int]) -> tuple[LiveRank, ...]:
    """Return the ranks among processes: what a rank has started has its environment, too, and is none."""
    found = {pid: one for pid in pids if (one := _to_rank(pid, _read_environ(pid) or {}))}
    if any("LOCAL_RANK" in (_read_environ(pid) or {}) for pid in found):
        # A pod may have a RANK of its own, which is its node's; what torchrun starts there has a local one.
        found = {pid: one for pid, one in found.items() if "LOCAL_RANK" in (_read_environ(pid) or {})}
    jobs = {pid: _job_of(_read_environ(pid) or {}) for pid in found}
    tops = [
        one
        for pid, one in found.items()
        # One rank may have started another; what has its number, or another job's, is a worker of it.
        if all(
            found[above].rank != one.rank and jobs[above] == jobs[pid]
            for above in _list_above(pid, parents)
            if above in found
        )
    ]
    ranks = {one.rank: replace(one, pid=_find_python(one.pid, parents)) for one in tops}
    return tuple(ranks[rank] for rank in sorted(ranks))


def _list_alike(pid: int, parents: Mapping[int, int]) -> list[int]:
    """Return the processes of a rank's job: those of its variables; MPI's name no job, so there those of its launcher, while that lives."""
    env = _read_environ(pid) or {}
    if "RANK" not in env and any(name in env for name in _MPI):
        own = _to_rank(pid, env)
        above = ((one, _to_rank(one, _read_environ(one) or {})) for one in _list_above(pid, parents))
        launcher = next((one for one, rank in above if rank is None or own != replace(rank, pid=pid)), 1)
        if launcher > 1:
            return list_below(launcher, parents)
    job = _job_of(env)
    return [one for one in parents if (other := _read_environ(one)) is not None and _job_of(other) == job]


def _to_rank(pid: int, env: Mapping[str, str]) -> LiveRank | None:
    for rank, size in _NAMES:
        if env.get(rank, "").isdecimal() and env.get(size, "").isdecimal():
            return LiveRank(rank=int(env[rank]), pid=pid, world_size=int(env[size]), is_ours=_OURS in env)
    return None


def _find_python(pid: int, parents: Mapping[int, int]) -> int:
    """Return the rank's Python: the process itself, or the first one below it where a shell has started it."""
    for one in (pid, *list_below(pid, parents)):
        try:
            if "python" in Path(f"/proc/{one}/exe").readlink().name:
                return one
        except OSError:
            continue
    return pid


def _job_of(env: Mapping[str, str]) -> tuple[str | None, ...]:
    return tuple(env.get(name) for name in _JOB)


def _read_environ(pid: int) -> dict[str, str] | None:
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    pairs = (part.partition("=") for part in raw.decode("utf-8", "replace").split("\0"))
    return {name: value for name, _, value in pairs if name}


def _read_evidence(pid: int) -> Evidence | None:
    """Return what one of our ranks records, by its own descriptor of the memory file."""
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(link).startswith(FILES):  # noqa: PTH115 - readlink of pathlib would make it a path
                with link.open("rb") as file:
                    return Merger().read(file.read(SIZE_BYTES))
    except OSError:
        pass  # it has ended, or is another user's
    return None


def _list_parents() -> dict[int, int]:
    """Return the parent of each process of the host."""
    return {pid: _find_launcher(pid) or stat.parent for pid, stat in list_processes().items()}


def _find_launcher(pid: int) -> int:
    """Return the launcher of a supervisor that a resident server has forked, and that is no child of it; 0 for all others."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if words[0] == SUPERVISOR_NAME.encode() and words[1:2] and words[1].isdigit():
            return int(words[1])
    return 0


def _list_above(pid: int, parents: Mapping[int, int]) -> list[int]:
    above: list[int] = []
    while (pid := parents.get(pid, 0)) and pid not in above:
        above.append(pid)
    return above
