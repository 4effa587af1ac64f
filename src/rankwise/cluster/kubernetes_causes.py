"""What has become of a job on Kubernetes, and why, from the fields of the API's own objects; pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rankwise.base.requeue import REQUEUE
from rankwise.cluster.cluster import JobState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

Fields = dict[str, Any]

#: What a container waits for: the API's reason, and what it means.
_WAITING = {
    "ErrImagePull": "the image can't be pulled",
    "ImagePullBackOff": "the image can't be pulled",
    "InvalidImageName": "the image has no valid name",
    "ErrImageNeverPull": "the image is not on the machine, and may not be pulled",
    "CreateContainerConfigError": "the container lacks a Secret or a ConfigMap",
    "CreateContainerError": "the container can't be made",
    "RunContainerError": "the container can't be started",
}
#: Why a pod was taken away: reasons of the condition DisruptionTarget.
_DISRUPTIONS = {
    "PreemptionByScheduler": "preempted by a pod of higher priority",
    "DeletionByTaintManager": "evicted: its machine got a taint that it does not tolerate, as when the machine is lost",
    "EvictionByEvictionAPI": "evicted on request, as by `kubectl drain`",
    "DeletionByPodGC": "deleted with its machine, which is gone",
    "TerminationByKubelet": "ended by its machine, which is low on resources or shuts down",
}
_ENDED = {
    "Complete": "succeeded",
    "Completed": "succeeded",
    "SuccessCriteriaMet": "succeeded",
    "Failed": "failed",
    "FailureTarget": "failed",
}


@dataclass(frozen=True, slots=True)
class _Cause:
    """What happened to one pod.

    Attributes:
        when: In the API's form, which sorts as text.
        text: In words.
        code: The container's exit code; None: it has none.
        blocks: Whether the pod can't run because of it.
        is_outside: Whether it came from outside: it is the reason even if the ranks have stopped in time.
    """

    when: str
    text: str
    code: int | None = None
    blocks: bool = False
    is_outside: bool = False


def find_state(job: Fields | None, pods: Sequence[Fields], events: Sequence[Fields]) -> JobState:
    """Return what has become of a job.

    Args:
        job: The Job, JobSet or TrainJob; None: there is none.
        pods: Its pods, those that have failed included.
        events: Warnings about the job and its pods; only what nothing else tells is taken from them.
    """
    if job is None:
        return JobState(phase="unknown", reason="it is not there any more")
    status = job.get("status", {})
    starts = _count_starts(status, pods)
    causes = sorted((cause for pod in pods for cause in _find_causes(pod)), key=lambda cause: cause.when)
    blocked = [cause.text for cause in causes if cause.blocks]
    happened = [cause for cause in causes if not cause.blocks]
    for condition in status.get("conditions", []):
        phase = _ENDED.get(condition.get("type")) if condition.get("status") == "True" else None
        if phase == "succeeded":
            return JobState(phase="succeeded", exit_code=0, starts=starts)
        if phase == "failed":
            return _find_end(condition, happened, starts)
    if job["metadata"].get("deletionTimestamp"):
        return JobState(phase="cancelled", starts=starts)
    is_running = any(pod.get("status", {}).get("phase") == "Running" for pod in pods)
    if not is_running and any(_is_on(status, "Suspended")):
        reasons = [f"suspended{_find_queue(job)}"]
    else:
        # Of a job that is on its way again, the last thing that happened; the API's warnings only if nothing else says
        # why it waits.
        why = [cause for cause in happened if cause.is_outside] or happened
        found = [*blocked, *(cause.text for cause in why[-1:])]
        reasons = _without_repeats(found if found or is_running else map(_tell_event, events))
    return JobState(phase="running" if is_running else "waiting", reason="; ".join(reasons), starts=starts)


def _find_end(condition: Fields, happened: Sequence[_Cause], starts: int) -> JobState:
    codes = [cause.code for cause in happened if cause.code is not None]
    stated = f"{condition.get('reason', '')}: {condition.get('message', '')}".strip(": ")
    errors = [cause for cause in happened if cause.is_outside or cause.code != REQUEUE] or list(happened)
    words = [*_without_repeats(cause.text for cause in errors[:3]), stated]
    if codes and all(code == REQUEUE for code in codes):
        return JobState(phase="stopped", exit_code=REQUEUE, reason="; ".join(words), starts=starts)
    code = next((code for code in codes if code != REQUEUE), None)
    return JobState(phase="failed", exit_code=code, reason="; ".join(words), starts=starts)


def _find_causes(pod: Fields) -> Iterator[_Cause]:
    """Give what happened to a pod, or keeps it from running."""
    status, name = pod.get("status", {}), _name(pod)
    created = pod["metadata"].get("creationTimestamp", "")
    taken = next(_is_on(status, "DisruptionTarget"), None)
    for condition in status.get("conditions", []):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            text = f"pod {name} can't be placed: {condition.get('reason', '')}: {condition.get('message', '')}".rstrip(
                ": "
            )
            yield _Cause(created, text, blocks=True)
    if taken is not None:
        reason, message = taken.get("reason", ""), taken.get("message", "") or status.get("message", "")
        means = _DISRUPTIONS.get(reason, "taken away")
        code = next((ended.get("exitCode") for _, ended in _terminated(status)), None)
        yield _Cause(
            taken.get("lastTransitionTime", created),
            f"pod {name}{_node(pod)} was {means} ({reason}: {message})".replace(": )", ")"),
            code=code,
            is_outside=True,
        )
        return
    if status.get("phase") == "Failed" and status.get("reason"):
        # Evicted, DeadlineExceeded, NodeLost, UnexpectedAdmissionError …: the pod's own words are the whole cause.
        ends = [ended for _, ended in _terminated(status)]
        when = max((ended.get("finishedAt") or "" for ended in ends), default=created)
        yield _Cause(
            when,
            f"pod {name}{_node(pod)}: {status['reason']}: {status.get('message', '')}".rstrip(": "),
            code=next((ended.get("exitCode") for ended in ends), None),
        )
        return
    for waiting in (one["state"]["waiting"] for one in _containers(status) if "waiting" in one.get("state", {})):
        reason = waiting.get("reason", "")
        if reason in _WAITING:
            yield _Cause(
                created,
                f"pod {name}: {_WAITING[reason]}: {reason}: {waiting.get('message', '')}".rstrip(": "),
                blocks=True,
            )
    for container, ended in _terminated(status):
        if ended.get("exitCode"):
            yield _Cause(
                ended.get("finishedAt") or created,
                f"pod {name}{_node(pod)}: {_tell_end(pod, container, ended)}",
                code=ended["exitCode"],
            )


def _tell_end(pod: Fields, container: str, ended: Fields) -> str:
    code, reason, message = ended["exitCode"], ended.get("reason", ""), ended.get("message", "")
    if reason == "OOMKilled":
        limit = next(
            (
                one.get("resources", {}).get("limits", {}).get("memory")
                for one in pod.get("spec", {}).get("containers", [])
                if one.get("name") == container
            ),
            None,
        )
        return f"OOMKilled: the kernel has killed it because its memory ran out{f' (limit {limit})' if limit else ''}"
    if reason in {"StartError", "ContainerCannotRun"}:
        lacks = (
            ": the image lacks what the command starts with" if re.search(r"not found|no such file", message) else ""
        )
        return f"{reason}: the container can't be started{lacks}: {message}".rstrip(": ")
    if code == REQUEUE:
        return f"exit code {REQUEUE}: stopped in time, to be started again"
    return f"exit code {code}" + (f" ({reason}: {message})" if message else "")


def _terminated(status: Fields) -> Iterator[tuple[str, Fields]]:
    for one in _containers(status):
        ended = one.get("state", {}).get("terminated") or one.get("lastState", {}).get("terminated")
        if ended:
            yield one.get("name", ""), ended


def _containers(status: Fields) -> list[Fields]:
    return [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]


def _is_on(status: Fields, kind: str) -> Iterator[Fields]:
    return (one for one in status.get("conditions", []) if one.get("type") == kind and one.get("status") == "True")


def _count_starts(status: Fields, pods: Sequence[Fields]) -> int:
    if "restarts" in status:
        return int(status["restarts"]) + 1
    by_index: dict[str, int] = {}
    for pod in pods:
        index = read_index(pod)
        by_index[index] = by_index.get(index, 0) + 1
    return max(by_index.values(), default=0)


def read_index(pod: Fields) -> str:
    """Return which node of the job a pod is."""
    meta = pod["metadata"]
    key = "batch.kubernetes.io/job-completion-index"
    return str(meta.get("annotations", {}).get(key, meta.get("labels", {}).get(key, "0")))


def _name(pod: Fields) -> str:
    return str(pod["metadata"]["name"])


def _node(pod: Fields) -> str:
    node = pod.get("spec", {}).get("nodeName")
    return f" on {node}" if node else ""


def _find_queue(job: Fields) -> str:
    queue = job["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name")
    return f": it waits in the queue {queue}" if queue else ""


def _tell_event(event: Fields) -> str:
    return f"{event.get('reason', '')}: {event.get('message', '')}"


def _without_repeats(texts: Iterable[str]) -> list[str]:
    """Return texts once each: of what says the same of several pods, the first."""
    found: dict[str, str] = {}
    for text in texts:
        found.setdefault(re.sub(r"pod \S+( on \S+)?", "", text), text)
    return list(found.values())
