"""Jobs on Ray: a driver is submitted by Ray's own Job SDK, and starts the launchers from inside the cluster."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shlex
import shutil
import tempfile
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.base.deadline import OverdueError, call_within
from rankwise.base.errors import LaunchError, UsageError
from rankwise.base.requeue import REQUEUE
from rankwise.cluster.cluster import Document, JobState
from rankwise.cluster.following import PatientAsker
from rankwise.cluster.job_fields import Word
from rankwise.cluster.launch_command import ShellText, join_words
from rankwise.cluster.ray_driver import AGAIN, OVER, to_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.cluster.cluster import Phase
    from rankwise.cluster.handles import JobRecord
    from rankwise.cluster.job import JobSpec

__all__ = ["WORDS", "cancel", "logs", "render", "state", "stays", "submit"]

WORDS: dict[str, Word] = {
    "address": Word("Address of the cluster's dashboard, as in http://head:8265; by default that of RAY_API_SERVER_ADDRESS, or of a cluster on this host.", metavar="URL"),
    "strategy": Word("How the nodes are spread over Ray's (default: STRICT_SPREAD, each on a host of its own).", choices=("STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK")),
    "wait_s": Word("Seconds to wait for the nodes (default: 300).", "number", "N"),
}  # fmt: skip
#: So long Ray may take to answer, and to take the files of a job; and so often it is asked for the state of one whose log is silent.
_ANSWER_S, _UPLOAD_S, _LOOK_S = 60.0, 3600.0, 15.0
_PHASES: dict[str, Phase] = {
    "PENDING": "waiting",
    "RUNNING": "running",
    "STOPPED": "cancelled",
    "SUCCEEDED": "succeeded",
    "FAILED": "failed",
}


def stays(spec: JobSpec) -> bool:  # noqa: ARG001 - whatever the job
    """Tell that Ray holds such a job."""
    return False


def render(spec: JobSpec, job_id: str) -> list[Document]:
    """Return the submission as Ray's own command; Ray uploads a whole folder, so that the named files are copied into one first."""
    entrypoint, address = _build_entrypoint(spec, job_id), spec.own.text("address")
    words = ["ray", "job", "submit", *(["--address", address] if address else []), "--submission-id", job_id]
    words += ["--runtime-env-json", json.dumps({"env_vars": dict(spec.env)})] if spec.env else []
    folder = ["--working-dir", ShellText("$files")] if spec.files else []
    lines = [join_words([*words, *folder, "--no-wait", "--", *entrypoint])]
    if spec.files:
        copy = ["tar", "-C", spec.workdir, "--exclude=__pycache__", "-c", "--", *spec.files]
        lines = ["files=$(mktemp -d)", f'{join_words(copy)} | tar -C "$files" -x', *lines, 'rm -r "$files"']
    return [Document(name="ray-job.sh", text="\n".join(lines) + "\n")]


def submit(spec: JobSpec, record: JobRecord) -> JobRecord:
    """Submit the driver.

    Raises:
        UsageError: Ray is not installed here, or the job can't be on Ray.
        LaunchError: No cluster answers, or it refuses the job.
    """
    entrypoint = shlex.join(_build_entrypoint(spec, record.id))
    address = spec.own.text("address")
    client = _connect(address)
    runtime_env: dict[str, Any] = {"env_vars": dict(spec.env)} if spec.env else {}
    with tempfile.TemporaryDirectory(dir=record.folder) as folder:
        if spec.files:
            runtime_env["working_dir"] = str(_copy_files(spec, Path(folder)))
        _ask(
            lambda: client.submit_job(entrypoint=entrypoint, submission_id=record.id, runtime_env=runtime_env),
            "submit the job",
            timeout_s=_UPLOAD_S,
        )
    return dataclasses.replace(record, native_id=record.id, facts={"address": address or client.get_address()})


