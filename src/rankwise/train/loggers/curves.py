"""A picture of the run: loss, metrics, learning rate and speed by step."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, final

from rankwise.base.clock import SYSTEM_CLOCK, Clock
from rankwise.base.errors import UsageError
from rankwise.train.events import Logger
from rankwise.train.journal import JOURNAL, read_journal
from rankwise.train.loggers import drawing
from rankwise.train.loggers.drawing import Course
from rankwise.train.loggers.outlet import Outlet, warn

if TYPE_CHECKING:
    from rankwise.train.events import Ended, Evaluated, Report, Started

_EVERY_S = 60.0
#: At most this share of the time is spent on drawing while the training runs.
_SHARE = 0.01


@final
class Curves(Logger):
    """Draws the run into an SVG file: at the end, and while it runs at most once in ``every_s`` seconds.

    Needs matplotlib; without it one line says so, and nothing is drawn. After a resume what came before is read from
    ``journal.jsonl`` beside the picture. Drawing takes about a second; while the training runs, it takes one hundredth
    of the time at most.

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
            Outlet().say(f"rankwise: {self._path} is not drawn without matplotlib: pip install 'rankwise[train]'")
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
            drawing.draw(self._course, self._path)
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
