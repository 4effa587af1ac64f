"""The job on Slurm: an sbatch script as a person would write it; inside an allocation (`salloc`), a step of that one."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.base.environ import environ
from rankwise.base.errors import LaunchError, RankwiseError, UsageError
from rankwise.cluster import slurm_allocation, slurm_script, slurm_state, unscheduled
from rankwise.cluster.cluster import Document, JobState
from rankwise.cluster.following import PatientAsker, follow_files
from rankwise.cluster.job_fields import Word
from rankwise.cluster.launch_command import RANK_LINE
from rankwise.cluster.slurm_state import RUN_ENDS
from rankwise.cluster.tools import run_tool

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.cluster.handles import JobRecord
    from rankwise.cluster.job import JobSpec

WORDS: dict[str, Word] = {
    "partition": Word("Partition of the nodes; the cluster's default if not given."),
    "account": Word("Account that pays."),
    "qos": Word("Quality of service."),
    "constraint": Word("Features that the nodes must have, as in a100&ib.", metavar="FEATURES"),
    "array": Word("Indices of a job array, as in 0-9%2; the script finds its own in SLURM_ARRAY_TASK_ID.", metavar="INDICES"),
    "options": Word("One more option of sbatch, as in --exclusive.", "list", "OPTION"),
    "setup": Word("A line of shell that the script runs first, as in 'module load cuda'.", "list", "LINE"),
}  # fmt: skip

_FILE = "job.sbatch"
_LABEL = re.compile(r" *(\d+): (.*)")
#: Each look asks the controller of the whole cluster.
_LOOK_S = 2.0
#: Slurm keeps such jobs in its queue for ever, where it does not refuse them.
_NEVER = re.compile(
    r"Partition(Config|NodeLimit|TimeLimit)|BadConstraints|Invalid(Account|QOS)|(Account|QOS)NotAllowed|(Assoc|QOS)Max\w*Per(Job|Node)\w*|MaxMemPerLimit"
)


def stays(spec: JobSpec) -> bool:  # noqa: ARG001 - whatever the job
    """Tell whether the job is one of ours inside an allocation, which no queue holds."""
    return slurm_allocation.is_inside(environ())


def render(spec: JobSpec, job_id: str) -> list[Document]:
    """Return the script for sbatch; inside an allocation, the steps."""
    if stays(spec):
        return unscheduled.render_plan(slurm_allocation.make_plan(spec, job_id, environ()))
    return [Document(name=_FILE, text=slurm_script.build_script(spec))]


def submit(spec: JobSpec, record: JobRecord) -> JobRecord:
    """Give the script to sbatch; inside an allocation, run it there.

    Args:
        spec: The job.
        record: Ours of it.

    Raises:
        RankwiseError: Slurm says no, in its own words; nothing is left behind.
    """
    if stays(spec):
        return slurm_allocation.start(spec, record, environ())
    _check_image(spec)
    path = record.folder / _FILE
    path.write_text(slurm_script.build_script(spec), encoding="utf-8")
    output = run_tool(["sbatch", "--parsable", str(path)], doing="submit the job", hint=_hint(spec))
    native = output.strip().splitlines()[-1].partition(";")[0]
    record = replace(record, native_id=native, facts={"log": str(slurm_script.log_path(spec, native))})
    try:
        _refuse_hopeless(native, spec)
    except BaseException:  # Ctrl-C, too
        with suppress(RankwiseError):
            cancel(record)
        raise
    return record


def state(record: JobRecord) -> JobState:
    """Ask Slurm; its accounting, if the controller has forgotten the job."""
    return unscheduled.state(record) if not record.native_id else slurm_state.find_state(record)


def logs(record: JobRecord, *, follow: bool) -> Iterator[str]:
    """Give the lines of all nodes, which srun brings together in one file; those of an array are one after the other."""
    if not record.native_id:
        return unscheduled.logs(record, follow=follow)
    is_over = PatientAsker(lambda: state(record).is_over) if follow else None
    return name_nodes(follow_files(Path(record.facts["log"]), is_over, _LOOK_S))


def name_nodes(lines: Iterator[tuple[Path, str]]) -> Iterator[str]:
    """Replace srun's labels: ranks say themselves where they are, and lines of launchers get the host that ranks of the same label, in the same file, name."""
    hosts: dict[tuple[Path, str], str] = {}
    for path, line in lines:
        if RUN_ENDS.match(line):
            hosts = {key: host for key, host in hosts.items() if key[0] != path}
        found = _LABEL.fullmatch(line)
        label, text = found.groups() if found else ("", line)
        if label and RANK_LINE.match(text):
            hosts[path, label] = text[1:].partition(" ")[0]
        elif label:
            text = f"[{hosts.get((path, label), f'node {label}')}]: {text}"
        yield text


def cancel(record: JobRecord) -> None:
    """End it at once."""
    if not record.native_id:
        unscheduled.cancel(record)
    else:  # nothing happens if it is over
        run_tool(["scancel", record.native_id], doing=f"cancel job {record.native_id}")


def _hint(spec: JobSpec) -> str:
    partition = spec.own.text("partition")
    where = f"`sinfo -p {partition}`" if partition else "`sinfo`"
    return f"{where} shows partitions, their nodes, GPUs (-o '%P %D %G') and limits; `--dry-run` the script"


def _check_image(spec: JobSpec) -> None:
    if spec.image and not slurm_script.is_apptainer(spec.image):
        options = run_tool(["srun", "--help"], doing="ask srun for its options")
        if "--container-image" not in options:
            raise UsageError(
                f"image {spec.image}: this cluster's srun has no --container-image, which the plugin Pyxis brings",
                hint="name a file IMAGE.sif, which Apptainer runs, or leave the image out",
            )


def _refuse_hopeless(native: str, spec: JobSpec) -> None:
    """Take a job back that Slurm has taken, but will never start."""
    try:
        lines = run_tool(
            ["squeue", "--noheader", "--jobs", native, "--format", "%T|%r"], doing="look at the job"
        ).splitlines()
    except RankwiseError:
        return  # it has been taken: what it waits for, its state says later
    for line in lines:
        phase, _, reason = line.strip().partition("|")
        if phase == "PENDING" and _NEVER.search(reason):
            raise LaunchError(
                f"can't submit the job: Slurm would never start it: {reason}; it has been taken back", hint=_hint(spec)
            )
