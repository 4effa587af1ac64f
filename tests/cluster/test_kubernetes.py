"""Jobs on Kubernetes: the real kubectl against a small server that speaks the API's paths, and what the API's fields mean."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from kubernetes_api import KINDS, KubernetesApi, read
from rankwise.base.errors import LaunchError, UsageError
from rankwise.cluster import handles, kubernetes, submission
from rankwise.cluster.kubernetes_causes import find_state

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.cluster.submission import JobHandle

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesApi]:
    """A server that kubectl finds."""
    server = KubernetesApi(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(server.config))
    monkeypatch.setenv("KUBECACHEDIR", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield server
    server.close()


def submit(folder: Path, **words: Any) -> JobHandle:
    """Submit a job of three nodes with a file."""
    return submission.submit_spec(read(folder, nodes="3", requeue="2", files=["train.py"], **words))


def make_pod(job: str, index: int, status: dict[str, Any], *, label: str = "batch.kubernetes.io/job-name", suffix: str = "") -> dict[str, Any]:  # fmt: skip
    """Return a pod of a job, as its controller would make it."""
    meta = {"name": f"{job}-{index}-x{suffix}", "labels": {label: job}, "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
            "creationTimestamp": f"2026-01-01T00:00:0{index}Z"}  # fmt: skip
    spec = {"nodeName": f"gpu-{index}", "hostname": f"{job}-{index}", "containers": [{"name": "node", "resources": {"limits": {"memory": "64Gi"}}}]}  # fmt: skip
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec, "status": status}


def ended(code: int, reason: str = "Error", at: str = "2026-01-01T00:01:00Z") -> dict[str, Any]:
    """Return the status of a pod whose container has ended."""
    state = {"terminated": {"exitCode": code, "reason": reason, "finishedAt": at}}
    return {"phase": "Failed" if code else "Succeeded", "containerStatuses": [{"name": "node", "state": state}]}  # fmt: skip


@needs_kubectl
@pytest.mark.parametrize("kind", KINDS)
def test_a_job_is_submitted_found_again_and_cancelled(kind: str, api: KubernetesApi, tmp_path: Path) -> None:
    """All objects are created in the context's namespace; the job owns the others, and its end is theirs."""
    handle = submit(tmp_path, kind=kind)
    plurals = {"job": {"configmaps", "services", "jobs"}, "jobset": {"configmaps", "jobsets"}, "trainjob": {"configmaps", "trainingruntimes", "trainjobs"}}[kind]  # fmt: skip
    assert api.names() == plurals
    assert handle.record.facts == {"namespace": "ml", "context": "test", "kind": kind}
    found = submission.JobHandle(handles.find_record(handle.id))
    assert found.state().phase == "waiting"
    found.cancel()
    assert api.names() == set()
    assert found.state().phase == "cancelled"


@needs_kubectl
def test_what_is_refused_leaves_nothing_behind(api: KubernetesApi, tmp_path: Path) -> None:
    """The API's words are the error; what had been created before is deleted, and no record stays."""
    api.refused["jobs"] = 'jobs.batch "train" is forbidden: exceeded quota: team, requested: count/jobs.batch=1'
    with pytest.raises(LaunchError, match=r"exceeded quota: team"):
        submit(tmp_path)
    assert api.names() == set()
    assert handles.list_records() == []


def test_a_failed_clean_up_stands_behind_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the connection is lost while a job is submitted, the error says that first, then what is left and how to delete it."""

    def answer(argv: list[str], **words: Any) -> str:
        if argv[1] == "create" and "kind: ConfigMap" in words["stdin"]:
            return json.dumps({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"namespace": "ml", "uid": "u"}})  # fmt: skip
        raise LaunchError(f"can't {words['doing']}: connection lost")

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(kubernetes, "run_tool", answer)
    with pytest.raises(LaunchError) as caught:
        submit(tmp_path)
    assert str(caught.value).startswith("can't submit the job: connection lost\ncan't delete what had been created")  # fmt: skip
    assert "deleted by: kubectl delete ConfigMap/train-" in str(caught.value)
    assert "--namespace=ml" in str(caught.value)


def test_an_api_that_does_not_answer_once_ends_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who follows a log goes on where the API has failed for a moment, as after a restart of its server."""
    done = {"metadata": {"name": "x"}, "status": {"conditions": [{"type": "Complete", "status": "True"}]}}
    answers = [
        LaunchError("can't ask for the job: no route to host"),
        done,
        {"items": []},
        {"items": []},
        {"items": []},
    ]

    def answer(*_: object, **__: object) -> str:
        found = answers.pop(0)
        if isinstance(found, LaunchError):
            raise found
        return json.dumps(found)

    monkeypatch.setattr(kubernetes, "run_tool", answer)
    monkeypatch.setattr(kubernetes, "_LOOK_S", 0.01)
    record = handles.JobRecord(id="x", on="kubernetes", name="x", folder=tmp_path, native_id="jobs.batch/x", facts={"kind": "job"})  # fmt: skip
    assert list(kubernetes.logs(record, follow=True)) == []
    assert answers == []


