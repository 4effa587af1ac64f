"""The matrix of hosts as heat maps in HTML: who reaches whom, how fast, how late, and what is lost on the way."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from rankwise.doctor.units import format_rate, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rankwise.doctor.rendezvous.cluster_report import ClusterReport, Link, Measure, Outcome

#: Worst first: a cell shows the worst of its pair's connections.
_OUTCOMES: tuple[Outcome, ...] = (
    "other host", "timeout", "no route", "unreachable", "refused", "reset", "stalled", "not tried", "ok",
)  # fmt: skip
_MARKS: dict[Outcome, str] = {
    "ok": "●", "timeout": "✕", "refused": "✕", "unreachable": "✕", "no route": "✕", "reset": "✕", "stalled": "≈", "other host": "?", "not tried": "·",
}  # fmt: skip

_RATIOS = ((0.0, "like the middle, or better"), (0.5, "twice as bad"), (1.0, "four times as bad, or worse"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One pair of hosts in a map: its text, all of it for the pointer, and from 0 (as good as the best) to 1 (far worse) or None."""

    text: str
    info: str
    heat: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """One map: its title, what it shows, its cells by pair of hosts (from, to), and what some heats mean."""

    title: str
    about: str
    cells: Mapping[tuple[str, str], Cell]
    legend: Sequence[tuple[float, str]]


def make_maps(report: ClusterReport) -> list[HeatMap]:
    """Return the maps for which there is something to show."""
    maps = []
    if report.links:
        maps.append(
            HeatMap(
                title="Reached", about="Whether the host of the row opens connections to that of the column, on the ports that Gloo, NCCL and the store take.",
                cells=_judge_links(report.links), legend=((0.0, "all of them"), (1.0, "not all")),
            )
        )  # fmt: skip
    if measures := report.measures:
        maps += [
            HeatMap(
                title="Bandwidth", about="One stream from the host of the row to that of the column, measured alone.",
                cells=_compare(measures, lambda one: one.bytes_per_s, format_rate, is_more_better=True), legend=_RATIOS,
            ),
            HeatMap(
                title="Latency", about="A round trip of a few bytes, the median.",
                cells=_compare(measures, lambda one: one.latency_s, format_seconds, is_more_better=False), legend=_RATIOS,
            ),
        ]  # fmt: skip
        if any(one.resent for one in measures):
            about = "The share of packets that had to be sent again, as the kernel of the sender counts."
            legend = ((0.0, "none"), (0.5, "1 %"), (1.0, "2 % and more"))
            maps.append(
                HeatMap(title="Sent again", about=about, cells=_report_losses(measures), legend=legend)
            )
    return maps


def render_map(one: HeatMap, names: Sequence[str]) -> str:
    """Return a map as a table."""
    small = " small" if len(names) > 16 else ""
    head = "".join(f'<th class="top"><span>{escape(name)}</span></th>' for name in names)
    rows = []
    for source in names:
        cells = "".join(
            _render_cell(one.cells.get((source, target)), is_self=source == target) for target in names
        )
        rows.append(f"<tr><th>{escape(source)}</th>{cells}</tr>")
    return f'<p>{escape(one.about)}</p>{_render_legend(one)}<div class="scroll"><table class="heat{small}"><tr><th></th>{head}</tr>{"".join(rows)}</table></div>'


def _render_legend(one: HeatMap) -> str:
    steps = [f'<span style="background:{color(heat)}">{escape(text)}</span>' for heat, text in one.legend]
    return f'<p class="legend">{"".join(steps)}</p>'


def _render_cell(cell: Cell | None, *, is_self: bool) -> str:
    if cell is None:
        return '<td class="self"></td>' if is_self else '<td class="none" title="not measured">·</td>'
    style = "" if cell.heat is None else f' style="background:{color(cell.heat)}"'
    return f'<td{style} title="{escape(cell.info)}">{escape(cell.text)}</td>'


def color(heat: float) -> str:
    """Return the colour of a heat: green at 0, yellow at a half, red at 1; light, so that text can be read on it."""
    hue = 130 * (1 - min(1.0, max(0.0, heat)))
    return f"hsl({hue:.0f} 62% 78%)"


def _judge_links(links: Sequence[Link]) -> dict[tuple[str, str], Cell]:
    by_pair: dict[tuple[str, str], list[Link]] = {}
    for link in links:
        by_pair.setdefault((link.source, link.target), []).append(link)
    cells = {}
    for pair, found in by_pair.items():
        worst = min(found, key=lambda link: _OUTCOMES.index(link.outcome))
        details = {link: f" ({link.detail})" if link.detail else "" for link in found}
        info = "\n".join(
            f"{one.plane}: {one.address}:{one.port} {one.outcome}{detail}" for one, detail in details.items()
        )
        heat = None if worst.outcome == "not tried" else 0.0 if worst.outcome == "ok" else 1.0
        cells[pair] = Cell(text=_MARKS[worst.outcome], info=f"{pair[0]} to {pair[1]}\n{info}", heat=heat)
    return cells


def _compare(
    measures: Sequence[Measure],
    value: Callable[[Measure], float],
    write: Callable[[float], str],
    *,
    is_more_better: bool,
) -> dict[tuple[str, str], Cell]:
    """Colour each value by how often it is worse than the middle one: a half at twice as bad, red from four times on."""
    middle = statistics.median(value(one) for one in measures) or 1.0
    cells = {}
    for one in measures:
        ratio = value(one) / middle
        worse = (1 / ratio if ratio else math.inf) if is_more_better else ratio
        heat = 1.0 if worse == math.inf else max(0.0, min(1.0, math.log2(max(worse, 1e-9)) / 2))
        cells[one.source, one.target] = Cell(
            text=write(value(one)), info=f"{one.source} to {one.target}: {write(value(one))}, the middle of all is {write(middle)}", heat=heat
        )  # fmt: skip
    return cells


def _report_losses(measures: Sequence[Measure]) -> dict[tuple[str, str], Cell]:
    return {
        (one.source, one.target): Cell(
            text=f"{one.resent:.2%}", info=f"{one.source} to {one.target}: {one.resent:.3%} sent again", heat=min(1.0, one.resent * 50)
        )
        for one in measures
        if one.resent is not None
    }  # fmt: skip
