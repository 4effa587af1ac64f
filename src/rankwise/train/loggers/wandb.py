"""Curves in Weights & Biases (W&B)."""

from __future__ import annotations

import json
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from rankwise.base.errors import UsageError
from rankwise.base.files import write_atomic
from rankwise.train.events import Logger
from rankwise.train.loggers.outlet import warn

if TYPE_CHECKING:
    from rankwise.train.events import Ended, Evaluated, Report, Started

_FILE = "wandb.json"


@final
class WandB(Logger):
    """Logs ``train/loss``, ``train/lr``, ``train/grad_norm``, ``train/samples_per_s`` (and ``train/tokens_per_s``), other metrics of each report, and ``eval/...``.

    The loss is the mean since the last report, since a call of W&B's costs too much for each step; rate and norm are
    those of the last step. A training that continues does so in the same run: its id is kept in ``wandb.json`` in the
    training's folder. All is drawn over a number ``step`` of our own, since W&B drops what comes with a smaller step
    than it has seen; what was logged of steps that did not happen after all stays there, and is drawn twice.

    No failure of W&B ends the training: there is one warning, and nothing more is logged. It starts with the training,
    so every rank may make this object.

    Args:
        project: The project's name; None: W&B's default.
        folder: Where the run's id is kept; None: the training's folder, if it has one.
        options: For ``wandb.init``: ``entity``, ``name``, ``tags``, ``mode``, ``config`` ...

    Raises:
        UsageError: W&B is not installed.
    """

    def __init__(self, project: str | None = None, *, folder: str | Path | None = None, **options: Any) -> None:
        if find_spec("wandb") is None:
            raise UsageError("WandB() needs the package wandb", hint="pip install 'rankwise[wandb]'")
        self._project, self._options = project, options
        self._folder = None if folder is None else Path(folder)
        self._run: Any = None

    # Nothing to do at a step: this very function says so, and nobody calls it.
    on_step = Logger.on_step

    def on_start(self, started: Started) -> None:
        """Open a run, or the one that the training was in."""
        self._finish(0)
        try:
            self._run = self._open(started)
        except Exception as error:  # noqa: BLE001 - a service that is away raises what it will
            self._give_up("no run could be opened", error)

    def on_report(self, report: Report) -> None:
        """Log a report."""
        values = {
            "train/loss": report.loss,
            "train/samples_per_s": report.samples_per_s,
            "train/epoch": report.epoch,
        }
        if report.tokens_per_s is not None:
            values["train/tokens_per_s"] = report.tokens_per_s
        if report.lrs:
            values["train/lr"] = report.lrs[-1]
        if report.grad_norms:
            values["train/grad_norm"] = report.grad_norms[-1]
        values.update((f"train/{name}", value) for name, value in report.metrics.items())
        self._log(report.step, values)

    def on_evaluation(self, evaluated: Evaluated) -> None:
        """Log the result of an evaluation."""
        self._log(evaluated.step, {f"eval/{name}": value for name, value in evaluated.metrics.items()})

    def on_end(self, ended: Ended) -> None:
        """End the run: as failed if there is something left to do."""
        self._finish(0 if ended.is_over else 1)

    def _open(self, started: Started) -> Any:
        options = {"project": self._project, **self._options}
        facts = {"world_size": started.world_size, "global_batch": started.global_batch, **started.settings}
        options["config"] = {**facts, **(options.get("config") or {})}
        folder = self._folder or started.settings.get("folder")
        file = None if folder is None else Path(folder) / _FILE
        if started.step and file is not None and "id" not in options and (found := _read_id(file)):
            options["id"] = found
            # "allow" and not "must": a run that was deleted there is begun anew.
            options.setdefault("resume", "allow")
        run = import_module("wandb").init(**options)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, json.dumps({"id": run.id, "project": run.project, "entity": run.entity}) + "\n")
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    def _log(self, step: int, values: dict[str, Any]) -> None:
        if self._run is None:
            return
        try:
            self._run.log({"step": step, **values})
        except Exception as error:  # noqa: BLE001 - see on_start
            self._give_up("nothing more is logged", error)

    def _finish(self, exit_code: int) -> None:
        run, self._run = self._run, None
        if run is not None:
            try:
                run.finish(exit_code=exit_code)
            except Exception as error:  # noqa: BLE001 - see on_start
                self._give_up("the run could not be ended", error)

    def _give_up(self, what: str, error: Exception) -> None:
        self._run = None
        reason = next(iter(str(error).splitlines()), "")
        warn(f"W&B: {what}, and the training continues: {type(error).__name__}: {reason}")


def _read_id(file: Path) -> str | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(file.read_text(encoding="utf-8"))["id"])
    return None