def test_a_log_that_does_not_end_with_the_job_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If kubectl stays connected to a pod after the job's end, its lines are given, then an error names the pod; kubectl is ended."""
    done = {"metadata": {"name": "x"}, "status": {"conditions": [{"type": "Complete", "status": "True"}]}}
    status = {"phase": "Running", "containerStatuses": [{"state": {"running": {}}}]}
    pods = {"items": [{"metadata": {"name": "x-0-abc", "uid": "1"}, "status": status}]}
    program = tmp_path / "kubectl"
    program.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\necho last words\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(kubernetes, "run_tool", lambda argv, **_: json.dumps(pods if "pods" in argv else done))
    monkeypatch.setattr(kubernetes, "_LOOK_S", 0.05)
    monkeypatch.setattr(kubernetes, "_SILENT_S", 1.0)
    record = handles.JobRecord(id="x", on="kubernetes", name="x", folder=tmp_path, native_id="jobs.batch/x", facts={"kind": "job"})  # fmt: skip
    lines = kubernetes.logs(record, follow=True)
    assert next(lines) == "[x-0-abc]: last words"
    with pytest.raises(LaunchError, match="follows the log of x-0-abc, has printed nothing for 1 s"):
        next(lines)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


@needs_kubectl
def test_a_kind_that_is_not_installed_is_named(tmp_path: Path, api: KubernetesApi) -> None:
    """Without Kubeflow's Trainer, the error says so, and which kind works."""
    api.groups = ("v1", "batch/v1")
    with pytest.raises(LaunchError, match='no matches for kind "TrainingRuntime"') as caught:
        submit(tmp_path, kind="trainjob")
    assert "--kind job works on every cluster" in str(caught.value.hint)
    assert api.names() == set()


def test_without_kubectl_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No kubectl, or no cluster behind it, is one error, and no record stays."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with pytest.raises(UsageError, match="kubectl: No such file"):
        submit(tmp_path)
    assert handles.list_records() == []


