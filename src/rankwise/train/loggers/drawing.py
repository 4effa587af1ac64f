"""Draws a run's curves with matplotlib, without touching the backend or the style that the user has chosen."""

from __future__ import annotations

import io
import math
from array import array
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, final

from rankwise.base.files import write_atomic

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rankwise.train.events import Evaluated, Report

_MAX_POINTS = 800
_MAX_METRICS = 6
_PER_ROW = 3
#: With fewer points a window of one twentieth holds one of them, and smoothing does nothing.
_FEWEST_SMOOTHED = 40
_BLUE, _ORANGE, _GREEN, _GREY = "#2563a8", "#c2571a", "#2e7d4f", "#7a7a7a"
_STYLE = {
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",
    "figure.titlesize": 11.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.formatter.useoffset": False,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    # The same run gives the same file.
    "svg.hashsalt": "rankwise",
    "svg.fonttype": "path",
}


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
@dataclass(frozen=True, slots=True)
class _Panel:
    """A small picture: one or two curves over the steps."""

    title: str
    curves: tuple[tuple[Curve, str, str], ...]
    is_speed: bool = False


def draw(course: Course, path: Path) -> None:
    """Draw a run into an SVG file, under the name of its folder.

    Raises:
        ImportError: There is no matplotlib.
        OSError: The file can't be written.
    """
    matplotlib = import_module("matplotlib")
    figure_class = import_module("matplotlib.figure").Figure
    canvas_class = import_module("matplotlib.backends.backend_svg").FigureCanvasSVG
    # A user's style (dark, LaTeX) would give another picture, or none; the backend is not ours to set.
    defaults = {key: value for key, value in matplotlib.rcParamsDefault.items() if not key.startswith("backend")}
    buffer = io.BytesIO()
    with matplotlib.rc_context({**defaults, **_STYLE}):
        small = _choose_panels(course)
        last = max((curve.steps[-1] for panel in small for curve, _, _ in panel.curves), default=1) * 1.03
        columns = 2 if len(small) == 4 else min(_PER_ROW, len(small))
        rows = math.ceil(len(small) / max(1, columns))
        figure = figure_class(figsize=(9.0, 3.4 + 2.1 * rows), layout="constrained", facecolor="white")
        canvas_class(figure)
        figure.suptitle(_escape(path.resolve().parent.name), x=0.01, ha="left", weight="bold")
        grid = figure.add_gridspec(1 + rows, max(1, columns), height_ratios=[1.7] + [1.0] * rows)
        axes = figure.add_subplot(grid[0, :])
        _draw_loss(axes, course)
        axes.set_xlabel("step")
        for at, panel in enumerate(small):
            axes = figure.add_subplot(grid[1 + at // columns, at % columns])
            _draw_small(axes, panel, course)
            axes.set_xlim(0, last)
            # Once below each column: the steps are the same in all.
            if at + columns >= len(small):
                axes.set_xlabel("step")
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, buffer.getvalue())


def _choose_panels(course: Course) -> list[_Panel]:
    """Return what is drawn below the loss: the metrics, of training and evaluation together, the learning rate, the speed."""
    panels = []
    # The evaluation's loss stands beside the training's.
    names = [name for name in {**course.metrics, **course.means} if name != "loss"]
    for name in names[:_MAX_METRICS]:
        known = (
            (course.means.get(name), _BLUE, "training"),
            (course.metrics.get(name), _ORANGE, "evaluation"),
        )
        curves = tuple((curve, colour, kind) for curve, colour, kind in known if curve is not None and curve.steps)
        if curves:
            panels.append(_Panel(name if len(curves) > 1 else f"{curves[0][2]}: {name}", curves))
    if course.lr.steps:
        panels.append(_Panel("learning rate", ((course.lr, _GREEN, ""),)))
    if course.speed.steps:
        panels.append(_Panel(f"{course.speed_unit} a second", ((course.speed, _GREY, ""),), is_speed=True))
    return panels


def _draw_loss(axes: Any, course: Course) -> None:
    steps, lows, means, highs = thin(course.loss.steps, course.loss.values)
    if len(course.loss.steps) > len(steps):
        axes.fill_between(steps, lows, highs, color=_BLUE, alpha=0.2, linewidth=0, label="each step")
        axes.plot(steps, smooth(means), color=_BLUE, linewidth=1.6, label="smoothed")
    elif len(steps) >= _FEWEST_SMOOTHED:
        axes.plot(steps, means, color=_BLUE, alpha=0.35, linewidth=0.8, label="each step")
        axes.plot(steps, smooth(means), color=_BLUE, linewidth=1.6, label="smoothed")
    else:
        axes.plot(steps, means, color=_BLUE, linewidth=1.2, marker=".", label="each step")
    if "loss" in course.metrics:
        curve = course.metrics["loss"]
        axes.plot(
            curve.steps,
            curve.values,
            color=_ORANGE,
            marker="o",
            markersize=3,
            linewidth=1.0,
            label="evaluation",
        )
        _mark_best(axes, curve, course.best)
    _mark_resumes(axes, course, label="started again")
    gone = [step for step, value in zip(course.loss.steps, course.loss.values, strict=True) if not math.isfinite(value)]
    if gone:
        axes.axvline(
            gone[0],
            color="#b00020",
            linewidth=1.0,
            label=f"NaN or infinite at {len(gone)} steps, first {gone[0]}",
        )
    finite = sorted(value for value in course.loss.values if math.isfinite(value))
    # A curve that falls by orders of magnitude is a flat line on a linear scale.
    if finite and finite[0] > 0 and finite[-1] / finite[0] > 50:
        axes.set_yscale("log")
    axes.set_title("loss")
    axes.locator_params(axis="x", integer=True)
    axes.xaxis.set_major_formatter(_with_letters())
    axes.margins(x=0.01)
    axes.legend(loc="upper right")


def _draw_small(axes: Any, panel: _Panel, course: Course) -> None:
    heights: set[float] = set()
    for curve, colour, name in panel.curves:
        steps, _, means, _ = thin(curve.steps, curve.values)
        heights |= {value for value in means if math.isfinite(value)}
        few = len(steps) <= 40
        label = name if len(panel.curves) > 1 else None  # its title says it
        axes.plot(steps, means, color=colour, linewidth=1.2, marker="o" if few else None, markersize=3, label=label)
        if name == "evaluation":
            _mark_best(axes, curve, course.best)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="best")
    _mark_resumes(axes, course)
    axes.set_title(_escape(panel.title))
    axes.locator_params(axis="x", nbins=5, integer=True)
    axes.xaxis.set_major_formatter(_with_letters())
    axes.locator_params(axis="y", nbins=5)
    if panel.is_speed:
        axes.yaxis.set_major_formatter(_with_letters())
    # A scale of its own would show a constant as 0.0096 to 0.0104.
    if heights and min(heights) >= 0 < max(heights) and (panel.is_speed or len(heights) == 1):
        axes.set_ylim(0, 1.15 * max(heights))


