"""Draws a run's curves with matplotlib, without touching the backend or the style that the user has chosen."""

from __future__ import annotations

import io
import math
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rankwise.base.files import write_atomic

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rankwise.train.loggers.curves import Course, Curve

_MAX_POINTS = 800
_MAX_METRICS = 6
_PER_ROW = 3
_BLUE, _ORANGE, _GREEN, _GREY = "#2563a8", "#c2571a", "#2e7d4f", "#7a7a7a"
_STYLE = {
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",
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


def draw(course: Course, path: Path) -> None:
    """Draw a run into an SVG file.

    Raises:
        ImportError: There is no matplotlib.
        OSError: The file can't be written.
    """
    matplotlib = import_module("matplotlib")
    figure_class = import_module("matplotlib.figure").Figure
    canvas_class = import_module("matplotlib.backends.backend_svg").FigureCanvasSVG
    # A user's style (dark, LaTeX) would give another picture, or none; the backend is not ours to set.
    defaults = {
        key: value for key, value in matplotlib.rcParamsDefault.items() if not key.startswith("backend")
    }
    buffer = io.BytesIO()
    with matplotlib.rc_context({**defaults, **_STYLE}):
        small: list[tuple[str, Curve, str]] = [
            (f"evaluation: {name}", curve, _ORANGE)
            for name, curve in list(course.metrics.items())[:_MAX_METRICS]
            if name != "loss"  # beside the training's
        ]
        small += [("learning rate", course.lr, _GREEN), ("samples a second", course.speed, _GREY)]
        small = [one for one in small if one[1].steps]
        last = max(1, *(curve.steps[-1] for _, curve, _ in small)) * 1.03 if small else 1
        columns = 2 if len(small) == 4 else min(_PER_ROW, len(small))
        rows = math.ceil(len(small) / max(1, columns))
        figure = figure_class(figsize=(9.0, 3.4 + 2.1 * rows), layout="constrained", facecolor="white")
        canvas_class(figure)
        grid = figure.add_gridspec(1 + rows, max(1, columns), height_ratios=[1.7] + [1.0] * rows)
        _draw_loss(figure.add_subplot(grid[0, :]), course)
        for at, (name, curve, colour) in enumerate(small):
            axes = figure.add_subplot(grid[1 + at // columns, at % columns])
            _draw_small(axes, name, curve, colour)
            axes.set_xlim(0, last)
            if colour == _ORANGE and course.best is not None:
                _mark_best(axes, curve, course.best)
            _mark_resumes(axes, course)
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, buffer.getvalue())


def _draw_loss(axes: Any, course: Course) -> None:
    steps, lows, means, highs = thin(course.loss.steps, course.loss.values)
    if len(course.loss.steps) > len(steps):
        axes.fill_between(steps, lows, highs, color=_BLUE, alpha=0.2, linewidth=0, label="each step")
        axes.plot(steps, smooth(means), color=_BLUE, linewidth=1.6, label="smoothed")
    else:
        axes.plot(steps, means, color=_BLUE, alpha=0.35, linewidth=0.8, label="each step")
        axes.plot(steps, smooth(means), color=_BLUE, linewidth=1.6, label="smoothed")
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
    _mark_resumes(axes, course, label="started again")
    gone = [
        step
        for step, value in zip(course.loss.steps, course.loss.values, strict=True)
        if not math.isfinite(value)
    ]
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
    axes.set_xlabel("step")
    axes.locator_params(axis="x", integer=True)
    axes.xaxis.set_major_formatter(_with_letters())
    axes.margins(x=0.01)
    axes.legend(loc="upper right")


def _draw_small(axes: Any, name: str, curve: Curve, colour: str) -> None:
    steps, _, means, _ = thin(curve.steps, curve.values)
    few = len(steps) <= 40
    axes.plot(steps, means, color=colour, linewidth=1.2, marker="o" if few else None, markersize=3)
    # dollar signs in a user's name would be read as mathematics
    axes.set_title(name.replace("$", r"\$"))
    axes.locator_params(axis="x", nbins=5, integer=True)
    axes.xaxis.set_major_formatter(_with_letters())
    axes.locator_params(axis="y", nbins=5)
    if name == "samples a second":
        axes.yaxis.set_major_formatter(_with_letters())
        if (top := max((value for value in means if math.isfinite(value)), default=0.0)) > 0:
            axes.set_ylim(0, 1.15 * top)


def _with_letters() -> Any:
    """Return what writes 200000 as 200k."""
    return import_module("matplotlib.ticker").EngFormatter(sep="")


def _mark_best(axes: Any, curve: Curve, best: int) -> None:
    if best in curve.steps:
        axes.plot([best], [curve.values[curve.steps.index(best)]], marker="*", markersize=10, color=_ORANGE)


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
        Steps, and the least, mean and greatest value at each; what is not finite is left out, and NaN where nothing else is.
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
    reach = len(values) // 40
    sums, counts = [0.0], [0]
    for value in values:
        is_counted = math.isfinite(value)
        sums.append(sums[-1] + (value if is_counted else 0.0))
        counts.append(counts[-1] + is_counted)
    found = []
    for at, value in enumerate(values):
        # At the ends the window shrinks, on both sides: a mean of one side only would lie beside the curve. Not to nothing, which would be noise.
        near = max(min(reach, at, len(values) - 1 - at), reach // 3)
        begin, end = max(0, at - near), min(len(values), at + near + 1)
        number = counts[end] - counts[begin]
        found.append((sums[end] - sums[begin]) / number if math.isfinite(value) else math.nan)
    return found
