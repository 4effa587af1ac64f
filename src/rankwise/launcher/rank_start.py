"""The ranks of an attempt, and the store at which they meet, from their files to their processes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, final

from rankwise.base.environ import JOB_SECRET, RankEnv, environ
from rankwise.base.os_calls import ASK_FD, EVIDENCE_FD, IS_LINUX, NOTES_FD, STACKS_FD, make_memory_file
from rankwise.base.roles import RETURNS, Role
from rankwise.engine import STORE_PROCESS
from rankwise.evidence.reader.rank_channel import RankChannel
from rankwise.launcher.output import open_streams
from rankwise.launcher.rank_command import build_argv, build_shared_env, hook_env
from rankwise.launcher.rank_end import Rank
from rankwise.launcher.spec import Std
from rankwise.launcher.tee import make_prefix
from rankwise.launcher.workers import Command

if TYPE_CHECKING:
    from pathlib import Path

    from rankwise.launcher.job import Job
    from rankwise.launcher.output import Pump
    from rankwise.launcher.rendezvous.assignment import Assignment
    from rankwise.launcher.tee import Tee

#: Of all jobs of this launcher on one node; nodes of one job get theirs when they meet.
_SECRET = os.urandom(16).hex()


@final
class RankStarter:
    """Opens what ranks write to, and starts them.

    Args:
        job: Whose attempt it is.
        part: Which ranks are ours this time.
        folder: Of the attempt's logs.
        suffix: Of all tags: the last attempt's may take a while to go, and are not mistaken for this one's.
        records: Whether ranks record what they do.
        returns: Whether one that fails is started again alone, and learns how it has ended before.
        pump: Takes standard errors.
        tee: Shows log files on the console.
    """

    def __init__(
        self,
        job: Job,
        part: Assignment,
        folder: Path,
        *,
        suffix: str,
        records: bool,
        returns: bool,
        pump: Pump,
        tee: Tee,
    ) -> None:
        self._job, self._part, self._folder, self._suffix = job, part, folder, suffix
        self._records, self._returns = records, returns
        self._pump, self._tee, self._workers = pump, tee, job.workers

    def open(self, local_rank: int) -> Rank:
        """Open the streams and the evidence of a rank."""
        folder = self._folder / str(local_rank)
        folder.mkdir(parents=True, exist_ok=True)
        logs, rank = self._job.spec.logs, self._part.base_rank + local_rank
        streams = open_streams(logs, local_rank, folder)
        self._pump.add(streams)
        tee = logs.tee.get(local_rank, logs.tee.get(None, Std.NONE))
        role = self._job.spec.find_role(rank)
        name, number = (role.name, role.index) if role else (self._job.spec.role, local_rank)
        prefix = make_prefix(logs.prefix, role_name=name, rank=rank, local_rank=number)
        kinds = ((1, Std.OUT, "stdout.log", logs.out_filters), (2, Std.ERR, "stderr.log", logs.err_filters))
        for fd, kind, name, filters in kinds:
            if streams.shown and kind in tee:
                copy_to = self._folder / f"filtered_{name}" if filters else None
                self._tee.add(folder / name, to_fd=fd, prefix=prefix, filters=filters, copy_to=copy_to)
        notes, stacks, place = self.open_evidence(folder)
        # One that is started again gets another place, while the pump may be at work with the first.
        if place is not None and streams.may_overtake and not self._returns:
            streams.tell_passed = place.tell_passed
        return Rank(
            rank=rank,
            local_rank=local_rank,
            tag=f"{local_rank}.{self._suffix}",
            streams=streams,
            notes_fd=notes,
            stacks_fd=stacks,
            evidence=place,
        )

    def open_evidence(self, folder: Path) -> tuple[int, int, RankChannel | None]:
        """Open what a rank writes for us."""
        notes, stacks = (
            make_memory_file(path.stem) if IS_LINUX else os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            for path in (folder / "notes.jsonl", folder / "stacks.txt")
        )
        place = RankChannel.open() if self._records else None
        return notes, stacks, place

    def start(self, rank: Rank, *, restarts: int) -> None:
        """Start a rank.

        Args:
            rank: Which; opened.
            restarts: How often all ranks were started again after a failure.
        """
        job = self._job
        env = _build_env(job, self._part, rank, restarts=restarts)
        env[RETURNS] = str(rank.former_code) if self._returns else None
        argv = (
            *job.host.prefixes[rank.local_rank],
            *build_argv(job.spec.program, job.host.interpreter.path, rank.local_rank),
        )
        command = _build_command(argv, env, rank)
        rank.started_s = job.clock.monotonic()
        self._workers.start(rank.tag, command)
        if rank.evidence is not None:
            rank.evidence.close_rank_end()

    def start_store(self, tag: str) -> None:
        """Start the store, if it is ours to serve."""
        part, listener = self._part, self._part.listener
        if listener is None:
            return
        nowhere = os.open(os.devnull, os.O_RDWR)
        log = os.open(self._folder / "store.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        number = NOTES_FD if IS_LINUX else listener.fileno()
        command = Command(
            argv=(self._job.host.interpreter.path, "-u", str(STORE_PROCESS), str(number), str(part.master_port)),
            env={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            stdio=(nowhere, nowhere, log),
            extra_fds=((number, listener.fileno()),),
            deaf=True,
            forks="main",
        )
        self._workers.start(tag, command)
        for fd in (nowhere, log):
            os.close(fd)
        listener.close()


def _build_env(job: Job, part: Assignment, rank: Rank, *, restarts: int) -> dict[str, str | None]:
    """Return what a rank's environment has beyond ours; ``restarts`` counts those of all ranks after a failure."""
    spec, number = job.spec, rank.rank
    role = spec.find_role(number) or Role(spec.role, part.base_role_rank + rank.local_rank, part.role_world_size)
    described = RankEnv(
        rank=number,
        local_rank=rank.local_rank,
        world_size=part.world_size,
        local_world_size=job.num_ranks,
        group_rank=part.node_rank,
        group_world_size=part.num_nodes,
        role_name=role.name,
        role_rank=role.index,
        role_world_size=role.size,
        master_addr=part.master_addr,
        master_port=part.master_port,
        restart_count=restarts,
        max_restarts=spec.max_restarts,
        run_id=part.run_id,
        use_agent_store=not part.rank0_serves,
        error_file="" if spec.logs.is_off else str(rank.streams.error_file),
        signals_to_handle=",".join(spec.signals),
        local_rank_shown=0 if spec.virtual_local_rank else None,
    )
    env = {**build_shared_env(job.host.num_threads), **dict(spec.variables), **described.to_env()}
    # To a job without roles nothing is added that a script could see.
    if spec.role_counts and not environ().get(JOB_SECRET):
        env.setdefault(JOB_SECRET, part.secret or _SECRET)
    if spec.virtual_local_rank:
        visible = environ().get("CUDA_VISIBLE_DEVICES")
        env["CUDA_VISIBLE_DEVICES"] = str(rank.local_rank) if visible is None else visible.split(",")[rank.local_rank]
    return env