def _escape(name: str) -> str:
    """Return a user's word as it is drawn: dollar signs would be read as mathematics."""
    return name.replace("$", r"\$")


def _with_letters() -> Any:
    """Return what writes 200000 as 200k."""
    return import_module("matplotlib.ticker").EngFormatter(sep="")


def _mark_best(axes: Any, curve: Curve, best: int | None) -> None:
    if best is not None and best in curve.steps:
        height = curve.values[curve.steps.index(best)]
        axes.plot([best], [height], marker="*", markersize=10, color=_ORANGE, linestyle="", label=f"best: step {best}")


def _mark_resumes(axes: Any, course: Course, label: str | None = None) -> None:
    for number, step in enumerate(course.resumes):
        axes.axvline(step, color=_GREY, linewidth=0.8, linestyle=":", label=label if number == 0 else None)


def thin(
    steps: Sequence[int], values: Sequence[float], max_points: int = _MAX_POINTS
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Make a curve short enough to draw.

    Args:
        steps: Growing.
        values: Of each step.
        max_points: How many points may be left.

    Returns:
        Steps, and the least, mean and greatest value at each; what is not finite is left out, and NaN where nothing
        else is.
    """
    size = max(1, math.ceil(len(values) / max_points))
    at, lows, means, highs = [], [], [], []
    for begin in range(0, len(values), size):
        some = [value for value in values[begin : begin + size] if math.isfinite(value)]
        at.append(sum(steps[begin : begin + size]) / len(steps[begin : begin + size]))
        lows.append(min(some, default=math.nan))
        means.append(sum(some) / len(some) if some else math.nan)
        highs.append(max(some, default=math.nan))
    return at, lows, means, highs


def smooth(values: Sequence[float]) -> list[float]:
    """Return means over a window of about one twentieth of the curve, with the point in its middle; NaN stays, and is not counted."""
    reach = len(values) // _FEWEST_SMOOTHED
    sums, counts = [0.0], [0]
    for value in values:
        is_counted = math.isfinite(value)
        sums.append(sums[-1] + (value if is_counted else 0.0))
        counts.append(counts[-1] + is_counted)
    found = []
    for at, value in enumerate(values):
        # At the ends the window shrinks, on both sides: a mean of one side only would lie beside the curve. Not to
        # nothing, which would be noise.
        near = max(min(reach, at, len(values) - 1 - at), reach // 3)
        begin, end = max(0, at - near), min(len(values), at + near + 1)
        number = counts[end] - counts[begin]
        found.append((sums[end] - sums[begin]) / number if math.isfinite(value) else math.nan)
    return found
