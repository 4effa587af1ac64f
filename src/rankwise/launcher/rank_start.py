"""The ranks of an attempt, and the store at which they meet, from their files to their processes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, final

from rankwise.base.os_calls import IS_LINUX, NOTES_FD, make_memory_file
from rankwise.base.roles import RETURNS
from rankwise.engine import STORE_PROCESS
from rankwise.evidence.reader.rank_channel import RankChannel
from rankwise.launcher.output import open_streams
from rankwise.launcher.rank_command import build_argv, build_rank_command, build_rank_env
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
        error_file = None if job.spec.logs.is_off else rank.streams.error_file
        env = build_rank_env(
            job.spec,
            self._part,
            local_rank=rank.local_rank,
            num_ranks=job.num_ranks,
            restart=restarts,
            error_file=error_file,
            num_threads=job.num_threads,
        )
        env[RETURNS] = str(rank.former_code) if self._returns else None
        argv = (
            *job.prefixes[rank.local_rank],
            *build_argv(job.spec.program, job.python, rank.local_rank),
        )
        command = build_rank_command(
            argv,
            env,
            rank.streams,
            notes_fd=rank.notes_fd,
            stacks_fd=rank.stacks_fd,
            evidence=rank.evidence,
        )
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
            argv=(self._job.python, "-u", str(STORE_PROCESS), str(number), str(part.master_port)),
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
