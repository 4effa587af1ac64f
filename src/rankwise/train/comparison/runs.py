"""Compares what two runs have recorded: where they diverge, how, and in what else they differ.

Differences are relative: the distance of two numbers over the greater one. Two numbers that are not finite in the same way are equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, final

from rankwise.base.errors import UsageError
from rankwise.train.comparison.parameters import compare_norms, compare_weights, relative_difference

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rankwise.train.comparison.parameters import Norms, Weights
    from rankwise.train.events import Started
    from rankwise.train.journal import Journal

#: How the losses go apart. "suddenly": from equal, or from rounding, in one step. "slowly": out of rounding, step by
#: step.
Manner = Literal["equal", "within", "at once", "suddenly", "slowly"]


class _Precision(NamedTuple):
    tolerance: float
    rounding: float


# Tolerance: what rounding grows to in some hundred steps of a healthy training. Rounding: the most by which it alone
# lets a mean loss differ in one step. Both stand far above the unit of the format (1e-16, 6e-8, 5e-4, 4e-3), for a loss
# comes out of many sums.
_PRECISIONS = {
    "float64": _Precision(1e-9, 1e-13),
    "fp32": _Precision(1e-4, 1e-5),
    "fp16": _Precision(1e-2, 1e-3),
    "bf16": _Precision(1e-2, 3e-3),
}
#: In one step rounding does not grow by more than this.
_MOST_GROWTH = 100.0


class Point(NamedTuple):
    """The values of both runs at a step."""

    step: int
    a: float
    b: float
    difference: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A number of both runs at their common steps.

    Attributes:
        name: What it is.
        num_common: Common steps.
        first: The first of them.
        last: The last of them.
        unequal: The first at which the two are not the same number; None if there is none.
        divergence: The first at which they differ by more than the tolerance; None if there is none.
        largest: The one with the largest difference; the earliest of several.
    """

    name: str
    num_common: int
    first: Point
    last: Point
    unequal: Point | None
    divergence: Point | None
    largest: Point


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A setting that both runs tell, and not the same."""

    name: str
    a: Any
    b: Any


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All that two journals tell of the difference of their runs.

    Attributes:
        tolerance: The largest relative difference that counts as agreement.
        precision: The coarser of the two precisions; the tolerance follows from it unless someone has chosen one.
        rounding: Up to this a difference may be rounding alone.
        settings: Those that differ, as they were when the runs diverged; what one run does not tell is not among them.
        weights: At each step at which both began or went on and told digests.
        losses: The loss of each step.
        manner: How the losses go apart.
        lrs: The learning rate of each step; None if there is no common one.
        grad_norms: The gradient's norm before clipping; None if there is no common one.
        metrics: Each metric of the evaluations at common steps.
        norms: The parameters' norms; None if there is no common step with them.
        rows: The losses at the steps that tell most: where they begin to differ, where they diverge, where they differ
            most.
    """

    tolerance: float
    precision: str
    rounding: float
    settings: tuple[Setting, ...]
    weights: tuple[Weights, ...]
    losses: Series
    manner: Manner
    lrs: Series | None
    grad_norms: Series | None
    metrics: tuple[Series, ...]
    norms: Norms | None
    rows: tuple[Point, ...]

    @property
    def agree(self) -> bool:
        """Whether losses, norms and metrics are within the tolerance at all common steps."""
        diverged = [one.divergence for one in (self.losses, *self.metrics)]
        return not any(diverged) and (self.norms is None or self.norms.divergence_step is None)


def compare(a: Journal, b: Journal, *, tolerance: float | None = None) -> Comparison:
    """Compare two runs by their journals.

    Args:
        a: The run that the other is held against.
        b: The other.
        tolerance: The largest relative difference that counts as agreement; None: by the coarser precision of the two.

    Returns:
        Where and how they differ.

    Raises:
        UsageError: They have no step in common, or the tolerance is no number of 0 or more.
    """
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise UsageError(f"tolerance={tolerance!r}", hint="a relative difference of 0 or more, like 1e-4")
    precision = max((_tell_precision(one) for one in (a, b)), key=[*_PRECISIONS].index)
    by_default, rounding = _PRECISIONS[precision]
    limit = by_default if tolerance is None else tolerance
    points = _meet(a.losses(), b.losses())
    if not points:
        raise UsageError(
            f"the runs have no step in common: {_tell_steps(a)}, and {_tell_steps(b)}",
            hint="compare runs whose steps overlap",
        )
    losses = _sum_up("loss", points, limit)
    seen_at = losses.divergence or losses.last
    return Comparison(
        tolerance=limit,
        precision=precision,
        rounding=rounding,
        settings=tuple(_compare_settings(a.started_for(seen_at.step), b.started_for(seen_at.step))),
        weights=tuple(compare_weights(a, b)),
        losses=losses,
        manner=_judge(points, losses, rounding),
        lrs=_sum_up_if_any("learning rate", a.lrs(), b.lrs(), limit),
        grad_norms=_sum_up_if_any("gradient's norm", a.grad_norms(), b.grad_norms(), limit),
        metrics=tuple(_compare_metrics(a, b, limit)),
        norms=compare_norms(a.norms(), b.norms(), limit),
        rows=_choose_rows(points, losses),
    )


