"""`rankwise.submit`: a job of a cluster, whose launch is checked here, before anything is sent away."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.cluster import job, submission
from rankwise.launcher.command import parse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.cluster.job import JobSpec
    from rankwise.cluster.submission import JobHandle


def check_launch(spec: JobSpec) -> None:
    """Have the launcher read its flags here: on the nodes, each of them would refuse a slip after the wait for it.

    Raises:
        UsageError: A flag is wrong, or says what the job itself does.
    """
    num_args = len(parse(spec.command, {}).program.args)
    job.refuse_rendezvous(spec.command[: len(spec.command) - num_args - 1])


def submit(
    command: str | Sequence[str] | None = None, *, file: str | Path | None = None, attach: bool = False, **words: object
) -> JobHandle:
    """Submit a training script to a cluster, as `rankwise submit` does.

    Args:
        command: The script and its arguments, as behind `rankwise run`; None: the file says it.
        file: job.toml.
        attach: Whether the job is to end with this process where no scheduler holds it: on this machine and over ssh.
        words: The words of a job, and those of its cluster; they win over the file: ``on="slurm", nodes=4,
            partition="gpu"``.

    Returns:
        A handle: ``wait()``, ``state()``, ``logs()``, ``cancel()``.

    Raises:
        UsageError: A word is wrong, or this machine has not what the cluster needs.
        LaunchError: The scheduler refuses the job, by its own words; nothing is left behind.
    """
    spec = submission.read_job(None if file is None else Path(file), {"command": command, **words})
    check_launch(spec)
    return submission.submit_spec(spec, attach=attach)