def state(record: JobRecord) -> JobState:
    """Ask Ray what has become of the driver; the driver's last line says why it has ended."""
    client = _connect(record.facts["address"])
    info = _ask(lambda: client.get_job_info(record.id), "ask for the job")
    phase: Phase = _PHASES.get(str(info.status.value), "unknown")
    if phase in {"waiting", "cancelled"}:
        return JobState(phase=phase, reason="" if phase == "cancelled" else str(info.message or ""), starts=0)
    if phase == "running":
        return JobState(phase=phase)  # the log, which says more, may be large
    lines = str(_ask(lambda: client.get_job_logs(record.id), "read the logs")).splitlines()
    starts = 1 + sum(line.startswith(AGAIN) for line in lines)
    code = info.driver_exit_code if phase == "failed" else 0 if phase == "succeeded" else None
    outcome = next((line.removeprefix(OVER) for line in reversed(lines) if line.startswith(OVER)), "")
    reason = outcome or (str(info.message or "").partition(", last available logs")[0] if phase == "failed" else "")
    return JobState(phase="stopped" if code == REQUEUE else phase, exit_code=code, reason=reason, starts=starts)


def logs(record: JobRecord, *, follow: bool) -> Iterator[str]:
    """Give the lines of all nodes, which the driver shows."""
    client = _connect(record.facts["address"])
    if follow:
        return _follow(client, record)
    return iter(str(_ask(lambda: client.get_job_logs(record.id), "read the logs")).splitlines())


def cancel(record: JobRecord) -> None:
    """Stop the driver; the launchers see that, and give the ranks their grace."""
    client = _connect(record.facts["address"])
    _ask(lambda: client.stop_job(record.id), "cancel the job")


def _follow(client: Any, record: JobRecord) -> Iterator[str]:
    loop, look = asyncio.new_event_loop(), PatientAsker(lambda: state(record).is_over)
    chunks, rest, was_over = client.tail_job_logs(record.id), "", False
    coming: asyncio.Future[Any] | None = None
    try:
        while True:
            coming = asyncio.ensure_future(anext(chunks), loop=loop)
            while not loop.run_until_complete(asyncio.wait({coming}, timeout=_LOOK_S))[0]:
                if was_over:
                    coming.cancel()
                    raise LaunchError(
                        f"job {record.id} is over, and Ray, which follows its log, has sent nothing for {_LOOK_S:g} s and does not end",
                        hint=f"rankwise logs {record.id}",
                    )
                was_over = bool(look())
            try:
                chunk = _ask(coming.result, "follow the log")
            except StopAsyncIteration:
                break
            *lines, rest = (rest + chunk).split("\n")
            yield from lines
    finally:
        if coming is not None and not coming.done():  # the user has interrupted
            coming.cancel()
            loop.run_until_complete(asyncio.wait({coming}, timeout=_LOOK_S))
        with suppress(RuntimeError):  # it waits once more while it closes, which asyncio does not like
            loop.run_until_complete(chunks.aclose())
        loop.close()
    if rest:
        yield rest


def _build_entrypoint(spec: JobSpec, job_id: str) -> list[str]:
    if spec.image:
        raise UsageError(
            f"image {spec.image!r}: the containers of Ray's nodes are those that it was started in",
            hint="drop image, and install what the script needs there",
        )
    return [spec.python or "python3", "-m", "rankwise.cluster.ray_driver", to_text(spec, job_id)]


def _copy_files(spec: JobSpec, folder: Path) -> Path:
    """Copy the files into a folder of their own: Ray uploads all that is in one."""
    for name in spec.files:
        source, target = Path(spec.workdir) / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target)
    return folder


def _connect(address: str) -> Any:
    try:
        sdk = import_module("ray.job_submission")
    except ImportError as error:
        raise UsageError(
            f"Ray's Job SDK is not installed here: {error}", hint="pip install 'ray[default]', of the cluster's version"
        ) from None
    return _ask(lambda: sdk.JobSubmissionClient(address or None), "reach the cluster")


def _ask(call: Any, doing: str, *, timeout_s: float = _ANSWER_S) -> Any:
    """Call Ray, whose SDK waits for a head that is frozen without a bound; its errors are passed on in its own words."""
    try:
        return call_within(timeout_s, call)
    except (RuntimeError, ConnectionError, ValueError, OverdueError) as error:
        raise LaunchError(
            f"can't {doing}: Ray: {error}",
            hint="`ray status` on the head node tells whether the cluster is there; --address names it",
        ) from error