# ------------------------------------------------------------------ series


def _meet(a: Mapping[int, float], b: Mapping[int, float]) -> list[Point]:
    return [
        Point(step, a[step], b[step], relative_difference(a[step], b[step])) for step in sorted(a.keys() & b.keys())
    ]


def _sum_up(name: str, points: list[Point], tolerance: float) -> Series:
    return Series(
        name=name,
        num_common=len(points),
        first=points[0],
        last=points[-1],
        unequal=next((one for one in points if one.difference > 0), None),
        divergence=next((one for one in points if one.difference > tolerance), None),
        largest=max(points, key=lambda one: one.difference),
    )


def _sum_up_if_any(name: str, a: Mapping[int, float], b: Mapping[int, float], tolerance: float) -> Series | None:
    points = _meet(a, b)
    return _sum_up(name, points, tolerance) if points else None


def _judge(points: list[Point], losses: Series, rounding: float) -> Manner:
    if losses.unequal is None:
        return "equal"
    if losses.divergence is None:
        return "within"
    if losses.unequal.difference > rounding:
        return "at once" if losses.unequal.step == losses.first.step else "suddenly"
    return "suddenly" if _jumps(points, losses.divergence.step, rounding) else "slowly"


def _jumps(points: list[Point], divergence: int, rounding: float) -> bool:
    """Tell whether the difference grows faster than rounding can, at some step up to the divergence."""
    highest, before = rounding, points[0].step
    for point in points:
        # Between two common steps may lie others that only one run has told.
        num_steps = max(1, point.step - before)
        if math.log(max(point.difference, rounding) / highest) > num_steps * math.log(_MOST_GROWTH):
            return True
        highest, before = max(highest, point.difference), point.step
        if point.step >= divergence:
            break
    return False


def _choose_rows(points: list[Point], losses: Series, beside: int = 3) -> tuple[Point, ...]:
    chosen = {losses.first.step, losses.largest.step, losses.last.step}
    if losses.unequal:
        chosen.add(losses.unequal.step)
    if losses.divergence:
        at = points.index(losses.divergence)
        chosen |= {one.step for one in points[max(0, at - beside) : at + beside + 1]}
    return tuple(one for one in points if one.step in chosen)


# ---------------------------------------------------------------- settings


def _tell_precision(journal: Journal) -> str:
    settings = journal.starts[-1].started.settings
    dtypes = {"float64": "float64", "float16": "fp16", "bfloat16": "bf16"}
    value = [dtypes.get(one, "fp32") for one in str(settings.get("dtype", "float32")).split("+")]
    if settings.get("precision") in _PRECISIONS:
        # A model in float64 is trained by "fp32", the word for no autocast.
        value += [settings["precision"]] if settings["precision"] != "fp32" else []
    return max(value, key=[*_PRECISIONS].index)


def _tell_steps(journal: Journal) -> str:
    steps = journal.losses().keys()
    text = f"has steps {min(steps)} to {max(steps)}" if steps else "has no step yet"
    return f"{journal.path} {text}"


def list_settings(started: Started) -> dict[str, Any]:
    """Return all settings of a start by name, those first that every run has."""
    first = {
        "ranks": started.world_size,
        "global_batch": started.global_batch,
        "steps": started.num_steps,
        "epochs": started.num_epochs,
    }
    return first | {name: value for name, value in started.settings.items() if name not in first}


def _compare_settings(a: Started, b: Started) -> Iterable[Setting]:
    all_a, all_b = list_settings(a), list_settings(b)
    # A loop of one's own tells less than a Trainer: what one run does not tell may be the same in both.
    for name, value in all_a.items():
        if name in all_b and value != all_b[name]:
            yield Setting(name=name, a=value, b=all_b[name])


# -------------------------------------------------------------- evaluations


def _compare_metrics(a: Journal, b: Journal, tolerance: float) -> Iterable[Series]:
    # Of several evaluations after one step the last counts, as in the runs themselves.
    all_a = {one.step: one.metrics for one in a.evaluations}
    all_b = {one.step: one.metrics for one in b.evaluations}
    names = dict.fromkeys(name for metrics in all_a.values() for name in metrics)
    for name in names:
        of_a = {step: metrics[name] for step, metrics in all_a.items() if name in metrics}
        of_b = {step: metrics[name] for step, metrics in all_b.items() if name in metrics}
        series = _sum_up_if_any(name, of_a, of_b, tolerance)
        if series is not None:
            yield series
