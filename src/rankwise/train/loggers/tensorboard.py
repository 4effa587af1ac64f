"""Curves in TensorBoard."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, final

from rankwise.base.errors import UsageError
from rankwise.train.events import Logger
from rankwise.train.loggers.outlet import warn

if TYPE_CHECKING:
    from pathlib import Path

    from rankwise.train.events import Ended, Evaluated, Report, Started


@final
class TensorBoard(Logger):
    """Writes event files for TensorBoard.

    ``train/loss``, ``train/lr`` and ``train/grad_norm`` are there for each step, ``train/samples_per_s``,
    ``train/tokens_per_s`` where the loss counts tokens, and other metrics for each report, and ``eval/...`` for each
    evaluation. A training that continues writes a file of its own, and makes TensorBoard forget what was recorded of
    later steps. Files are opened when the training starts, so every rank may make this object.

    Args:
        folder: Where the event files go: a folder for each run.

    Raises:
        UsageError: TensorBoard is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        if find_spec("tensorboard") is None:
            raise UsageError("TensorBoard() needs the package tensorboard", hint="pip install 'rankwise[tensorboard]'")
        self._folder = folder
        self._writer: Any = None
        self._summary: Any = None

    # Nothing to do at a step: this very function says so, and nobody calls it.
    on_step = Logger.on_step

    def on_start(self, started: Started) -> None:
        """Open an event file, and note the settings."""
        self._close()
        try:
            # Imported here: it takes a second, and only rank 0 needs it.
            self._summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
            writer = import_module("torch.utils.tensorboard").SummaryWriter
            self._writer = writer(str(self._folder), purge_step=started.step + 1, max_queue=1000)
            facts = {
                "world_size": started.world_size,
                "global_batch": started.global_batch,
                **started.settings,
            }
            table = "".join(f"| {name} | {value} |\n" for name, value in facts.items())
            self._writer.add_text("settings", f"| setting | value |\n| --- | --- |\n{table}", started.step)
        except (OSError, ImportError) as error:
            self._writer = None
            warn(f"nothing is written for TensorBoard in {self._folder}: {error}")

    def on_report(self, report: Report) -> None:
        """Write the steps since the last report."""
        first = report.step - len(report.losses) + 1
        rows = {first + at: {"train/loss": loss} for at, loss in enumerate(report.losses)}
        for name, numbers in (("train/lr", report.lrs), ("train/grad_norm", report.grad_norms)):
            for step, number in zip(rows, numbers, strict=False):
                rows[step][name] = number
        last = rows.setdefault(report.step, {})
        last["train/samples_per_s"] = report.samples_per_s
        if report.tokens_per_s is not None:
            last["train/tokens_per_s"] = report.tokens_per_s
        last.update((f"train/{name}", value) for name, value in report.metrics.items())
        self._write(rows)

    def on_evaluation(self, evaluated: Evaluated) -> None:
        """Write the metrics of an evaluation."""
        self._write({evaluated.step: {f"eval/{name}": value for name, value in evaluated.metrics.items()}})

    def on_end(self, ended: Ended) -> None:  # noqa: ARG002 - the protocol's form
        """Write what is still held back, and close the file."""
        self._close()

    def _write(self, rows: dict[int, dict[str, float]]) -> None:
        if self._writer is None:
            return
        make, value = self._summary, self._summary.Value
        try:
            for step, values in rows.items():
                # All of a step in one record: add_scalar() would cost one for each.
                record = make(value=[value(tag=tag, simple_value=number) for tag, number in values.items()])
                self._writer.file_writer.add_summary(record, step)
            # What a kill takes away would be missing when the training goes on.
            self._writer.flush()
        except OSError as error:  # of the writing thread, told at the next call
            self._writer = None
            warn(f"nothing more is written for TensorBoard in {self._folder}: {error}")

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close()
            except OSError as error:
                warn(f"the last lines for TensorBoard in {self._folder} are lost: {error}")
