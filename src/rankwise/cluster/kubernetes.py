"""Jobs on Kubernetes, by kubectl: its contexts, its credentials, and its words where something is refused."""

from __future__ import annotations

import dataclasses
import json
import queue
import re
import shlex
import subprocess
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, final

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.errors import LaunchError, RankwiseError
from rankwise.cluster.cluster import Document, JobState
from rankwise.cluster.following import PatientAsker
from rankwise.cluster.kubernetes_causes import find_state, read_index
from rankwise.cluster.kubernetes_manifests import CONTAINER, WORDS, build_manifests
from rankwise.cluster.launch_command import RANK_LINE
from rankwise.cluster.tools import run_tool
from rankwise.cluster.yaml_text import to_yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rankwise.cluster.handles import JobRecord
    from rankwise.cluster.job import JobSpec

__all__ = ["WORDS", "cancel", "logs", "render", "state", "stays", "submit"]

_RESOURCES = {"job": "jobs.batch", "jobset": "jobsets.jobset.x-k8s.io", "trainjob": "trainjobs.trainer.kubeflow.org"}
_MISSING_KIND = {
    "JobSet": "JobSet's controller is not installed there",
    "TrainJob": "Kubeflow's Trainer 2 is not installed there",
}
#: What is left here of a job that was cancelled: the API keeps nothing.
_CANCELLED = "cancelled"
_LOOK_S = 2.0
#: How long the logs of all pods may take, one after the other.
_LOGS_S = 600.0
#: So long a program that follows a pod may give no line once the job is over; and so long its thread may take to end.
_SILENT_S, _END_S = 60.0, 5.0
#: A line of `kubectl logs --prefix --timestamps`: pod, time, and what the container has written.
_POD_LINE = re.compile(r"\[pod/([^/]+)/[^\]]+\] (\S+) ?(.*)")


def stays(spec: JobSpec) -> bool:  # noqa: ARG001 - whatever the job
    """Tell that Kubernetes holds such a job."""
    return False


def render(spec: JobSpec, job_id: str) -> list[Document]:
    """Return what `kubectl create` is given, one YAML document for each object; all of them together are one file."""
    return [
        Document(name=f"{one['kind'].lower()}.yaml", text=f"---\n{to_yaml(one)}")
        for one in build_manifests(spec, job_id)
    ]


def submit(spec: JobSpec, record: JobRecord) -> JobRecord:
    """Create the objects; the job then owns the others, so that they are deleted with it.

    Raises:
        UsageError: kubectl is not here, or the job can't be on Kubernetes.
        LaunchError: The API refuses it; what had been created is deleted again.
    """
    manifests = build_manifests(spec, record.id)
    kind, name = spec.own.text("kind", "job"), f"{_RESOURCES[spec.own.text('kind', 'job')]}/{record.id}"
    place = {"context": spec.own.text("context"), "namespace": spec.own.text("namespace")}
    created: list[str] = []
    made: dict[str, Any] = {}
    try:
        for manifest in manifests:
            text = _kubectl(
                place,
                "create",
                "-f",
                "-",
                "-o",
                "json",
                doing="submit the job",
                stdin=to_yaml(manifest),
                hint=_find_hint(manifest),
            )
            made = json.loads(text)
            created.append(
                f"{made['kind']}.{made['apiVersion'].partition('/')[0]}/{record.id}"
                if "/" in made["apiVersion"]
                else f"{made['kind']}/{record.id}"
            )
            # Later commands may run under another context, whose namespace is another one.
            place["namespace"] = made["metadata"]["namespace"]
        owner = {
            "apiVersion": made["apiVersion"],
            "kind": made["kind"],
            "name": record.id,
            "uid": made["metadata"]["uid"],
        }
        for other in created[:-1]:
            patch = json.dumps({"metadata": {"ownerReferences": [owner]}})
            _kubectl(place, "patch", other, "--type=merge", "-p", patch, doing="let the job own what belongs to it")
        place["context"] = place["context"] or _find_context()
    except BaseException as error:
        _delete_again(place, created, error)
        raise
    return dataclasses.replace(record, native_id=name, facts={**place, "kind": kind})


