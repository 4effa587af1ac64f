"""The comparison of two runs as text, for a terminal of 80 columns: the verdict on top, then what it rests on."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, final

from rankwise.doctor.units import align, format_count
from rankwise.train.comparison.reasons import WITHOUT_EFFECT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rankwise.train.comparison.parameters import Norms, Weights
    from rankwise.train.comparison.reasons import Reason
    from rankwise.train.comparison.runs import Comparison, Point, Series
    from rankwise.train.journal import Journal

_WIDTH, _LABEL = 80, 12
_MOST_NAMES, _MOST_TENSORS = 3, 10


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two runs, and all that was found out about their difference.

    Attributes:
        a: The first run.
        b: The second.
        comparison: What their journals tell.
        checkpoints: What their checkpoints tell; those of comparison/checkpoints.py, which needs torch.
        reasons: Why they may part.
        notes: What could not be looked at, and why.
    """

    a: Journal
    b: Journal
    comparison: Comparison
    checkpoints: Sequence[Any]
    reasons: Sequence[Reason]
    notes: Sequence[str]


def render(pair: Pair) -> str:
    """Return the comparison as lines."""
    comparison = pair.comparison
    lines = [tell_verdict(comparison, pair.reasons), ""]
    lines += _block("a", _describe(pair.a)) + _block("b", _describe(pair.b))
    lines += _block("settings", _list_settings(comparison))
    lines += _block("weights", (line for one in comparison.weights for line in _tell_weights(one)))
    lines += _block("losses", _tell_losses(comparison))
    for series in (comparison.lrs, comparison.grad_norms):
        if series is not None and series.divergence is not None:
            lines += _block(series.name, _tell_divergence(series))
    lines += _block("norms", _tell_norms(comparison.norms, comparison.tolerance))
    lines += _block("evaluations", _tell_metrics(comparison))
    for one in pair.checkpoints:
        lines += _block(f"step {one.step}", _tell_checkpoint(one))
    lines += _block("likely", (line for reason in pair.reasons for line in _tell_reason(reason)))
    return "\n".join([*lines, *(line for note in pair.notes for line in _block("note", _wrap(note)))])


def tell_verdict(comparison: Comparison, reasons: Sequence[Reason]) -> str:
    """Return the outcome as one line, with the cause where it is certain."""
    losses, within = comparison.losses, f"within {_short(comparison.tolerance)}"
    if losses.divergence is not None:
        return f"the runs diverge at step {losses.divergence.step}{_tell_how(comparison, reasons)}"
    diverged = [f"{one.name} at step {one.divergence.step}" for one in comparison.metrics if one.divergence]
    if comparison.norms is not None and comparison.norms.divergence_step is not None:
        diverged.append(f"norms at step {comparison.norms.divergence_step}")
    if diverged:
        return f"the losses agree {within}, but not all else: {', '.join(diverged)}"
    if comparison.manner == "equal":
        return f"the runs agree: {losses.num_common} losses are equal to the bit"
    return f"the runs agree {within}"


def _tell_how(comparison: Comparison, reasons: Sequence[Reason]) -> str:
    losses = comparison.losses
    if cause := next((one.head for one in reasons if one.head), ""):
        return f": {cause}"
    if losses.divergence == losses.first:
        return ", the first common one"
    if comparison.manner == "at once":
        return f", and differ by more than rounding from step {losses.first.step} on"
    return f", {comparison.manner}"


def _block(label: str, texts: Iterable[str]) -> list[str]:
    return [f"  {'' if number else label:<{_LABEL - 1}} {text}".rstrip() for number, text in enumerate(texts)]


