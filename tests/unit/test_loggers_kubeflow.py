"""A TrainJob's status says how far the training is; a controller that does not answer ends no training."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from rankwise.train.events import Evaluated
from rankwise.train.loggers import kubeflow
from rankwise.train.loggers.choice import choose_loggers
from rankwise.train.loggers.kubeflow import KubeflowStatus
from told_training import ended, report, started

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str, dict[str, Any]]]]:
    """What a controller hears over TLS: path, token, body; its variables are set, and nothing is throttled."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    key, certificate = tmp_path / "key", tmp_path / "ca.crt"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-keyout", key, "-out", certificate, *names], check=True, capture_output=True)  # fmt: skip
    found: list[tuple[str, str, dict[str, Any]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found.append((self.path, self.headers["Authorization"], body["trainerStatus"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    (tmp_path / "token").write_text("one\n")
    path = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/ml/trainjobs/a/status"
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"https://127.0.0.1:{server.server_port}{path}")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(certificate))
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
    monkeypatch.setattr(kubeflow, "_EVERY_S", 0.0)
    yield found
    server.shutdown()
    thread.join()
    server.server_close()


def wait_number(heard: list[Any], number: int) -> None:
    """Wait until the controller has heard so much."""
    waiting = threading.Event()
    while len(heard) < number:
        waiting.wait(0.01)


def test_the_controller_hears_how_far_it_is(heard: list[Any], tmp_path: Path) -> None:
    """Percent, seconds left and metrics as texts, by the token that is valid now; at the end it is all done."""
    logger = KubeflowStatus()
    logger.on_start(started())
    logger.on_evaluation(Evaluated(step=4, epoch=0, metrics={"accuracy": 0.5}, seconds=1.0))
    logger.on_report(report(8, 0.5, eta_s=61.5))
    wait_number(heard, 1)
    (tmp_path / "token").write_text("two\n")
    logger.on_end(ended(20))
    (path, token, first), (_, other, last) = heard
    assert path.endswith("/trainjobs/a/status")
    assert (token, other) == ("Bearer one", "Bearer two")
    assert (first["progressPercentage"], first["estimatedRemainingSeconds"]) == (40, 62)
    assert {"name": "eval/accuracy", "value": "0.5"} in first["metrics"]
    assert all(isinstance(one["value"], str) for one in first["metrics"])
    assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (100, 0)


def test_a_training_that_will_go_on_is_not_done(heard: list[Any]) -> None:
    """After a notice, the last report stands: the next start continues from there."""
    logger = KubeflowStatus()
    logger.on_start(started())
    logger.on_report(report(8, 0.5))
    logger.on_end(ended(8, "preempted"))
    assert [one.get("progressPercentage") for _, _, one in heard] == [40]


def test_what_is_said_holds_to_the_published_schema(heard: list[Any]) -> None:
    """The body is one that the controller's own model takes, with nothing left over."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api")
    logger = KubeflowStatus()
    logger.on_start(started())
    logger.on_report(report(8, 0.5))
    logger.on_end(ended(20))
    body = {"trainerStatus": heard[-1][2]}
    assert set(models.TrainerV1alpha1UpdateTrainJobStatusRequest.from_dict(body).to_dict()["trainerStatus"]) == set(body["trainerStatus"])  # fmt: skip


def test_a_controller_that_is_away_is_one_warning(heard: list[Any], capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:  # fmt: skip
    """The training continues, and nothing is said twice."""
    (tmp_path / "token").unlink()
    logger = KubeflowStatus()
    for _ in range(2):
        logger.on_start(started())
        logger.on_report(report(8, 0.5))
        logger.on_end(ended(20))
    assert heard == []
    assert capfd.readouterr().err.count("the status of the TrainJob could not be written") == 1


def test_it_is_there_where_the_controller_asks(heard: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """By its variable alone: a script says nothing of it."""
    assert [type(one) for one in choose_loggers(None, [], progress=False)] == [KubeflowStatus]
    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_URL")
    assert choose_loggers(None, [], progress=False) == []
