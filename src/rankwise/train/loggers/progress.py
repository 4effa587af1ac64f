"""Show how a training gets on: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, TextIO, final

from rankwise.base.clock import SYSTEM_CLOCK, Clock
from rankwise.train.events import Logger
from rankwise.train.loggers.bar import BAR_RANK, Bar, Moment, can_draw
from rankwise.train.loggers.number_text import (
    describe_end,
    describe_epoch,
    describe_evaluation,
    describe_report,
    describe_speed,
    describe_start,
    format_number,
    format_seconds,
)
from rankwise.train.loggers.outlet import Outlet, hint

if TYPE_CHECKING:
    from rankwise.train.events import Ended, Evaluated, Report, Started

#: Steps whose losses are shown as one number: a single step's is noise, and reports cover as many as the machine is
#: fast.
_NUM_LOSSES = 10


@final
class Progress(Logger):
    """Shows people the progress of the training; no error here ends it.

    On a terminal there is a bar (with rich installed), and evaluations are lines above it. Elsewhere, as in a log file,
    a report is a line of its own, but not more than one in ``every_s`` seconds; the first one, the last one and
    evaluations always are. Both go to standard error, which leaves standard output to the script.

    The loss is the mean of the last ten steps' losses everywhere, also in the last line, so that two equal runs show
    the same number at the same step however often they report. The speed is in tokens where the loss counts them.

    Args:
        stream: Where to; None: standard error.
        every_s: Seconds between two plain lines.
        clock: Where time comes from.
    """

    def __init__(self, stream: TextIO | None = None, *, every_s: float = 10.0, clock: Clock = SYSTEM_CLOCK) -> None:
        self._stream, self._every_s, self._clock = stream, every_s, clock
        self._outlet: Outlet | None = None
        self._bar: Bar | None = None
        self._started: Started | None = None
        self._start_s = 0.0
        self._step = 0
        self._report: Report | None = None
        self._losses: deque[float] = deque(maxlen=_NUM_LOSSES)
        self._loss = 0.0
        self._report_s = 0.0
        self._unreported: Report | None = None
        self._reported_s: float | None = None

    def on_start(self, started: Started) -> None:
        """Say what is about to be trained, and show the bar."""
        self._close()
        # Standard error is looked up now: it may have been another when this object was made.
        self._outlet = outlet = Outlet(self._stream)
        self._started, self._step = started, started.step
        self._report = self._unreported = self._reported_s = None
        self._losses.clear()
        self._start_s = self._clock.monotonic()
        outlet.say(f"rankwise: {describe_start(started)}")
        if can_draw(outlet):
            try:
                self._bar = Bar(outlet, self._look)
            except ImportError:
                hint(outlet, "pip install 'rankwise[train]' for a progress bar")
                return
            self._bar.start()

    def on_step(self, step: int) -> None:
        """Move the bar, when it is drawn next."""
        self._step = step

    def on_report(self, report: Report) -> None:
        """Show the report: beside the bar, or as a line if the last one was long ago."""
        now_s = self._clock.monotonic()
        self._losses.extend(report.losses)
        self._loss = sum(self._losses) / max(1, len(self._losses))
        self._step, self._report_s, self._report = report.step, now_s, report
        if self._bar is not None:
            return
        if self._reported_s is None or now_s - self._reported_s >= self._every_s:
            self._tell(report, now_s)
        else:
            self._unreported = report

    def on_evaluation(self, evaluated: Evaluated) -> None:
        """Say what the evaluation has found, and the report before it."""
        if self._unreported is not None:
            self._tell(self._unreported, self._report_s)
        if self._bar is not None:
            self._bar.say(describe_evaluation(evaluated, self._started))
        elif self._outlet is not None:
            self._outlet.say(describe_evaluation(evaluated, self._started))

    def on_end(self, ended: Ended) -> None:
        """Take the bar away, and say how it ended."""
        outlet = self._outlet or Outlet(self._stream)
        self._close()
        if self._unreported is not None:
            self._tell(self._unreported, self._report_s)
        loss = None if self._report is None else self._loss
        outlet.say(f"rankwise: {describe_end(ended, self._started, loss)}")

    def _tell(self, report: Report, now_s: float) -> None:
        if self._outlet is not None:
            # The report that is told is always the last one that came, so the loss is that of its steps.
            self._outlet.say(describe_report(report, self._started, self._loss))
        self._reported_s, self._unreported = now_s, None

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _look(self) -> Moment:
        # In the bar's thread: every attribute is read once, since the training may set it in between.
        started, report = self._started, self._report
        total = None if started is None else started.num_steps
        steps = f"{self._step}/{total}" if total is not None else f"step {self._step}"
        now_s = self._clock.monotonic()
        if report is None:
            return Moment(
                step=self._step,
                num_steps=total,
                facts=((0, steps), (1, f"{format_seconds(now_s - self._start_s)} since the start")),
            )
        facts = [
            (BAR_RANK + 1, describe_epoch(report.epoch, started)),
            (0, steps),
            (1, f"loss {format_number(self._loss)}"),
        ]
        if report.lrs:
            facts.append((4, f"lr {format_number(report.lrs[-1])}"))
        facts.append((3, describe_speed(report)))
        if report.eta_s is None:
            facts.append((2, format_seconds(now_s - self._start_s)))
        else:
            facts.append((2, f"{format_seconds(report.eta_s - (now_s - self._report_s))} left"))
        facts += [
            (BAR_RANK + 2 + at, f"{name} {format_number(value)}")
            for at, (name, value) in enumerate(report.metrics.items())
        ]
        return Moment(step=self._step, num_steps=total, facts=tuple(facts))