def _wrap(text: str, *, first: str = "", then: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH - _LABEL - 2,
        initial_indent=first,
        subsequent_indent=then,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _short(number: float) -> str:
    """Return a difference: two digits are enough."""
    if number == 0 or not math.isfinite(number):
        return f"{number:g}"
    return f"{number:.1e}" if number < 0.01 or number >= 100 else f"{number:.2g}"


# --------------------------------------------------------------------- runs


def _describe(run: Journal) -> Iterator[str]:
    first, last = run.starts[0], run.starts[-1]
    settings = first.started.settings
    yield str(run.path if run.path.name != "journal.jsonl" else run.folder)
    facts = [format_count(first.started.world_size, "rank"), f"global batch {first.started.global_batch}"]
    # "fp32" says that there is no autocast; with a model in float64 it would mislead.
    precision, dtype = settings.get("precision", "fp32"), settings.get("dtype", "float32")
    facts += [str(precision)] if dtype == "float32" or precision != "fp32" else []
    facts += [str(one) for one in (dtype, settings.get("device")) if one and one != "float32"]
    planned = f" of {last.started.num_steps}" if last.started.num_steps else ""
    ended = run.ended.reason if run.ended else "killed, or still running"
    when = datetime.fromtimestamp(first.time, tz=timezone.utc).astimezone()
    yield from _wrap(", ".join(facts))
    yield from _wrap(
        f"steps {first.started.step + 1} to {run.last_step}{planned}, {ended}; begun {when:%Y-%m-%d %H:%M}"
    )
    for one in run.starts[1:]:
        yield f"resumed after step {one.started.step} with {format_count(one.started.world_size, 'rank')}"
    if run.num_skipped:
        yield f"{format_count(run.num_skipped, 'line')} of its journal cut off by a kill, left out"


def _list_settings(comparison: Comparison) -> Iterator[str]:
    rows = [(one.name, _value(one.a), _value(one.b)) for one in comparison.settings if one.name not in WITHOUT_EFFECT]
    if rows:
        yield from align([("", "a", "b"), *rows])
    others = [one.name for one in comparison.settings if one.name in WITHOUT_EFFECT and one.name != "folder"]
    if others:
        yield from _wrap(f"{'and, ' if rows else ''}without effect on the weights: {', '.join(others)}")
    if not rows and not others:
        yield "none differs"


def _value(value: Any) -> str:
    return _cut("none" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value), 24)


def _cut(text: str, most: int) -> str:
    """Return a text that is not too long; names differ at their ends."""
    return text if len(text) <= most else f"…{text[1 - most :]}"


# ------------------------------------------------------------------- losses


def _tell_losses(comparison: Comparison) -> Iterator[str]:
    losses, limit = comparison.losses, comparison.tolerance
    yield from _wrap(
        f"{format_count(losses.num_common, 'common step')}, {losses.first.step} to {losses.last.step}; tolerance {limit:.1g}, relative ({comparison.precision})"
    )
    if losses.unequal is None:
        yield "equal to the bit"
        return
    yield from _wrap(_tell_course(comparison))
    yield ""
    yield from _tabulate(comparison)


def _tell_course(comparison: Comparison) -> str:
    losses = comparison.losses
    begin, at = losses.unequal, losses.divergence
    assert begin is not None  # noqa: S101 - the caller has looked
    what = "equal to the bit before; " if begin.step != losses.first.step else ""
    what += f"differ from step {begin.step} on, {_by(begin)} there"
    if at is not None and at != begin:
        what += f", and {_by(at)} at step {at.step}"
        if comparison.manner == "slowly" and math.isfinite(at.difference) and at.difference > begin.difference:
            doubling = (at.step - begin.step) / math.log2(at.difference / begin.difference)
            what += f" (doubled about every {doubling:.2g} steps)"
    if losses.largest in (begin, at):
        return what
    return f"{what}; most at step {losses.largest.step}: {_by(losses.largest)}"


def _by(one: Point) -> str:
    """Return how far two values are apart: where one is not finite, no number can tell it."""
    if math.isfinite(one.difference):
        return f"by {_short(one.difference)}"
    return f"as a is {one.a:.6g} and b is {one.b:.6g}"


def _tabulate(comparison: Comparison) -> Iterator[str]:
    rows, divergence = comparison.rows, comparison.losses.divergence
    seen = [one.difference for one in rows if 0 < one.difference < math.inf]
    # So many digits that the smallest difference shows.
    digits = min(17, max(6, 2 - math.floor(math.log10(min(seen))))) if seen else 6
    table = [("", "step", "loss of a", "loss of b", "difference")]
    table += [
        (
            "->" if one is divergence else "",
            str(one.step),
            f"{one.a:.{digits}g}",
            f"{one.b:.{digits}g}",
            _short(one.difference),
        )
        for one in rows
    ]
    lines = align(table, right={1, 2, 3, 4})
    yield lines[0]
    known = {one.step for one in rows}
    for number, (row, line) in enumerate(zip(rows, lines[1:], strict=True)):
        if number and row.step - 1 not in known:
            yield "     …"
        yield line


