"""Submit a job and hold on to it."""

from __future__ import annotations

import os
import shutil
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast, final

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.errors import LaunchError, RankwiseError, UsageError
from rankwise.cluster import handles, job
from rankwise.cluster.following import PatientAsker
from rankwise.cluster.handles import JobRecord
from rankwise.cluster.launch_command import RANK_LINE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rankwise.base.clock import Clock
    from rankwise.cluster import kubernetes, local, ray_jobs, slurm, ssh
    from rankwise.cluster.cluster import Cluster, Document, JobState
    from rankwise.cluster.job import JobSpec

#: How often a scheduler is asked: less often the longer it takes.
_LOOK_S, _MOST_LOOK_S = 1.0, 15.0
#: The module of each kind; the name of a kind is the word in job.toml.
_MODULES = {"local": "local", "ssh": "ssh", "slurm": "slurm", "kubernetes": "kubernetes", "ray": "ray_jobs"}
if TYPE_CHECKING:
    # So that the type checker compares them with `Cluster`.
    _ALL: tuple[Cluster, ...] = (local, ssh, slurm, kubernetes, ray_jobs)


def find_cluster(on: str) -> Cluster:
    """Return the cluster of a name in `job.CLUSTERS`, imported when it is used; UsageError: there is none."""
    if on not in _MODULES:
        raise UsageError(f"there is no cluster {on!r}")
    return cast("Cluster", import_module(f"rankwise.cluster.{_MODULES[on]}"))


@final
class JobHandle:
    """A job that was submitted.

    Args:
        record: What is kept of it.
        clock: Where the time comes from.
    """

    def __init__(self, record: JobRecord, clock: Clock = SYSTEM_CLOCK) -> None:
        self.record = record
        self._cluster, self._clock = find_cluster(record.on), clock

    def __repr__(self) -> str:
        return f"JobHandle({self.id!r}, on={self.record.on!r})"

    @property
    def id(self) -> str:
        """Its id, for `rankwise logs` and `rankwise cancel` too."""
        return self.record.id

    def state(self) -> JobState:
        """Return what has become of it, as its scheduler says now."""
        return self._cluster.state(self.record)

    def wait(self, timeout_s: float | None = None) -> JobState:
        """Wait for its end.

        Args:
            timeout_s: Seconds to wait at most; None: for ever.

        Returns:
            Its last state.

        Raises:
            LaunchError: It is not over by then.
        """
        begin_s = self._clock.monotonic()
        look_s, ask = _LOOK_S, PatientAsker(self.state, self._clock)
        while True:
            state = ask()
            if state is not None and state.is_over:
                return state
            if timeout_s is not None and self._clock.monotonic() - begin_s > timeout_s:
                raise LaunchError(f"job {self.id} is not over after {timeout_s:g} s", hint=f"rankwise logs {self.id}")
            self._clock.sleep(look_s)
            look_s = min(look_s * 1.2, _MOST_LOOK_S)

    def logs(self, *, rank: int | None = None, follow: bool = False) -> Iterator[str]:
        """Give what all its nodes have printed.

        Args:
            rank: Only those of this rank; None: of all of them, and of the launchers.
            follow: Wait for more until the job is over.

        Yields:
            Lines without their ends; those of ranks begin with host and rank.
        """
        return select_rank(self._cluster.logs(self.record, follow=follow), rank)

    def cancel(self) -> None:
        """End it at once; nothing happens if it is over."""
        self._cluster.cancel(self.record)


def read_job(path: Path | None, flags: Mapping[str, object]) -> JobSpec:
    """Read a job from its file and from flags, which win.

    Raises:
        UsageError: A word is unknown, or a value can't be.
    """
    on = job.find_on({} if path is None else job.load_file(path), flags)
    return job.read(path, flags, find_cluster(on).WORDS, Path.cwd())


def render(spec: JobSpec) -> list[Document]:
    """Return exactly what would be submitted, but for the end of the id, which is another each time."""
    return find_cluster(spec.on).render(spec, handles.make_id(spec.name))


def submit_spec(spec: JobSpec, *, attach: bool = False) -> JobHandle:
    """Submit a job and keep its record; if it is refused, nothing is left behind.

    Args:
        spec: The job.
        attach: Whether it is to end with this process, where no scheduler holds it.

    Raises:
        RankwiseError: It is refused.
    """
    job_id = handles.make_id(spec.name)
    folder = handles.open_folder(job_id)
    record = JobRecord(
        id=job_id,
        on=spec.on,
        name=spec.name,
        folder=folder,
        submitted_s=SYSTEM_CLOCK.time(),
        client=os.getpid() if attach else 0,
    )
    cluster, is_submitted = find_cluster(spec.on), False
    try:
        handles.keep(record)  # where that is impossible, nothing is submitted that nobody would find again
        record = cluster.submit(spec, record)
        is_submitted = True
        if record.native_id:
            handles.keep(record)
    except BaseException as error:
        if is_submitted:
            try:
                cluster.cancel(record)
            except RankwiseError as failed:
                raise LaunchError(
                    f"job {record.native_id or record.id} is submitted, and can't be taken back: {failed.message}"
                ) from error
        if not is_submitted or record.native_id:  # else it is told to end, and has its files there
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise LaunchError(
                f"the job can't be submitted: {error.filename or folder}: {error.strerror}",
                hint="free some space, or set XDG_STATE_HOME to another folder",
            ) from error
        raise
    return JobHandle(record)


def select_rank(lines: Iterator[str], rank: int | None) -> Iterator[str]:
    """Give the lines of one rank, by the prefix that `launch_command.PREFIX` gives them on every cluster."""
    for line in lines:
        if rank is None or ((found := RANK_LINE.match(line)) and int(found[1]) == rank):
            yield line
