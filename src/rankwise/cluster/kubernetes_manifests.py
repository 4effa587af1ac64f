"""What is submitted to Kubernetes: one pod for each node, as an indexed Job, a JobSet or a Kubeflow TrainJob."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.base.errors import UsageError
from rankwise.base.requeue import REQUEUE
from rankwise.cluster.job import ALWAYS
from rankwise.cluster.job_fields import Word, parse_size
from rankwise.cluster.launch_command import RendezvousPlace, ShellText, build_launch, join_words

if TYPE_CHECKING:
    from rankwise.cluster.job import JobSpec

Manifest = dict[str, Any]

WORDS: dict[str, Word] = {
    "kind": Word("What is created: an indexed Job, which every cluster knows, a JobSet, or a TrainJob of Kubeflow's Trainer 2.", choices=("job", "jobset", "trainjob")),
    "namespace": Word("Namespace; that of the kubectl context by default."),
    "context": Word("Context of kubectl's configuration; the current one by default."),
    "queue": Word("Queue of Kueue (a LocalQueue) that admits the job."),
    "priority": Word("PriorityClass of the pods."),
    "service_account": Word("ServiceAccount of the pods."),
    "pull_secrets": Word("Secrets with which the image is pulled.", "list", "NAME", is_names=True),
    "volumes": Word("A PersistentVolumeClaim, and where the containers see it.", "list", "CLAIM:PATH", is_names=True),
    "folder": Word("Folder of the container that the command is run in: the image's by default, /job if files are copied.", metavar="PATH"),
    "shm": Word("Most of /dev/shm, as in 16G; by default only the pod's memory limits it.", metavar="SIZE"),
    "gpu_resource": Word("How the cluster calls its GPUs (default: nvidia.com/gpu).", metavar="NAME"),
    "node_selector": Word("A label that the pods' machines must have.", "table", "LABEL=VALUE"),
    "tolerate": Word("A taint, by its key, that the pods tolerate on a machine.", "list", "KEY", is_names=True),
    "protect": Word("Let `kubectl drain` and other voluntary evictions wait for the end of the job (a PodDisruptionBudget).", "switch"),
}  # fmt: skip

#: The container's name is Kubeflow's, and so is that of the replicated job.
CONTAINER = "node"
_PORT = 29400
#: How long the first pods wait for the last ones.
_MEET_S = 3600
#: By SIGTERM before the script listened for it: see docs/howto/preemption.md.
_REQUEUE_CODES = [REQUEUE, 143]
#: Kubernetes refuses larger objects; the rest of the object needs some room.
_MOST_FILE_BYTES = 1_000_000
_DISRUPTED = [{"type": "DisruptionTarget", "status": "True"}]
#: These say something by being there.
_MEANT_EMPTY = {"emptyDir", "torch"}


def build_manifests(spec: JobSpec, job_id: str) -> list[Manifest]:
    """Return what is created, in this order; the last one is the job, which then owns the others.

    Args:
        spec: The job.
        job_id: The name of all of it.

    Raises:
        UsageError: The job can't be on Kubernetes.
    """
    if not spec.image:
        raise UsageError(
            "on Kubernetes a job needs a container image",
            hint="--image NAME, or image in job.toml: one with torch and rankwise in it",
        )
    kind = spec.own.text("kind", "job")
    job_spec = _build_job_spec(spec, job_id, kind)
    label = "batch.kubernetes.io/job-name" if kind == "job" else "jobset.sigs.k8s.io/jobset-name"
    before = [*_build_files(spec, job_id), *_build_budget(spec, job_id, {label: job_id})]
    queue = {"kueue.x-k8s.io/queue-name": spec.own.text("queue")} if spec.own.text("queue") else {}
    meta = _meta(spec, job_id, queue)
    set_spec = {
        "replicatedJobs": [{"name": CONTAINER, "replicas": 1, "template": {"spec": job_spec}}],
        "failurePolicy": _build_set_policy(spec),
    }
    if kind == "job":
        service = [_build_service(spec, job_id)] if spec.num_nodes > 1 else []
        found = [*service, {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": job_spec}]
    elif kind == "jobset":
        network = {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
        job_set = {"network": network, **set_spec}
        found = [{"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": meta, "spec": job_set}]
    else:
        found = _build_train_job(spec, job_id, meta, set_spec)
    return [_clean(one) for one in [*before, *found]]


def _build_train_job(spec: JobSpec, job_id: str, meta: Manifest, set_spec: Manifest) -> list[Manifest]:
    """Return a TrainJob, and its runtime: the shape of the pods, and when they are started again, is up to that."""
    template = set_spec["replicatedJobs"][0]["template"]
    template["metadata"] = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    container = template["spec"]["template"]["spec"]["containers"][0]
    trainer = {
        "numNodes": spec.num_nodes,
        "image": container.pop("image"),
        "command": container.pop("command"),
        "resourcesPerNode": container.pop("resources"),
    }
    if spec.ranks_per_node.isdecimal():
        trainer["numProcPerNode"] = int(spec.ranks_per_node)
    api = "trainer.kubeflow.org/v1alpha1"
    runtime = {
        "apiVersion": api, "kind": "TrainingRuntime", "metadata": {**_meta(spec, job_id), "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {"mlPolicy": {"numNodes": spec.num_nodes, "torch": {}}, "template": {"spec": set_spec}},
    }  # fmt: skip
    ref = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job_id}
    return [
        runtime,
        {"apiVersion": api, "kind": "TrainJob", "metadata": meta, "spec": {"runtimeRef": ref, "trainer": trainer}},
    ]


def _build_job_spec(spec: JobSpec, job_id: str, kind: str) -> Manifest:
    host = f"{job_id}-0" if kind == "job" else f"{job_id}-{CONTAINER}-0-0"
    pod = _build_pod(spec, job_id, _build_command(spec, job_id, f"{host}.{job_id}"))
    pod["subdomain"] = job_id if kind == "job" and spec.num_nodes > 1 else ""
    return {
        "completions": spec.num_nodes,
        "parallelism": spec.num_nodes,
        "completionMode": "Indexed",
        **(_build_job_policy(spec) if kind == "job" else _build_policy_in_set(spec)),
        "template": {"spec": pod},
    }


def _build_command(spec: JobSpec, job_id: str, host: str) -> list[str]:
    """Return what the containers run; the launcher is their first process, so that it gets their SIGTERM."""
    if spec.num_nodes == 1:
        words = build_launch(spec, None, python="python3")
    else:
        place = RendezvousPlace(endpoint=f"{host}:{_PORT}", run_id=job_id, local_addr=ShellText("$POD_IP"))
        launch = build_launch(spec, place, python="python3")
        # torch would ask the DNS whether this is the first pod, and the DNS may not know it yet; the pods start minutes
        # apart, where the image has to be pulled or a machine to be made.
        conf = ShellText(f"is_host=$is_host,read_timeout={_MEET_S},join_timeout={_MEET_S}")
        at = len(launch) - len(spec.command)
        launch[at:at] = ["--rdzv-conf", conf]
        words = [
            "sh",
            "-c",
            f'[ "$JOB_COMPLETION_INDEX" = 0 ] && is_host=1 || is_host=0\nexec {_wrap(launch)}\n',
        ]
    # Kubernetes fills in $(NAME) in a command; what the user has written is to arrive as it is.
    return [word.replace("$(", "$$(") for word in words]


def _wrap(words: list[str]) -> str:
    """Return words as a shell reads them, in lines that a person can read."""
    lines = [""]
    for word in words:
        text = join_words([word])
        if len(lines[-1]) + len(text) > 90:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + text
    return " \\\n  ".join(lines)


def _build_job_policy(spec: JobSpec) -> Manifest:
    """Return when a Job replaces a pod: after a disruption or a requeue, each index so often; an error ends the job at once."""
    if not spec.requeue:
        return {"backoffLimit": 0}
    action = "Ignore" if spec.requeue == ALWAYS else "Count"
    rules = [
        {"action": action, "onPodConditions": _DISRUPTED},
        {"action": action, "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": _REQUEUE_CODES}},
        _fail_rule(),
    ]
    limits = (
        {"backoffLimit": 0} if spec.requeue == ALWAYS else {"backoffLimitPerIndex": spec.requeue, "maxFailedIndexes": 0}
    )
    return {**limits, "podFailurePolicy": {"rules": rules}}


def _build_policy_in_set(spec: JobSpec) -> Manifest:
    """Return how a Job of a JobSet ends: by its pod failure policy after an error, else at its backoff limit, which starts the set again."""
    if not spec.requeue:
        return {"backoffLimit": 0}
    # Without the first rule, a pod that was evicted while it began would count as an error by its exit code.
    rules = [{"action": "Count", "onPodConditions": _DISRUPTED}, _fail_rule()]
    return {"backoffLimit": 0, "podFailurePolicy": {"rules": rules}}


def _build_set_policy(spec: JobSpec) -> Manifest:
    if not spec.requeue:
        return {"maxRestarts": 0}
    again = "RestartJobSetAndIgnoreMaxRestarts" if spec.requeue == ALWAYS else "RestartJobSet"
    return {
        "maxRestarts": 0 if spec.requeue == ALWAYS else spec.requeue,
        "rules": [
            {"name": "error", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
            {"name": "requeue", "action": again},
        ],
    }  # fmt: skip


def _fail_rule() -> Manifest:
    return {
        "action": "FailJob",
        "onExitCodes": {"containerName": CONTAINER, "operator": "NotIn", "values": _REQUEUE_CODES},
    }


def _build_pod(spec: JobSpec, job_id: str, command: list[str]) -> Manifest:
    shm = parse_size(spec.own.text("shm"), "shm") if spec.own.text("shm") else 0
    volumes: list[Manifest] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": _quantity(shm)}}]
    mounts: list[Manifest] = [{"name": "shm", "mountPath": "/dev/shm"}]
    for number, volume in enumerate(spec.own.list("volumes")):
        claim, colon, path = volume.partition(":")
        if not (claim and colon and path.startswith("/")):
            raise UsageError(f"volumes: {volume!r} is not CLAIM:PATH", hint="as in checkpoints:/mnt/checkpoints")
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": f"volume-{number}", "mountPath": path})
    folder = spec.own.text("folder", "/job" if spec.files else "")
    if spec.files:
        items = [{"key": key, "path": path} for path, key in _find_keys(spec).items()]
        volumes.append({"name": "files", "configMap": {"name": job_id, "items": items}})
        mounts.append({"name": "files", "mountPath": folder})
    env: list[Manifest] = [
        {"name": name, "value": value.replace("$(", "$$(")} for name, value in spec.variables.items()
    ]
    if spec.num_nodes > 1:
        env.append({"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    container = {
        "name": CONTAINER,
        "image": spec.image,
        "command": command,
        "workingDir": folder,
        "env": env,
        "ports": [{"containerPort": _PORT}] if spec.num_nodes > 1 else [],
        "resources": _build_resources(spec),
        "volumeMounts": mounts,
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": spec.grace_s,
        # The pod's, not the Job's: it does not count the time in the queue, and ranks that save and leave by 75 are
        # started again.
        "activeDeadlineSeconds": spec.time_s or None,
        "serviceAccountName": spec.own.text("service_account"),
        "priorityClassName": spec.own.text("priority"),
        "imagePullSecrets": [{"name": name} for name in spec.own.list("pull_secrets")],
        "nodeSelector": spec.own.table("node_selector"),
        "tolerations": [{"key": key, "operator": "Exists"} for key in spec.own.list("tolerate")],
        "containers": [container],
        "volumes": volumes,
    }


def _build_resources(spec: JobSpec) -> Manifest:
    asked = {
        "cpu": str(spec.cpus_per_node) if spec.cpus_per_node else "",
        "memory": _quantity(spec.memory_bytes),
        spec.own.text("gpu_resource", "nvidia.com/gpu"): str(spec.gpus_per_node or ""),
    }
    asked = {name: amount for name, amount in asked.items() if amount}
    # GPUs can't be shared, so that request and limit are one; a CPU limit would only throttle the data loading.
    return {"requests": dict(asked), "limits": {name: amount for name, amount in asked.items() if name != "cpu"}}


def _quantity(size: int) -> str:
    """Return an amount of memory as Kubernetes writes it; 0: none is asked for."""
    for unit, factor in (("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10)):
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size or "")


def _build_service(spec: JobSpec, job_id: str) -> Manifest:
    """Return what gives the pods names: none would find the first one without it."""
    selector = {"batch.kubernetes.io/job-name": job_id}
    ports = [{"name": "rendezvous", "port": _PORT}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(spec, job_id),
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector, "ports": ports},
    }


def _build_budget(spec: JobSpec, job_id: str, labels: dict[str, str]) -> list[Manifest]:
    if not spec.own.is_on("protect"):
        return []
    return [
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": _meta(spec, job_id),
            "spec": {"maxUnavailable": 0, "selector": {"matchLabels": labels}},
        }
    ]


def _build_files(spec: JobSpec, job_id: str) -> list[Manifest]:
    if not spec.files:
        return []
    texts: dict[str, str] = {}
    others: dict[str, str] = {}
    keys = _find_keys(spec)
    # Before any is read: a folder of data may be larger than the memory.
    size = sum((Path(spec.workdir) / path).stat().st_size for path in keys)
    if size > _MOST_FILE_BYTES:
        raise UsageError(
            f"the files have {size:,} bytes, and Kubernetes takes {_MOST_FILE_BYTES:,} with a job",
            hint='put them into the image, or on a volume (volumes = ["CLAIM:PATH"])',
        )
    for path, key in keys.items():
        content = (Path(spec.workdir) / path).read_bytes()
        try:
            texts[key] = content.decode()
        except UnicodeDecodeError:
            others[key] = base64.b64encode(content).decode()
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _meta(spec, job_id), "data": texts, "binaryData": others}
    ]


def _find_keys(spec: JobSpec) -> dict[str, str]:
    """Return the key of each file in the ConfigMap, which knows no folders; those in folders are found one by one."""
    home = Path(spec.workdir)
    paths: dict[str, None] = {}
    keys: dict[str, str] = {}
    for name in spec.files:
        place = home / name
        inside = sorted(place.rglob("*")) if place.is_dir() else [place]
        paths |= {
            one.relative_to(home).as_posix(): None for one in inside if one.is_file() and "__pycache__" not in one.parts
        }
    for path in paths:
        key = re.sub(r"[^A-Za-z0-9._-]", "_", path)
        keys[path] = f"{len(keys)}-{key}" if key in keys.values() or key.startswith("..") else key
    return keys


def _meta(spec: JobSpec, job_id: str, labels: dict[str, str] | None = None) -> Manifest:
    return {"name": job_id, "namespace": spec.own.text("namespace"), "labels": dict(labels or {})}


def _clean(value: Any) -> Any:
    """Leave out what says nothing; an empty file is one all the same."""
    if isinstance(value, dict):
        cleaned = {key: one if key == "data" else _clean(one) for key, one in value.items()}
        return {key: one for key, one in cleaned.items() if one not in (None, "", {}, []) or key in _MEANT_EMPTY}
    return [_clean(one) for one in value] if isinstance(value, list) else value
