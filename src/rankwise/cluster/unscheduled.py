"""What the clusters without a scheduler share: their jobs are held by a process of ours, and spoken to by files in the job's folder."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.errors import LaunchError, UsageError
from rankwise.base.files import write_atomic
from rankwise.base.os_calls import try_lock_file
from rankwise.cluster.cluster import Document, JobState
from rankwise.cluster.following import follow_files
from rankwise.cluster.job_process import CANCEL, LOCK, LOG, PLAN, STATE
from rankwise.cluster.launch_command import build_launch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from rankwise.cluster.handles import JobRecord
    from rankwise.cluster.job import JobSpec
    from rankwise.cluster.job_process import Plan
    from rankwise.cluster.launch_command import RendezvousPlace

_LOOK_S, _START_S, _LEAVE_S = 0.1, 20.0, 10.0


def make_plan(spec: JobSpec, ways: Mapping[str, Sequence[str]], place: RendezvousPlace, client: int = 0) -> Plan:
    """Return what the job's process will do: on each node a launcher, under its guard, in the workdir.

    Args:
        spec: The job.
        ways: For each node, by name, the words that have a shell there read a line.
        place: Where they meet, if they are several.
        client: The process that the job is to end with, or 0.
    """
    guard = [spec.python or sys.executable, "-m", "rankwise.cluster.node_process", str(spec.grace_s)]
    launch = build_launch(spec, place if len(ways) > 1 else None, python=sys.executable)
    line = f"cd {shlex.quote(spec.workdir)} && exec {shlex.join([*guard, *launch])}"
    return {
        "nodes": [(name, [*words, line]) for name, words in ways.items()], "env": spec.variables, "min_nodes": spec.min_nodes, "grace_s": spec.grace_s,
        "time_s": spec.time_s, "requeue": spec.requeue, "client": client,
    }  # fmt: skip


def render_plan(plan: Plan, before: Sequence[Sequence[str]] = ()) -> list[Document]:
    """Return a plan as the commands that it starts.

    Args:
        plan: What the job's process will do.
        before: Commands that are run first.
    """
    lines = [shlex.join(words) for words in before]
    if plan["env"]:
        # A command line can be read by all users of a host.
        lines.append(f"# through standard input: {json.dumps(plan['env'])}")
    lines += [shlex.join(argv) for _, argv in plan["nodes"]]
    return [Document(name="job.sh", text="\n".join(lines) + "\n")]


def pick_port(job_id: str) -> int:
    """Return a port below those that the kernel gives to connections; other jobs have others, most likely."""
    return 20000 + zlib.crc32(job_id.encode()) % 10000


def refuse_unscheduled(spec: JobSpec) -> None:
    """Refuse what only a scheduler can do.

    Raises:
        UsageError: The job asks for it.
    """
    if spec.image:
        raise UsageError(
            f"image {spec.image!r}: nothing on {spec.on} runs containers",
            hint="name the Python of an environment by python, or use slurm or kubernetes",
        )


def start(plan: Plan, record: JobRecord) -> JobRecord:
    """Start the job's process, and wait until it holds the job.

    Raises:
        LaunchError: It has ended at once.
    """
    write_atomic(record.folder / PLAN, json.dumps(plan), mode=0o600)
    with (record.folder / "errors.txt").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "rankwise.cluster.job_process", str(record.folder)],
            stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, start_new_session=True,
        )  # fmt: skip
    try:
        _wait_started(process, record)
    except BaseException:  # Ctrl-C, too
        with suppress(OSError, subprocess.TimeoutExpired):
            write_atomic(record.folder / CANCEL, "kill", mode=0o600)
            process.wait(_LEAVE_S)
        process.kill()  # the guards of the nodes end what is left
        process.wait()
        raise
    _CHILDREN.append(process)
    return record


def _wait_started(process: subprocess.Popen[bytes], record: JobRecord) -> None:
    end_s = SYSTEM_CLOCK.monotonic() + _START_S
    while not (record.folder / STATE).exists():
        if process.poll() is not None or SYSTEM_CLOCK.monotonic() > end_s:
            errors = (record.folder / "errors.txt").read_text(encoding="utf-8", errors="replace")
            raise LaunchError(f"the job could not be started: {errors.strip()[-2000:] or 'no answer'}")
        SYSTEM_CLOCK.sleep(_LOOK_S / 5)


#: Nobody waits for them, but Python warns of a child that is forgotten.
_CHILDREN: list[subprocess.Popen[bytes]] = []


def stays(spec: JobSpec) -> bool:  # noqa: ARG001 - whatever the job
    """Tell that no scheduler holds such a job."""
    return True


def state(record: JobRecord) -> JobState:
    """Return what the job's process has written last; a job whose process was killed has failed."""
    for child in _CHILDREN:
        child.poll()
    is_held = _is_held(record.folder)  # asked before: it writes, and goes
    try:
        found = JobState(**json.loads((record.folder / STATE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return JobState(phase="running" if is_held else "unknown", reason=f"{record.folder / STATE} can't be read")
    if found.is_over or is_held:
        return found
    return JobState(
        phase="failed", reason="the process that held it was killed, and the ranks with it", starts=found.starts
    )


def logs(record: JobRecord, *, follow: bool) -> Iterator[str]:
    """Give the lines of the log; with ``follow`` until the job is over."""
    found = follow_files(record.folder / LOG, (lambda: state(record).is_over) if follow else None, _LOOK_S)
    return (line for _, line in found)


def cancel(record: JobRecord) -> None:
    """Have the ranks stop in time; if they have been told so before, kill them."""
    path = record.folder / CANCEL
    if not state(record).is_over:
        try:
            write_atomic(path, "kill" if path.exists() else "notice", mode=0o600)
        except OSError as error:
            raise LaunchError(
                f"job {record.id} can't be told to stop: {path}: {error.strerror}",
                hint="free some space there",
            ) from error


def _is_held(folder: Path) -> bool:
    try:
        with (folder / LOCK).open("r+") as lock:
            return try_lock_file(lock.fileno()) is not True
    except OSError:
        return False
