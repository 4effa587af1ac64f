"""What every kind of cluster can do with a job: the seam between the commands and the schedulers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rankwise.cluster.handles import JobRecord
    from rankwise.cluster.job import JobSpec
    from rankwise.cluster.job_fields import Word

#: ``waiting``: for nodes, or for its next start; ``stopped``: it has left by exit code 75, and nobody starts it again;
#: ``unknown``: the scheduler knows no such job any more.
Phase = Literal["waiting", "running", "succeeded", "failed", "stopped", "cancelled", "unknown"]
ENDED: frozenset[Phase] = frozenset({"succeeded", "failed", "stopped", "cancelled", "unknown"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A text that is submitted.

    Attributes:
        name: What it is called, as a file: ``job.sbatch``, ``trainjob.yaml``.
        text: All of it.
    """

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """What has become of a job.

    Attributes:
        phase: Where it is.
        exit_code: Of the launchers; None: it has none, or nobody knows it.
        reason: Why it waits or has ended, in the scheduler's own words: ``OUT_OF_MEMORY on node7``; empty if it says
            nothing.
        starts: How often it has been started.
    """

    phase: Phase
    exit_code: int | None = None
    reason: str = ""
    starts: int = 1

    @property
    def is_over(self) -> bool:
        """Whether it will not run any more."""
        return self.phase in ENDED


class Cluster(Protocol):
    """One kind of cluster: the modules that `submission.find_cluster` returns, with ``WORDS: Mapping[str, Word]`` and these functions."""

    @property
    def WORDS(self) -> Mapping[str, Word]:  # noqa: N802 - a constant of the module
        """Its own words: those of its table in job.toml, and flags."""

    def stays(self, spec: JobSpec) -> bool:
        """Tell whether no scheduler holds such a job: then who submits it stays with it, unless asked to go."""

    def render(self, spec: JobSpec, job_id: str) -> list[Document]:
        """Return exactly what would be submitted, without asking anybody.

        Args:
            spec: The job.
            job_id: Ours: lower-case letters, digits and dashes, unlike that of any other job.

        Raises:
            UsageError: The job can't be on this cluster.
        """

    def submit(self, spec: JobSpec, record: JobRecord) -> JobRecord:
        """Submit it.

        Args:
            spec: The job.
            record: With our id, and a folder for what is to be kept here.

        Returns:
            The record, with the scheduler's id and whatever the other functions need to find the job again.

        Raises:
            RankwiseError: It can't be, by the scheduler's own words; nothing is left behind.
        """

    def state(self, record: JobRecord) -> JobState:
        """Ask what has become of it."""

    def logs(self, record: JobRecord, *, follow: bool) -> Iterator[str]:
        """Give the lines of all nodes, without their ends; wait for more until the job is over, if ``follow``."""

    def cancel(self, record: JobRecord) -> None:
        """End it at once; nothing happens if it is over."""
