"""Progress in the status of a Kubeflow TrainJob, where its controller asks for it (feature gate TrainJobStatus, since Trainer 2.2).

The controller tells the pods a URL, a certificate and a token, which changes from time to time:
https://github.com/kubeflow/trainer/blob/master/docs/user-guides/trainjob-progress.md.
"""

from __future__ import annotations

import json
import math
import ssl
import threading
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, final
from urllib.request import Request, urlopen

from rankwise.base import environ
from rankwise.train.events import Logger
from rankwise.train.loggers.outlet import warn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwise.train.events import Ended, Evaluated, Report, Started

URL = "KUBEFLOW_TRAINER_SERVER_URL"
_CERTIFICATE, _TOKEN = "KUBEFLOW_TRAINER_SERVER_CA_CERT", "KUBEFLOW_TRAINER_SERVER_TOKEN"
#: The controller asks for no more than one call in so long.
_EVERY_S = 5.0
_TIMEOUT_S = 5.0
#: What the API takes: so many metrics, names and values of so many characters.
_MOST_METRICS, _LONGEST = 256, 64


@final
class KubeflowStatus(Logger):
    """Tells the TrainJob's controller how far the training is: percent, seconds left, loss, learning rate and other metrics.

    It speaks in a thread of its own, so that a slow controller delays no step; what it has missed it leaves out. A
    controller that does not answer is one warning, and is tried again at the next report.
    """

    def __init__(self) -> None:
        self._num_steps: int | None = None
        self._latest: dict[str, Any] | None = None
        self._metrics: dict[str, str] = {}
        self._news, self._over = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._has_warned = False

    # Nothing to do at a step: this very function says so, and nobody calls it.
    on_step = Logger.on_step

    def on_start(self, started: Started) -> None:
        """Begin to speak."""
        self._num_steps = started.num_steps
        self._news.clear()
        self._over.clear()
        self._thread = threading.Thread(target=self._speak, name="rankwise-kubeflow", daemon=True)
        self._thread.start()

    def on_report(self, report: Report) -> None:
        """Pass on how far it is."""
        lr = {"lr": report.lrs[-1]} if report.lrs else {}
        self._note({"loss": report.loss, **lr, **report.metrics})
        percent = None if not self._num_steps else min(99, 100 * report.step // self._num_steps)
        self._pass_on(percent, report.eta_s)

    def on_evaluation(self, evaluated: Evaluated) -> None:
        """Keep the result, for the next report."""
        self._note({f"eval/{name}": value for name, value in evaluated.metrics.items()})

    def on_end(self, ended: Ended) -> None:
        """Say that it is done, unless it is to be started again."""
        if ended.is_over:
            self._pass_on(100, 0.0)
        self._over.set()
        self._news.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * _TIMEOUT_S)

    def _note(self, metrics: Mapping[str, float]) -> None:
        self._metrics |= {name[:_LONGEST]: f"{value:.6g}" for name, value in metrics.items() if name}

    def _pass_on(self, percent: int | None, left_s: float | None) -> None:
        status: dict[str, Any] = {"lastUpdatedTime": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")}
        if percent is not None:
            status["progressPercentage"] = percent
        if left_s is not None and math.isfinite(left_s):
            status["estimatedRemainingSeconds"] = min(round(left_s), 2**31 - 1)
        status["metrics"] = [
            {"name": name, "value": value} for name, value in list(self._metrics.items())[:_MOST_METRICS]
        ]
        self._latest = {"trainerStatus": status}
        self._news.set()

    def _speak(self) -> None:
        while True:
            self._news.wait()
            self._news.clear()
            is_last = self._over.is_set()  # asked before: what is said until then is passed on
            status, self._latest = self._latest, None
            if status is not None:
                self._post(status)
            if is_last:
                return
            self._over.wait(_EVERY_S)

    def _post(self, status: dict[str, Any]) -> None:
        try:
            token = Path(environ.get(_TOKEN)).read_text(encoding="utf-8").strip()
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            context = ssl.create_default_context(cafile=environ.get(_CERTIFICATE) or None)
            request = Request(environ.get(URL), data=json.dumps(status).encode(), headers=headers, method="POST")
            with urlopen(request, timeout=_TIMEOUT_S, context=context):
                pass
        except (OSError, ValueError) as error:
            if not self._has_warned:
                self._has_warned = True
                warn(
                    f"Kubeflow: the status of the TrainJob could not be written, and the training continues: {type(error).__name__}: {error}"
                )