@needs_kubectl
def test_logs_of_all_pods_come_by_their_time(api: KubernetesApi, tmp_path: Path) -> None:
    """Lines of several pods are in one order; those of launchers say which pod they are from; those of a rank can be chosen."""
    handle = submit(tmp_path)
    for index in range(2):
        api.put("pods", make_pod(handle.id, index, ended(0)))
        api.logs[f"{handle.id}-{index}-x"] = f"2026-01-01T00:00:0{3 - index}.5Z [{handle.id}-{index} rank {index}]: hello\n2026-01-01T00:00:05.{index}Z rankwise: over\n"  # fmt: skip
    api.put("pods", make_pod(handle.id, 2, {"phase": "Pending"}))
    lines = list(handle.logs())
    assert lines == [f"[{handle.id}-1 rank 1]: hello", f"[{handle.id}-0 rank 0]: hello", f"[{handle.id}-0]: rankwise: over", f"[{handle.id}-1]: rankwise: over"]  # fmt: skip
    assert list(handle.logs(rank=1)) == lines[:1]
    assert sum("/log" in one for one in api.asked) == 6  # of three pods, twice
    api.logs[f"{handle.id}-1-x"] = "2026-01-01T00:00:01Z 10%\r20%\n"
    kept = api.logs.pop(f"{handle.id}-0-x")
    assert list(handle.logs()) == [
        f"[{handle.id}-1]: 10%",
        f"[{handle.id}-1]: 20%",
        f"error: pod {handle.id}-0-x has no log",
    ]
    api.logs = {f"{handle.id}-0-x": kept, f"{handle.id}-1-x": f"2026-01-01T00:00:02.5Z {lines[0]}\n2026-01-01T00:00:05.1Z rankwise: over\n"}  # fmt: skip
    job = api.objects["ml", "jobs", handle.id]
    job["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    api.logs = {name: "".join(line.partition(" ")[2] for line in text.splitlines(keepends=True)) for name, text in api.logs.items()}  # fmt: skip
    assert sorted(handle.logs(follow=True)) == sorted(lines)


BLOCKED: dict[str, dict[str, Any]] = {
    "ImagePullBackOff": {"containerStatuses": [{"name": "node", "state": {"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "a:1"'}}}]},
    "Unschedulable": {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."}]},
    "CreateContainerConfigError": {"containerStatuses": [{"name": "node", "state": {"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "key" not found'}}}]},
}  # fmt: skip
TEXTS = {
    "ImagePullBackOff": "pod j-0-x: the image can't be pulled: ImagePullBackOff: Back-off pulling image \"a:1\"",
    "Unschedulable": "pod j-0-x can't be placed: Unschedulable: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
    "CreateContainerConfigError": "pod j-0-x: the container lacks a Secret or a ConfigMap: CreateContainerConfigError: secret \"key\" not found",
}  # fmt: skip


def make_job(*conditions: tuple[str, str, str], **meta: Any) -> dict[str, Any]:
    """Return a job with conditions: type, reason, message."""
    return {"metadata": meta, "status": {"conditions": [{"type": one, "status": "True", "reason": reason, "message": message} for one, reason, message in conditions]}}  # fmt: skip


@pytest.mark.parametrize("case", BLOCKED)
def test_why_a_job_waits(case: str) -> None:
    """The API's reason and message, once for all pods that say the same, after plain words."""
    pods = [make_pod("j", index, {"phase": "Pending", **BLOCKED[case]}) for index in range(2)]
    state = find_state(make_job(), pods, [])
    assert (state.phase, state.reason) == ("waiting", TEXTS[case])


def test_what_only_events_and_conditions_tell() -> None:
    """A quota that keeps pods from being made, and a queue that holds the job back."""
    events = [{"reason": "FailedCreate", "message": "exceeded quota: team"}] * 2
    assert find_state(make_job(), [], events).reason == "FailedCreate: exceeded quota: team"
    held = make_job(("Suspended", "JobSuspended", ""), labels={"kueue.x-k8s.io/queue-name": "team"})
    assert find_state(held, [], []).reason == "suspended: it waits in the queue team"


def taken(reason: str, message: str) -> dict[str, Any]:
    """Return the status of a pod that was taken away."""
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message, "lastTransitionTime": "2026-01-01T00:00:30Z"}  # fmt: skip
    return {**ended(75), "conditions": [condition]}


ENDS = [
    (ended(137, "OOMKilled"), "pod j-1-x on gpu-1: OOMKilled: the kernel has killed it because its memory ran out (limit 64Gi)"),
    (taken("PreemptionByScheduler", "preempting to accommodate a higher priority pod"), "pod j-1-x on gpu-1 was preempted by a pod of higher priority (PreemptionByScheduler: preempting to accommodate a higher priority pod)"),
    (taken("EvictionByEvictionAPI", "Eviction API: evicting"), "pod j-1-x on gpu-1 was evicted on request, as by `kubectl drain` (EvictionByEvictionAPI: Eviction API: evicting)"),
    ({"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: ephemeral-storage."}, "pod j-1-x on gpu-1: Evicted: The node was low on resource: ephemeral-storage."),
    (ended(3), "pod j-1-x on gpu-1: exit code 3"),
]  # fmt: skip


@pytest.mark.parametrize(("status", "text"), ENDS, ids=[text.split(":")[1][:20] for _, text in ENDS])
def test_why_a_job_has_failed(status: dict[str, Any], text: str) -> None:
    """What happened first to a pod stands first, those that only lost it come later, and the job's own condition is last."""
    pods = [make_pod("j", 0, ended(1, at="2026-01-01T00:02:00Z")), make_pod("j", 1, status)]
    state = find_state(make_job(("Failed", "PodFailurePolicy", "it said so")), pods, [])
    assert state.phase == "failed"
    assert state.reason.startswith(text)
    assert state.reason.endswith("PodFailurePolicy: it said so")


RECORDED = {
    "done": ("succeeded", 0, 1, ""),
    "error": ("failed", 1, 1, "pod train-error-1-5gch6: exit code 1; PodFailurePolicy: Container node for pod ml/train-error-1-5gch6 failed with exit code 1"),
    "evicted": ("running", None, 2, "was evicted on request, as by `kubectl drain` (EvictionByEvictionAPI: Eviction API: evicting)"),
    "oom": ("failed", 137, 1, "OOMKilled: the kernel has killed it because its memory ran out (limit 1Gi); PodFailurePolicy"),
    "preempted": ("failed", 143, 1, "was preempted by a pod of higher priority (PreemptionByScheduler: default-scheduler: preempting"),
    "stopped": ("stopped", 75, 2, "MaxFailedIndexesExceeded: Job has exceeded the specified maximal number of failed indexes"),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDED)
def test_what_kubernetes_itself_made_of_our_jobs(name: str) -> None:
    """Jobs and pods as an API server and a Job controller of Kubernetes 1.36 left them; only the machines were played."""
    recorded = json.loads((Path(__file__).parent / "kubernetes_recordings.json").read_text(encoding="utf-8"))[name]  # fmt: skip
    phase, code, starts, reason = RECORDED[name]
    state = find_state(recorded["job"], recorded["pods"], [])
    assert (state.phase, state.exit_code, state.starts) == (phase, code, starts)
    assert reason in state.reason


def test_a_job_that_stops_in_time_has_not_failed() -> None:
    """If all pods have left by 75, and nobody starts them again, the job can be resumed."""
    pods = [make_pod("j", index, ended(75), suffix=suffix) for index in range(2) for suffix in "ab"]
    state = find_state(make_job(("Failed", "MaxFailedIndexesExceeded", "")), pods, [])
    assert (state.phase, state.exit_code, state.starts) == ("stopped", 75, 2)
    assert find_state(make_job(("Complete", "", "")), pods, []).phase == "succeeded"
    assert find_state(None, [], []).phase == "unknown"