def _build_command(argv: tuple[str, ...], env: dict[str, str | None], rank: Rank) -> Command:
    """Put a rank's command together."""
    streams = rank.streams
    if not IS_LINUX:
        # Without a supervisor nobody moves descriptors: the recorder opens files by their names.
        notes, stacks = str(streams.folder / "notes.jsonl"), str(streams.folder / "stacks.txt")
        return Command(argv=argv, env={**env, **hook_env(notes, stacks)}, stdio=streams.stdio)
    fds: tuple[tuple[int, int], ...] = ((NOTES_FD, rank.notes_fd), (STACKS_FD, rank.stacks_fd))
    evidence: dict[str, object] | None = None
    if rank.evidence is not None:
        fds += tuple(zip((EVIDENCE_FD, ASK_FD), rank.evidence.rank_fds, strict=True))
        evidence = {"file": EVIDENCE_FD, "asks": ASK_FD, "identities": _identify(rank.evidence.rank_fds)}
        if streams.tell_passed is not None:
            evidence["passed_at"] = rank.evidence.passed_at
    identities = _identify((rank.notes_fd, rank.stacks_fd, streams.stdio[2]))
    hook = hook_env(NOTES_FD, STACKS_FD, identities, evidence, streams.end_mark)
    return Command(argv=argv, env={**env, **hook}, stdio=streams.stdio, extra_fds=fds, forks="script")


def _identify(fds: tuple[int, ...]) -> tuple[int, ...]:
    """Return device and inode of each, by which a rank knows that a number is still our file."""
    files = [os.fstat(fd) for fd in fds]
    return tuple(number for file in files for number in (file.st_dev, file.st_ino))
