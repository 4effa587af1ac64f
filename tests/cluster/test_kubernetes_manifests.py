"""What is submitted to Kubernetes: valid by the published schemas, and as a person would write it."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from kubernetes_api import KINDS, RICH, read
from rankwise.base.errors import UsageError
from rankwise.cli import submit as cli_submit
from rankwise.cluster import kubernetes
from rankwise.cluster.kubernetes_manifests import build_manifests
from rankwise.cluster.yaml_text import to_yaml
from rankwise.launcher.command import parse

if TYPE_CHECKING:
    from pathlib import Path


def find_pod(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the pods' spec, wherever it is."""
    for one in manifests:
        spec = one.get("spec", {})
        if one["kind"] == "TrainingRuntime":
            spec = spec["template"]["spec"]
        if "replicatedJobs" in spec:
            spec = spec["replicatedJobs"][0]["template"]["spec"]
        if "completions" in spec:
            return dict(spec["template"]["spec"])
    raise AssertionError("no pods")


def find_command(manifests: list[dict[str, Any]], index: int = 0) -> list[str]:
    """Return the words that a pod's program gets: as Kubernetes, and then the shell, would fill them in."""
    trainer = manifests[-1]["spec"].get("trainer") or find_pod(manifests)["containers"][0]
    command = [word.replace("$$(", "$(") for word in trainer["command"]]
    if command[0] != "sh":
        return command
    script = command[2].replace("exec ", "printf '%s\\0' ")
    env = {"JOB_COMPLETION_INDEX": str(index), "POD_IP": "10.0.0.1"}
    return subprocess.run([*command[:2], script], env=env, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_manifests_hold_to_the_published_schemas(kind: str, tmp_path: Path) -> None:
    """No field is unknown or of a wrong type, by the models of Kubeflow's Trainer, with those of JobSet and Kubernetes in them."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api")
    by_kind = {"Job": models.IoK8sApiBatchV1JobSpec, "JobSet": models.JobsetV1alpha2JobSet, "TrainJob": models.TrainerV1alpha1TrainJob,
               "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime}  # fmt: skip
    seen = set()
    for words in (RICH, {}, {"requeue": "always", "nodes": "3"}):
        for one in build_manifests(read(tmp_path, kind=kind, **words), "train-0a1b2c"):
            if model := by_kind.get(one["kind"]):
                value = one["spec"] if one["kind"] == "Job" else one
                assert drop_empty(model.from_dict(value).to_dict()) == drop_empty(value)
                seen.add(one["kind"])
    assert len(seen) == (2 if kind == "trainjob" else 1)


@pytest.mark.parametrize("kind", KINDS)
def test_core_objects_hold_to_the_schemas_of_kubernetes(kind: str, tmp_path: Path) -> None:
    """Job, Service, ConfigMap and PodDisruptionBudget have no field that Kubernetes does not know."""
    validator = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    core = [one for one in build_manifests(read(tmp_path, kind=kind, **RICH), "train-0a1b2c") if "." not in one["apiVersion"]]  # fmt: skip
    assert {one["kind"] for one in core} == {"ConfigMap", "PodDisruptionBudget"} | ({"Job", "Service"} if kind == "job" else set())  # fmt: skip
    for one in core:
        validator.validate(one, validator.latest_version(), strict=True)


def drop_empty(value: Any) -> Any:
    """Leave out what a model fills in by itself: a port's protocol, too."""
    if isinstance(value, dict):
        return {key: drop_empty(one) for key, one in value.items() if one not in (None, [], {}, "TCP")}
    return [drop_empty(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("kind", KINDS)
def test_yaml_says_what_the_manifests_say(kind: str, tmp_path: Path) -> None:
    """A reader of YAML finds every value again: numbers as texts, files of several lines, empty and binary ones."""
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    spec = read(tmp_path, kind=kind, **RICH)
    for one, document in zip(build_manifests(spec, "train-0a1b2c"), kubernetes.render(spec, "train-0a1b2c"), strict=True):  # fmt: skip
        assert yaml.safe_load(document.text) == one


def test_the_whole_dry_run_is_one_yaml_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    """What the command prints can be given to `kubectl create -f -`: all objects are found in it."""
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("pass\n")
    words = ["--on", "kubernetes", "--image", "a:1", "--nodes", "2", "--files", "train.py", "--dry-run", "--", "train.py"]  # fmt: skip
    assert cli_submit.main(words) == 0
    found = list(yaml.safe_load_all(capsys.readouterr().out))
    assert [one["kind"] for one in found] == ["ConfigMap", "Service", "Job"]


@pytest.mark.parametrize("text", ["yes", "NO", "1e3", "0x1", "1:30", "-", "--x", "a: b", "a #b", "*x", " a", "", "é", "2026-01-01", "a\nb", "a\n b\n", "a\n\nb\n", "\ta\nb\n", "x\n\n", "~", "=", "-1", "-x-"])  # fmt: skip
def test_yaml_quotes_what_would_be_something_else(text: str) -> None:
    """A text stays that text, alone, in a list and as a key."""
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    value = {"a": text, "b": [text, text], "c": [{"d": text, "e": {}}], text: []}
    assert yaml.safe_load(to_yaml(value)) == value


@pytest.mark.parametrize("kind", KINDS)
def test_every_pod_starts_a_launcher_that_finds_the_others(kind: str, tmp_path: Path) -> None:
    """The command is one that the launcher takes; the first pod's name is that which Kubernetes gives it; user's words arrive as they are."""
    manifests = build_manifests(read(tmp_path, kind=kind, **RICH), "train-0a1b2c")
    command = find_command(manifests)
    assert command[:4] == ["python3", "-m", "rankwise", "run"]
    assert command[-3:] == ["train.py", "--lr", "$(X)"]
    environment = {"PET_NNODES": "5", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "3", "PET_MASTER_ADDR": "other", "PET_MASTER_PORT": "29400"}  # fmt: skip
    launch = parse(command[4:], environment if kind == "trainjob" else {})
    assert (launch.min_nodes, launch.max_nodes) == (2, 4)
    host = "train-0a1b2c-0" if kind == "job" else "train-0a1b2c-node-0-0"
    assert command[command.index("--rdzv-endpoint") + 1] == f"{host}.train-0a1b2c:29400"
    assert command[command.index("--local-addr") + 1] == "10.0.0.1"
    confs = [words[words.index("--rdzv-conf") + 1] for words in (command, find_command(manifests, index=2))]
    assert [conf.partition(",")[0] for conf in confs] == ["is_host=1", "is_host=0"]
    pod = find_pod(manifests)
    assert pod["containers"][0]["env"][0] == {"name": "RANKWISE_CHECKPOINT", "value": "/mnt/ckpt"}
    assert {"name": "A", "value": "$$(B)"} in pod["containers"][0]["env"]
    if kind == "job":
        assert pod["subdomain"] == next(one["metadata"]["name"] for one in manifests if one["kind"] == "Service")  # fmt: skip


def test_a_job_of_one_node_needs_no_names(tmp_path: Path) -> None:
    """There is one object, and the launcher meets nobody."""
    manifests = build_manifests(read(tmp_path), "train-0a1b2c")
    assert [one["kind"] for one in manifests] == ["Job"]
    assert parse(find_command(manifests)[4:]).max_nodes == 1


def test_the_pods_have_shared_memory_and_time_to_save(tmp_path: Path) -> None:
    """/dev/shm is more than the 64 MiB of a container, and the kill comes after the ranks' own."""
    pod = find_pod(build_manifests(read(tmp_path, grace="5m", time="1:00:00"), "train-0a1b2c"))
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]
    assert pod["terminationGracePeriodSeconds"] == 300
    assert pod["activeDeadlineSeconds"] == 3600
    command = pod["containers"][0]["command"]
    assert int(command[command.index("--shutdown-timeout") + 1]) < 300


def test_exit_code_75_starts_again_and_an_error_does_not(tmp_path: Path) -> None:
    """Evictions, and the exit codes of a notice, are counted; every other exit code ends the job. In a set, the set starts again."""
    spec = build_manifests(read(tmp_path, requeue="3"), "train-0a1b2c")[-1]["spec"]
    assert spec["backoffLimitPerIndex"] == 3
    assert spec["maxFailedIndexes"] == 0
    evicted, requeue, error = spec["podFailurePolicy"]["rules"]
    assert evicted["action"] == requeue["action"] == "Count"
    assert requeue["onExitCodes"]["values"] == error["onExitCodes"]["values"] == [75, 143]
    assert (error["action"], error["onExitCodes"]["operator"]) == ("FailJob", "NotIn")
    endless = build_manifests(read(tmp_path, requeue="always"), "train-0a1b2c")[-1]["spec"]
    assert [one["action"] for one in endless["podFailurePolicy"]["rules"]] == ["Ignore", "Ignore", "FailJob"]
    once = build_manifests(read(tmp_path), "train-0a1b2c")[-1]["spec"]
    assert once["backoffLimit"] == 0
    assert "podFailurePolicy" not in once
    in_set = build_manifests(read(tmp_path, requeue="3", kind="jobset"), "train-0a1b2c")[-1]["spec"]
    assert in_set["failurePolicy"]["maxRestarts"] == 3
    assert in_set["failurePolicy"]["rules"][0] == {"name": "error", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}  # fmt: skip


def test_what_can_not_be_on_kubernetes_is_refused(tmp_path: Path) -> None:
    """No image, a volume without a path, and files that are too large, are one error each."""
    spec = read(tmp_path, image=None)
    with pytest.raises(UsageError, match="needs a container image"):
        build_manifests(spec, "a")
    with pytest.raises(UsageError, match="'ckpt' is not CLAIM:PATH"):
        build_manifests(read(tmp_path, volumes=["ckpt"]), "a")
    # A terabyte without content: it is measured, not read.
    with (tmp_path / "large").open("wb") as large:
        large.truncate(10**12)
    with pytest.raises(UsageError, match="1,000,000,000,000 bytes, and Kubernetes takes 1,000,000"):
        build_manifests(read(tmp_path, files=["large"]), "a")