def _tell_divergence(series: Series) -> Iterator[str]:
    at = series.divergence
    assert at is not None  # noqa: S101 - the caller has looked
    yield from _wrap(f"differs from step {at.step} on: {at.a:.6g} and {at.b:.6g}")


# --------------------------------------------------------------- parameters


def _tell_weights(weights: Weights) -> Iterator[str]:
    when = "at the start" if weights.step == 0 else f"after step {weights.step}, where both resumed"
    if weights.are_equal:
        yield from _wrap(f"equal {when}, to the bit ({format_count(weights.num_common, 'parameter')})")
    if weights.differing:
        yield from _wrap(
            f"{len(weights.differing)} of {weights.num_common} parameters differ {when}: {_name_some(weights.differing)}"
        )
    yield from _tell_only(weights.only_a, weights.only_b)


def _tell_only(only_a: Sequence[str], only_b: Sequence[str]) -> Iterator[str]:
    for run, names in (("a", only_a), ("b", only_b)):
        if names:
            yield from _wrap(f"only in {run}: {_name_some(names)}")


def _name_some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(_cut(name, 60) for name in names[:_MOST_NAMES]) + more


def _tell_norms(norms: Norms | None, tolerance: float) -> Iterator[str]:
    if norms is None:
        return
    if norms.divergence_step is None:
        yield f"agree at {format_count(norms.num_steps, 'common step')}"
    else:
        names = [f"{one.name} ({_short(one.difference)})" for one in norms.diverged]
        yield from _wrap(
            f"those of {format_count(len(names), 'parameter')} differ by more than {_short(tolerance)} from step {norms.divergence_step} on: {_name_some(names)}"
        )
    if norms.largest is not None and norms.largest.difference > 0:
        one = norms.largest
        yield from _wrap(
            f"most at the last common step, {norms.last_step}: {_cut(one.name, 60)} {one.a:.6g} and {one.b:.6g}, by {_short(one.difference)}"
        )
    yield from _tell_only(norms.only_a, norms.only_b)


def _tell_checkpoint(one: Any) -> Iterator[str]:
    if not one.differing:
        yield f"the checkpoints' {format_count(one.num_common, 'tensor')} are equal to the bit"
    else:
        yield from _wrap(f"{len(one.differing)} of {one.num_common} tensors differ in the checkpoints")
        rows = [
            (_cut(d.name, 36), _short(d.difference), _short(d.largest), f"{d.num_unequal} of {d.size}")
            for d in one.differing[:_MOST_TENSORS]
        ]
        yield from align([("tensor", "relative", "largest", "unequal"), *rows], right={1, 2, 3})
        if len(one.differing) > _MOST_TENSORS:
            yield f"and {len(one.differing) - _MOST_TENSORS} more"
    yield from _tell_only(one.only_a, one.only_b)


# ----------------------------------------------------- evaluations, reasons


def _tell_metrics(comparison: Comparison) -> Iterator[str]:
    rows = []
    for one in comparison.metrics:
        if one.divergence is None:
            yield from _wrap(f"{one.name} agrees at {format_count(one.num_common, 'common step')}")
        else:
            at = one.divergence
            rows.append(
                (
                    one.name,
                    str(at.step),
                    f"{at.a:.6g}",
                    f"{at.b:.6g}",
                    _short(at.difference),
                    f"{_short(one.largest.difference)} at {one.largest.step}",
                )
            )
    if rows:
        yield from align([("", "from step", "a", "b", "difference", "largest"), *rows], right={1, 2, 3, 4})


def _tell_reason(reason: Reason) -> Iterator[str]:
    yield from _wrap(reason.fact, first="- ", then="  ")
    yield from _wrap(reason.do, first="  -> ", then="     ")
