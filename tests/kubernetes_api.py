"""A small server that speaks the paths of Kubernetes' API, for the real kubectl: it keeps objects, and checks nothing."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from rankwise.cluster import job
from rankwise.cluster.kubernetes_manifests import WORDS

if TYPE_CHECKING:
    from pathlib import Path

    from rankwise.cluster.job import JobSpec

KINDS = ("job", "jobset", "trainjob")
RICH = {
    "nodes": "2:4", "standby": 1, "gpus_per_node": 8, "cpus_per_node": 16, "memory": "1.5G", "time": "2:00:00", "requeue": "3", "files": ["train.py", "conf"],
    "volumes": ["ckpt:/mnt/ckpt"], "checkpoint": "/mnt/ckpt", "queue": "team", "protect": True, "shm": "16G", "tolerate": ["nvidia.com/gpu"], "priority": "high",
    "env": ["A=$(B)"], "namespace": "ml", "service_account": "trainer", "pull_secrets": ["key"], "node_selector": {"gpu": "h100"},
}  # fmt: skip


def read(folder: Path, **words: object) -> JobSpec:
    """Read a job of a script with two more files."""
    (folder / "conf").mkdir(exist_ok=True)
    (folder / "conf" / "a b.bin").write_bytes(b"\xff\x00")
    (folder / "conf" / "empty").write_text("")
    (folder / "train.py").write_text("import torch\n\nif True:\n    print('é: #')\n")
    return job.read(None, {"on": "kubernetes", "command": ["train.py", "--lr", "$(X)"], "image": "reg:5000/a/b:1", **words}, WORDS, folder)  # fmt: skip


#: What it has: plural, kind, and how the group is called.
RESOURCES = {
    "v1": [("services", "Service"), ("configmaps", "ConfigMap"), ("pods", "Pod"), ("events", "Event")],
    "batch/v1": [("jobs", "Job")],
    "policy/v1": [("poddisruptionbudgets", "PodDisruptionBudget")],
    "jobset.x-k8s.io/v1alpha2": [("jobsets", "JobSet")],
    "trainer.kubeflow.org/v1alpha1": [("trainjobs", "TrainJob"), ("trainingruntimes", "TrainingRuntime")],
}


class KubernetesApi:
    """The server, and what it holds.

    Args:
        folder: For kubectl's configuration.
        groups: The groups that are installed.
    """

    def __init__(self, folder: Path, groups: tuple[str, ...] = tuple(RESOURCES)) -> None:
        self.groups, self.objects = groups, dict[tuple[str, str, str], dict[str, Any]]()
        self.logs: dict[str, str] = {}
        #: Plurals of which nothing can be created, and what is said then.
        self.refused: dict[str, str] = {}
        self.asked: list[str] = []
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                """Say nothing."""

            def answer(self) -> None:
                size = int(self.headers.get("Content-Length", 0))
                code, body = api.answer(self.command, self.path, self.rfile.read(size))
                data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
                self.send_response(code)
                self.send_header("Content-Type", "text/plain" if isinstance(body, str) else "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PATCH = do_DELETE = answer  # noqa: N815 - http.server's names

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        self.config = folder / "kubeconfig"
        url = f"http://127.0.0.1:{self._server.server_port}"
        self.config.write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": url}}], "users": [{"name": "test", "user": {}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": "ml"}}],
        }))  # fmt: skip

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()

    def put(self, plural: str, value: dict[str, Any]) -> None:
        """Add an object to the namespace ml, as a controller would."""
        value.setdefault("metadata", {}).setdefault("namespace", "ml")
        value["metadata"].setdefault("uid", f"uid-{len(self.objects)}")
        self.objects["ml", plural, value["metadata"]["name"]] = value

    def names(self) -> set[str]:
        """Return what is there: kinds in lower case."""
        return {plural for _, plural, _ in self.objects}

    def answer(self, verb: str, url: str, body: bytes) -> tuple[int, dict[str, Any] | str]:
        """Return the code and the body for a request."""
        address = urlsplit(url)
        query = {name: values[0] for name, values in parse_qs(address.query).items()}
        self.asked.append(f"{verb} {address.path}")
        parts = address.path.strip("/").split("/")
        if (found := self._discover(parts)) is not None:
            return 200, found
        if "namespaces" not in parts:
            return _fail(404, "NotFound", "the server could not find the requested resource")
        at = parts.index("namespaces")
        namespace, plural, *rest = parts[at + 1 :]
        return self._serve(verb, namespace, plural, rest, query, body)

    def _serve(self, verb: str, namespace: str, plural: str, rest: list[str], query: dict[str, str], body: bytes) -> tuple[int, dict[str, Any] | str]:  # fmt: skip
        key = (namespace, plural, rest[0] if rest else "")
        if rest[1:] == ["log"]:
            return (200, self.logs[rest[0]]) if rest[0] in self.logs else _fail(400, "BadRequest", f"pod {rest[0]} has no log")  # fmt: skip
        if verb == "POST":
            value = json.loads(body)
            if plural in self.refused:
                return _fail(403, "Forbidden", self.refused[plural])
            value["metadata"] = {**value["metadata"], "namespace": namespace, "uid": f"uid-{plural}"}
            self.objects[namespace, plural, value["metadata"]["name"]] = value
            return 201, value
        if not rest:
            wanted = dict(one.split("=") for one in query.get("labelSelector", "").split(",") if one)
            items = [one for (_, kind, _), one in self.objects.items() if kind == plural and wanted.items() <= one["metadata"].get("labels", {}).items()]  # fmt: skip
            return 200, {**_list_kind(plural), "metadata": {}, "items": items}
        if key not in self.objects:
            return _fail(404, "NotFound", f'{plural} "{rest[0]}" not found')
        if verb == "PATCH":
            self.objects[key]["metadata"].update(json.loads(body)["metadata"])
        if verb == "DELETE":
            return 200, self._delete(key)
        return 200, self.objects[key]

    def _delete(self, key: tuple[str, str, str]) -> dict[str, Any]:
        """Delete an object, and what it owns: as the garbage collector does, a little later."""
        gone = self.objects.pop(key)
        for other, value in list(self.objects.items()):
            if any(owner["uid"] == gone["metadata"]["uid"] for owner in value["metadata"].get("ownerReferences", [])):  # fmt: skip
                del self.objects[other]
        return gone

    def _discover(self, parts: list[str]) -> dict[str, Any] | None:
        named = [group for group in self.groups if "/" in group]
        if parts == ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        if parts == ["apis"]:
            groups = [{"name": name, "versions": [version], "preferredVersion": version} for name, version in ((one.partition("/")[0], {"groupVersion": one, "version": one.partition("/")[2]}) for one in named)]  # fmt: skip
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        if parts[:2] == ["openapi", "v3"]:
            return self._describe("/".join(parts[3:]))
        group = "/".join(parts[1:])
        if parts[0] in {"api", "apis"} and group in self.groups:
            verbs = ["create", "delete", "get", "list", "patch", "watch"]
            resources = [{"name": plural, "singularName": kind.lower(), "kind": kind, "namespaced": True, "verbs": verbs} for plural, kind in RESOURCES[group]]  # fmt: skip
            return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group, "resources": resources}  # fmt: skip
        return None

    def _describe(self, group: str) -> dict[str, Any]:
        """Tell that the server checks fields by itself: kubectl looks for that parameter, and else wants to check them."""
        if not group:
            names = {one: f"{'apis' if '/' in one else 'api'}/{one}" for one in RESOURCES}
            return {"paths": {name: {"serverRelativeURL": f"/openapi/v3/{name}"} for name in names.values()}}
        name, _, version = group.rpartition("/")
        paths = {f"/{plural}": {"patch": {"parameters": [{"name": "fieldValidation", "in": "query"}], "x-kubernetes-group-version-kind": {"group": name, "version": version, "kind": kind}}} for plural, kind in RESOURCES[group]}  # fmt: skip
        return {"openapi": "3.0.0", "info": {"title": "", "version": ""}, "paths": paths}


def _fail(code: int, reason: str, message: str) -> tuple[int, dict[str, Any]]:
    return code, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": message}  # fmt: skip


def _list_kind(plural: str) -> dict[str, str]:
    """Return how a list of a resource is called: `kubectl logs -l` takes a PodList alone."""
    return next({"kind": f"{kind}List", "apiVersion": group} for group, kinds in RESOURCES.items() for name, kind in kinds if name == plural)  # fmt: skip
