"""Tables of a training for spreadsheets and pandas: its steps, its reports, its evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from rankwise.train.events import Logger
from rankwise.train.loggers.csv_table import CsvTable
from rankwise.train.loggers.outlet import warn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rankwise.train.events import Ended, Evaluated, Report, Started

_STEPS = ("step", "epoch", "samples", "loss", "lr", "grad_norm")
_REPORTS = ("step", "epoch", "loss", "lr", "samples_per_s", "tokens_per_s")
_EVALUATIONS = ("step", "epoch")


@final
class CsvLines(Logger):
    """Writes three tables: steps.csv, and reports.csv and evaluations.csv beside it.

    steps.csv has a row for each step: ``step,epoch,samples,loss,lr,grad_norm``; the samples are known at the last step
        of each report.
    reports.csv has a row for each report: ``step,epoch,loss,lr,samples_per_s,tokens_per_s`` and what else the loss
        function returns,
    means since the report before. evaluations.csv has a row for each evaluation: ``step,epoch`` and its metrics.

    What is unknown is empty; a metric that appears later gets a column then. A new training overwrites the tables, and
    one that continues cuts off the rows of steps that did not happen after all; a file with other columns is renamed to
    ``steps.csv.old``. Numbers have all their digits; what is not finite is ``nan``, ``inf`` or ``-inf``.

    What can't be written (a full disk) is lost, with a warning; the training continues.

    Args:
        path: The table of steps; its folder is made when the training starts. The others are called like it, with
            "reports" and "evaluations" in place of "steps", or behind the name if that is another.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        self._has_warned = False
        self._steps = CsvTable(path, _STEPS, self._complain)
        self._reports = CsvTable(_name_beside(path, "reports"), _REPORTS, self._complain, grows=True)
        self._evaluations = CsvTable(_name_beside(path, "evaluations"), _EVALUATIONS, self._complain, grows=True)

    # Nothing to do at a step: this very function says so, and nobody calls it.
    on_step = Logger.on_step

    def on_start(self, started: Started) -> None:
        """Open the tables, and take out what did not happen."""
        for table in (self._steps, self._reports, self._evaluations):
            table.open(started.step)

    def on_report(self, report: Report) -> None:
        """Write the steps since the last report, and the report itself."""
        self._steps.add(_to_rows(report))
        row = {
            "step": report.step,
            "epoch": report.epoch,
            "loss": report.loss,
            "lr": report.lrs[-1] if report.lrs else None,
            "samples_per_s": report.samples_per_s,
            "tokens_per_s": report.tokens_per_s,
        }
        self._reports.add([row | _name_metrics(report.metrics, _REPORTS)])

    def on_evaluation(self, evaluated: Evaluated) -> None:
        """Write the metrics of an evaluation."""
        row = {"step": evaluated.step, "epoch": evaluated.epoch}
        self._evaluations.add([row | _name_metrics(evaluated.metrics, _EVALUATIONS)])

    def on_end(self, ended: Ended) -> None:  # noqa: ARG002 - the protocol's form
        """Close the tables."""
        for table in (self._steps, self._reports, self._evaluations):
            table.close()

    def _complain(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(what)


def _name_beside(path: Path, kind: str) -> Path:
    name = kind if path.stem == "steps" else f"{path.stem}_{kind}"
    return path.with_name(name + path.suffix)


def _name_metrics(metrics: Mapping[str, float], columns: tuple[str, ...]) -> dict[str, Any]:
    """Return metrics by names that no other column has, and that a header can hold."""
    names = {name: " ".join(name.splitlines()) for name in metrics}
    return {
        f"metric {names[name]}" if names[name] in columns else names[name]: value for name, value in metrics.items()
    }


def _to_rows(report: Report) -> Iterator[dict[str, Any]]:
    count = len(report.losses)
    first = report.step - count + 1
    epochs, lrs, norms = (_pad(values, count) for values in (report.epochs, report.lrs, report.grad_norms))
    for at, loss in enumerate(report.losses):
        samples = report.samples if at == count - 1 else None
        yield dict(zip(_STEPS, (first + at, epochs[at], samples, loss, lrs[at], norms[at]), strict=True))


def _pad(values: tuple[float, ...] | tuple[int, ...], count: int) -> tuple[Any, ...]:
    return values if len(values) == count else (None,) * count
