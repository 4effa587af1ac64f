"""A picture of the run: loss, metrics, learning rate and speed by step."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, final

from rankwise.base.clock import SYSTEM_CLOCK, Clock
from rankwise.base.errors import UsageError
from rankwise.train.events import Logger
from rankwise.train.journal import JOURNAL, read_journal
from rankwise.train.loggers.outlet import Outlet, warn

if TYPE_CHECKING:
    from rankwise.train.events import Ended, Evaluated, Report, Started

_EVERY_S = 60.0
#: At most this share of the time is spent on drawing while the training runs.
_SHARE = 0.01


@final
@dataclass(slots=True)
class Curve:
    """Values by step; compact, since a long training has millions."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: int, value: float) -> None:
        """Append a point; steps grow."""
        self.steps.append(step)
        self.values.append(value)

    def cut(self, step: int) -> None:
        """Forget what is after ``step``."""
        while self.steps and self.steps[-1] > step:
            self.steps.pop()
            self.values.pop()


@final
@dataclass(slots=True, kw_only=True)
class Course:
    """What has happened in a run.

    Attributes:
        loss: Of each step.
        lr: Of each step.
        speed: At each report.
        speed_unit: What is counted for it: samples, or tokens where the loss counts them.
        means: What else the loss function returns, by name, at each report.
        metrics: Of evaluations, by name.
        resumes: Steps after which the training was started again.
        best: The step of the best evaluation; None: nobody said.
    """

    loss: Curve = field(default_factory=Curve)
    lr: Curve = field(default_factory=Curve)
    speed: Curve = field(default_factory=Curve)
    speed_unit: str = "samples"
    means: dict[str, Curve] = field(default_factory=dict)
    metrics: dict[str, Curve] = field(default_factory=dict)
    resumes: list[int] = field(default_factory=list)
    best: int | None = None

    def add_report(self, report: Report) -> None:
        """Note a report."""
        first = report.step - len(report.losses) + 1
        for at, loss in enumerate(report.losses):
            self.loss.add(first + at, loss)
        first = report.step - len(report.lrs) + 1
        for at, lr in enumerate(report.lrs):
            self.lr.add(first + at, lr)
        for name, value in report.metrics.items():
            self.means.setdefault(name, Curve()).add(report.step, value)
        if report.tokens_per_s is None:
            self.speed.add(report.step, report.samples_per_s)
        else:
            self.speed.add(report.step, report.tokens_per_s)
            self.speed_unit = "tokens"

    def add_evaluation(self, evaluated: Evaluated) -> None:
        """Note an evaluation."""
        for name, value in evaluated.metrics.items():
            self.metrics.setdefault(name, Curve()).add(evaluated.step, value)
        if evaluated.is_best:
            self.best = evaluated.step

    def go_on(self, step: int) -> None:
        """Forget what is after ``step``, where the training goes on."""
        for curve in (self.loss, self.lr, self.speed, *self.means.values(), *self.metrics.values()):
            curve.cut(step)
        self.resumes = [one for one in self.resumes if one < step] + [step]
        if self.best is not None and self.best > step:
            self.best = None


@final
class Curves(Logger):
    """Draws the run into an SVG file: at the end, and while it runs at most once in ``every_s`` seconds.

    Needs matplotlib; without it one line says so, and nothing is drawn. After a resume what came before is read from
    ``journal.jsonl`` beside the picture. Drawing takes about a second; while the training runs, it takes one hundredth of the time at most.

    Args:
        path: The file; its folder is made.
        every_s: Seconds between two drawings.
        clock: Where time comes from.
    """

    def __init__(self, path: str | Path, *, every_s: float = _EVERY_S, clock: Clock = SYSTEM_CLOCK) -> None:
        self._path, self._every_s, self._clock = Path(path), every_s, clock
        self._course = Course()
        self._is_on = False
        self._next_s = 0.0

    # Nothing to do at a step: this very function says so, and nobody calls it.
    on_step = Logger.on_step

    def on_start(self, started: Started) -> None:
        """Read what came before."""
        self._is_on = find_spec("matplotlib") is not None
        if not self._is_on:
            Outlet().say(
                f"rankwise: {self._path} is not drawn without matplotlib: pip install 'rankwise[train]'"
            )
            return
        self._course = _read_course(self._path.with_name(JOURNAL), started.step) if started.step else Course()
        self._next_s = self._clock.monotonic() + self._every_s

    def on_report(self, report: Report) -> None:
        """Note a report; draw if it is time."""
        if self._is_on:
            self._course.add_report(report)
            if self._clock.monotonic() >= self._next_s:
                self._draw()

    def on_evaluation(self, evaluated: Evaluated) -> None:
        """Note an evaluation."""
        if self._is_on:
            self._course.add_evaluation(evaluated)

    def on_end(self, ended: Ended) -> None:  # noqa: ARG002 - the protocol's form
        """Draw for the last time."""
        if self._is_on and self._course.speed.steps:
            self._draw()

    def _draw(self) -> None:
        start_s = self._clock.monotonic()
        try:
            from rankwise.train.loggers.drawing import draw  # noqa: PLC0415 - loads matplotlib, half a second

            draw(self._course, self._path)
        except Exception as error:  # noqa: BLE001 - fonts, styles, a broken installation, a full disk: only a picture
            self._is_on = False
            warn(f"{self._path} could not be drawn: {type(error).__name__}: {error}")
        end_s = self._clock.monotonic()
        self._next_s = end_s + max(self._every_s, (end_s - start_s) / _SHARE)


def _read_course(journal: Path, step: int) -> Course:
    course = Course()
    try:
        journal_ = read_journal(journal)
    except UsageError:
        journal_ = None  # there is none, or of another version: the picture begins here
    if journal_ is not None:
        course.resumes = [start.started.step for start in journal_.starts if start.started.step]
        for report in journal_.reports:
            course.add_report(report)
        for evaluated in journal_.evaluations:
            course.add_evaluation(evaluated)
    course.go_on(step)
    return course