def _delete_again(place: Mapping[str, str], created: Sequence[str], cause: BaseException) -> None:
    """Delete what had been created; if that fails, too, it is said beside the cause, not in its place."""
    words = ("delete", *reversed(created), "--wait=false", "--ignore-not-found")
    try:
        if created:
            _kubectl(place, *words, doing="delete what had been created")
    except RankwiseError as error:
        if isinstance(cause, RankwiseError):
            cause.message += f"\n{error.message}"
            cause.hint = f"what is left is deleted by: {shlex.join(_argv(place, *words))}"


def state(record: JobRecord) -> JobState:
    """Ask the API for the job, its pods and, if nothing runs, for warnings."""
    text = _kubectl(record.facts, "get", record.native_id, "--ignore-not-found", "-o", "json", doing="ask for the job")
    if not text.strip():
        return JobState(phase="cancelled") if (record.folder / _CANCELLED).exists() else find_state(None, [], [])
    job, pods = json.loads(text), _list_pods(record)
    events: list[dict[str, Any]] = []
    if not any(pod.get("status", {}).get("phase") in {"Running", "Succeeded"} for pod in pods):
        events = [
            one
            for one in _list(record, "events", "--field-selector=type=Warning")
            if one["involvedObject"].get("name", "").startswith(record.id)
        ]
    return find_state(job, pods, events)


def cancel(record: JobRecord) -> None:
    """Delete the job, and with it all that it owns; its pods get their SIGTERM and their grace."""
    words = ("delete", record.native_id, "--wait=false", "--ignore-not-found")
    _kubectl(record.facts, *words, doing="cancel the job")
    with suppress(OSError):  # where nothing can be written, the job is unknown from now on
        (record.folder / _CANCELLED).touch()


def logs(record: JobRecord, *, follow: bool) -> Iterator[str]:
    """Give the lines of all pods: by their time or, while the job runs, as they come."""
    if follow:
        return _follow(record)
    pods = {pod["metadata"]["name"]: pod for pod in _list_pods(record) if _has_begun(pod)}
    # One program for all pods; of those that have not begun, it would say that they have no log.
    words = ("logs", "-l", _select(record), "-c", CONTAINER, "--tail=-1", "--prefix", "--timestamps", "--ignore-errors")
    text = _kubectl(record.facts, *words, doing="read the logs", timeout_s=_LOGS_S) if pods else ""
    lines, errors = list[tuple[str, str]](), list[str]()
    name = time = ""
    for line in text.splitlines():
        if found := _POD_LINE.fullmatch(line):
            name, time = found[1], found[2]
        elif line.startswith("error: "):
            errors += [line] if any(one in line for one in pods) else []
            continue
        # What has no prefix follows a carriage return, as in a progress bar.
        if name in pods:
            lines.append((time, _mark(found[3] if found else line, pods[name])))
    return iter([*(line for _, line in sorted(lines, key=lambda one: one[0])), *errors])


def _follow(record: JobRecord) -> Iterator[str]:
    """Give lines as they come, from each pod from its first line on; a job that starts again has new pods.

    Raises:
        LaunchError: The API does not answer for minutes; or the job is over, and the log of a pod does not end.
    """
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    followed: dict[str, _PodLog] = {}
    # The state first: of what ends later, the next round sees the pods.
    look = PatientAsker(lambda: (state(record).is_over, _list_pods(record)))
    heard_s = SYSTEM_CLOCK.monotonic()
    try:
        while True:
            is_over, pods = look() or (False, [])
            for pod in pods:
                if pod["metadata"]["uid"] not in followed and _has_begun(pod):
                    followed[pod["metadata"]["uid"]] = _PodLog(record, pod, lines)
            end_s = SYSTEM_CLOCK.monotonic() + _LOOK_S
            with suppress(queue.Empty):
                while (left_s := end_s - SYSTEM_CLOCK.monotonic()) > 0:
                    yield lines.get(timeout=left_s)
                    heard_s = SYSTEM_CLOCK.monotonic()
            late = [one for one in followed.values() if one.reader.is_alive()]
            if not is_over:
                heard_s = SYSTEM_CLOCK.monotonic()
            elif lines.empty() and not late:
                return
            elif late and SYSTEM_CLOCK.monotonic() - heard_s > _SILENT_S:
                names = ", ".join(one.reader.name for one in late)
                raise LaunchError(
                    f"the job is over, and kubectl, which follows the log of {names}, has printed nothing for {_SILENT_S:g} s and does not end",
                    hint=shlex.join(late[0].argv[:-1]),
                )
    finally:
        for one in followed.values():
            one.close()


