"""Draws where runs part: their losses, and below them how far losses and parameters are apart; needs matplotlib."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rankwise.base.errors import UsageError
from rankwise.train.comparison.parameters import find_largest_norms, relative_difference

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rankwise.train.comparison.runs import Comparison
    from rankwise.train.journal import Journal

_KINDS = (".svg", ".png", ".pdf")
# The colours of Okabe and Ito, which the colour-blind can tell apart.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_GREY = "#666666"
#: Behind a text, so that curves don't cross it.
_PAPER = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1}
#: More points than this can't be seen, and make the picture slow.
_MOST_POINTS = 4000


def draw(first: Journal, others: Sequence[tuple[Journal, Comparison]], path: Path) -> None:
    """Draw runs against the first one.

    Args:
        first: The run that the others were compared with.
        others: The others, and how each compares.
        path: The picture's file; its ending says of which kind it is.

    Raises:
        UsageError: matplotlib is not there, the ending is unknown, or the file can't be written.
    """
    if path.suffix not in _KINDS:
        raise UsageError(
            f"--plot {path}: the name has {f'the unknown ending {path.suffix}' if path.suffix else 'no ending'}",
            hint=f"end it with one of {', '.join(_KINDS)}",
        )
    try:
        # Without pyplot, so that the choice of a window system stays the user's.
        from matplotlib.figure import Figure  # noqa: PLC0415 - optional
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--plot needs matplotlib, and this Python can't import it: {error}", hint="pip install 'rankwise[plot]'"
        ) from error
    has_norms = any(comparison.norms for _, comparison in others)
    heights = (3, 2, 2) if has_norms else (3, 2)
    figure = Figure(figsize=(8, 8 if has_norms else 6), layout="constrained")
    losses, distances, *norms = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    _draw_losses(losses, first, others)
    _draw_distances(distances, first, others)
    for axes in norms:
        _draw_norms(axes, first, others)
    [losses, distances, *norms][-1].set_xlabel("step")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise UsageError(f"can't write {path}: {error.strerror or error}") from error


def _draw_losses(axes: Any, first: Journal, others: Sequence[tuple[Journal, Comparison]]) -> None:
    curves = [first.losses(), *(run.losses() for run, _ in others)]
    axes.plot(*_thin(curves[0]), color="black", linewidth=1.6, label=f"a: {_name(first)}")
    for number, ((run, comparison), curve) in enumerate(zip(others, curves[1:], strict=True)):
        colour = _COLOURS[number % len(_COLOURS)]
        letter = "b: " if len(others) == 1 else ""
        axes.plot(*_thin(curve), color=colour, linewidth=1.0, label=f"{letter}{_name(run)}")
        _mark(axes, comparison, colour)
    heights = [one for curve in curves for one in curve.values() if math.isfinite(one)]
    if heights and 0 < min(heights) < max(heights) / 50:
        axes.set_yscale("log")
    axes.set_ylabel("loss")
    axes.legend(frameon=False, fontsize="small")
    _tidy(axes)


def _draw_distances(axes: Any, first: Journal, others: Sequence[tuple[Journal, Comparison]]) -> None:
    losses, curves = first.losses(), []
    for number, (run, comparison) in enumerate(others):
        curve = run.losses()
        distances = {
            step: relative_difference(losses[step], curve[step]) for step in sorted(losses.keys() & curve.keys())
        }
        curves.append(distances)
        colour = _COLOURS[number % len(_COLOURS)]
        _mark(axes, comparison, colour)
        _name_divergence(axes, comparison, colour, height=5 + 14 * number)
    _draw_on_log(axes, curves, others[0][1].tolerance)
    axes.set_ylabel("losses: relative difference")
    _tidy(axes)


def _draw_norms(axes: Any, first: Journal, others: Sequence[tuple[Journal, Comparison]]) -> None:
    norms, curves = first.norms(), []
    for number, (run, comparison) in enumerate(others):
        largest = find_largest_norms(norms, run.norms())
        curves.append({step: one.difference for step, one in largest.items()})
        _mark(axes, comparison, _COLOURS[number % len(_COLOURS)])
    _draw_on_log(axes, curves, others[0][1].tolerance)
    seen = [_tell_largest(run, comparison, with_name=len(others) > 1) for run, comparison in others]
    axes.set_title("\n".join(one for one in seen if one), loc="left", fontsize="small", color=_GREY)
    axes.set_ylabel("largest of the norms:\nrelative difference")
    _tidy(axes)


def _tell_largest(run: Journal, comparison: Comparison, *, with_name: bool) -> str:
    norms = comparison.norms
    if norms is None or norms.largest is None:
        return ""
    of = f"{_name(run)}: " if with_name else ""
    if norms.largest.difference == 0:
        return f"{of}all norms are equal at step {norms.last_step}"
    return f"{of}most at step {norms.last_step}: {norms.largest.name}".replace("$", r"\$")


def _draw_on_log(axes: Any, curves: Sequence[Mapping[int, float]], limit: float) -> None:
    """Draw differences on a log scale: those that are 0 as a row of ticks at its bottom; a run that is not finite has none."""
    seen = [one for curve in curves for one in curve.values() if 0 < one < math.inf]
    lowest = min([*seen, limit or math.inf])
    # Rounding's own size, where nothing differs.
    bottom = max(lowest / 30, 1e-300) if lowest < math.inf else 1e-17
    is_named = False
    for number, curve in enumerate(curves):
        colour = _COLOURS[number % len(_COLOURS)]
        drawn = {step: one if 0 < one < math.inf else math.nan for step, one in curve.items()}
        axes.plot(*_thin(drawn), color=colour, linewidth=1.0, marker="." if len(drawn) <= 200 else "", markersize=3)
        equal = [step for step, one in curve.items() if one == 0]
        if equal:
            label = "" if is_named else "equal to the bit"
            equal = equal[:: -(-len(equal) // _MOST_POINTS)]
            # Above one another, where there are several runs.
            axes.plot(
                equal,
                [bottom * 2**number] * len(equal),
                color=colour,
                linestyle="",
                marker="|",
                markersize=5,
                label=label,
            )
            is_named = True
    axes.set_yscale("log")
    axes.set_ylim(bottom=bottom / 2)
    if not seen:
        axes.set_ylim(bottom / 2, max(1.0, bottom))
        axes.text(
            0.5, 0.5, "no finite difference to draw", transform=axes.transAxes, ha="center", va="center", color=_GREY
        )
    if limit > 0:
        axes.axhline(limit, color=_GREY, linewidth=0.8, linestyle="--")
        axes.annotate(
            f"tolerance {limit:.0e}",
            (1, limit),
            xycoords=("axes fraction", "data"),
            xytext=(-2, 3),
            textcoords="offset points",
            ha="right",
            fontsize="small",
            color=_GREY,
            bbox=_PAPER,
        )
    if is_named:
        axes.legend(frameon=False, fontsize="small", loc="upper left")


def _mark(axes: Any, comparison: Comparison, colour: str) -> None:
    if comparison.losses.divergence is not None:
        axes.axvline(comparison.losses.divergence.step, color=colour, linewidth=0.8, linestyle=":")


def _name_divergence(axes: Any, comparison: Comparison, colour: str, *, height: float) -> None:
    losses = comparison.losses
    if losses.divergence is None:
        return
    is_late = losses.divergence.step > (losses.first.step + losses.last.step) / 2
    axes.annotate(
        f"they diverge at step {losses.divergence.step}",
        (losses.divergence.step, 0),
        xycoords=("data", "axes fraction"),
        xytext=(-4 if is_late else 4, height),
        textcoords="offset points",
        ha="right" if is_late else "left",
        fontsize="small",
        color=colour,
        bbox=_PAPER,
    )


def _tidy(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)


def _name(run: Journal) -> str:
    return str(run.folder) if run.path.name == "journal.jsonl" else str(run.path)


def _thin(curve: Mapping[int, float]) -> tuple[list[int], list[float]]:
    """Return steps and values to draw: of a long curve the lowest and the highest of each short piece, so that no peak is lost."""
    steps = list(curve)
    size = -(-2 * len(steps) // _MOST_POINTS)
    if size > 2:
        pieces = (steps[at : at + size] for at in range(0, len(steps), size))
        steps = sorted({step for piece in pieces for step in _pick(curve, piece)})
    return steps, [curve[step] for step in steps]


def _pick(curve: Mapping[int, float], steps: Sequence[int]) -> set[int]:
    known = [step for step in steps if not math.isnan(curve[step])] or steps[:1]
    return {min(known, key=curve.__getitem__), max(known, key=curve.__getitem__)}