@final
class _PodLog:
    """A program that follows the log of a pod, and a thread that takes its lines."""

    def __init__(self, record: JobRecord, pod: Mapping[str, Any], lines: queue.SimpleQueue[str]) -> None:
        name, self._pod, self._lines = str(pod["metadata"]["name"]), pod, lines
        self.argv = [*_argv(record.facts, "logs", name, "-c", CONTAINER), "--follow"]
        self._program = subprocess.Popen(
            self.argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self.reader = threading.Thread(target=self._read, name=name, daemon=True)
        self.reader.start()

    def close(self) -> None:
        """End the program, if it still runs."""
        self._program.kill()
        with suppress(subprocess.TimeoutExpired):
            self._program.wait(_END_S)
        self.reader.join(_END_S)

    def _read(self) -> None:
        assert self._program.stdout is not None  # noqa: S101 - it is a pipe
        with self._program.stdout as stream:
            for line in stream:
                self._lines.put(_mark(line.rstrip("\n"), self._pod))


def _mark(line: str, pod: Mapping[str, Any]) -> str:
    """Return a line that says where it comes from: those of ranks do so already."""
    host = pod.get("spec", {}).get("hostname") or pod["metadata"]["name"]
    return line if RANK_LINE.match(line) else f"[{host}]: {line}"


def _has_begun(pod: Mapping[str, Any]) -> bool:
    """Tell whether a pod's container has run, so that it has a log."""
    states = [one.get("state", {}) for one in pod.get("status", {}).get("containerStatuses", [])]
    return any("running" in one or "terminated" in one for one in states)


def _list_pods(record: JobRecord) -> list[dict[str, Any]]:
    pods = _list(record, "pods", "-l", _select(record))
    return sorted(pods, key=lambda pod: (pod["metadata"].get("creationTimestamp", ""), int(read_index(pod))))


def _select(record: JobRecord) -> str:
    """Return what selects the job's pods by their label."""
    label = "batch.kubernetes.io/job-name" if record.facts["kind"] == "job" else "jobset.sigs.k8s.io/jobset-name"
    return f"{label}={record.id}"


def _list(record: JobRecord, *words: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(
        _kubectl(record.facts, "get", *words, "-o", "json", doing="ask for the job")
    )["items"]
    return found


def _find_context() -> str:
    try:
        return run_tool(["kubectl", "config", "current-context"], doing="find the context").strip()
    except LaunchError:
        return ""  # in a pod there is none, and none is needed


def _find_hint(manifest: Mapping[str, Any]) -> str:
    kind = str(manifest["kind"])
    missing = _MISSING_KIND.get("TrainJob" if kind == "TrainingRuntime" else kind)
    return (
        f"if {missing}: --kind job works on every cluster"
        if missing
        else "`kubectl auth can-i create jobs` tells whether you may"
    )


def _argv(place: Mapping[str, str], *words: str) -> list[str]:
    where = [f"--{name}={place[name]}" for name in ("context", "namespace") if place.get(name)]
    return ["kubectl", *words, *where]


def _kubectl(
    place: Mapping[str, str], *words: str, doing: str, stdin: str | None = None, hint: str = "", timeout_s: float = 60.0
) -> str:
    return run_tool(_argv(place, *words), doing=doing, stdin=stdin, hint=hint, timeout_s=timeout_s)
