"""What the doctor has found, as one HTML page that needs nothing beside it: findings, hosts, and the matrix of hosts as heat maps."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from rankwise.doctor.multi_host.cluster_report import ClusterReport, Link, Measure, Outcome
from rankwise.doctor.probe import Reading
from rankwise.doctor.reporters import grouping
from rankwise.doctor.reporters.grouping import Line
from rankwise.doctor.units import format_rate, format_seconds

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.45 system-ui, sans-serif; --ink: #1c2330; --pale: #5b6472; --paper: #fff; --box: #f6f7f9; --line: #e3e6eb; --code: #1c2330;
  --fail: #c62f2f; --warn: #b07c06; --ok: #2f8442; --other: #6b7483; color: var(--ink); background: var(--paper); }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e8f0; --pale: #a2acba; --paper: #14181f; --box: #1f252f; --line: #333c49; --fail: #d64545; --warn: #b98310; --code: #0b0e13; } }
body { margin: 2rem auto; max-width: 78rem; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; }
.sub { color: var(--pale); margin: 0 0 1.2rem; }
.finding { border-left: .3rem solid var(--other); padding: .45rem .8rem; margin: .6rem 0; background: var(--box); border-radius: .2rem; }
.fail { border-color: var(--fail); } .warn { border-color: var(--warn); } .ok { border-color: var(--ok); }
.finding b { margin: 0 .5rem 0 .3rem; } .why { color: var(--pale); margin: .2rem 0; }
.legend span { display: inline-block; padding: .05rem .6rem; margin-right: .15rem; font-size: .78rem; color: #1c2330; }
code, pre { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: .86rem; }
code { padding: .05rem .25rem; background: var(--line); border-radius: .2rem; }
pre { margin: .35rem 0 .1rem; padding: .45rem .6rem; background: var(--code); color: #e8edf5; border-radius: .25rem; overflow-x: auto; }
.tag { font-size: .78rem; font-weight: 600; padding: .05rem .4rem; border-radius: .7rem; color: #fff; background: var(--other); }
.tag.fail { background: var(--fail); } .tag.warn { background: var(--warn); } .tag.ok { background: var(--ok); }
table { border-collapse: collapse; } td, th { padding: .3rem .6rem; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
td:nth-child(2) { white-space: nowrap; }
.scroll { overflow-x: auto; }
.heat td, .heat th { border: 1px solid var(--paper); text-align: center; font-size: .82rem; white-space: nowrap; font-weight: 500; } .heat td { color: #1c2330; }
.heat tr > th:first-child { text-align: right; } .heat .self { background: var(--line); } .heat .none { color: var(--pale); }
.heat.small td { width: .8rem; min-width: .8rem; height: .9rem; padding: 0; font-size: 0; }
.heat.small th { font-size: .62rem; padding: 0 .25rem; } .heat.small th.top { vertical-align: bottom; padding: .2rem 0; }
.heat.small th.top span { writing-mode: vertical-rl; transform: rotate(180deg); }
.tabs > input { position: absolute; opacity: 0; } .tabs > label { display: inline-block; padding: .3rem .8rem; margin-right: .3rem; border-radius: .3rem; background: var(--line); cursor: pointer; }
.tabs > input:checked + label { background: var(--ink); color: var(--paper); } .tabs > input:focus-visible + label { outline: 2px solid #3b74d8; }
.tabs > section { display: none; }
details summary { cursor: pointer; margin: .5rem 0; }
"""
_NAMES = {"fail": "fails", "warn": "warning", "ok": "ok", "skipped": "skipped"}


def render(report: ClusterReport, *, made: str) -> str:
    """Return the page; ``made`` says when it was made."""
    names = [host.name for host in report.hosts]
    readings = grouping.list_readings(report)
    lines = grouping.group(readings)
    bad = [line for line in lines if line.reading.is_bad]
    good = [line for line in lines if not line.reading.is_bad]
    title = f"rankwise doctor: {grouping.name_hosts(names, ()) if len(names) < 5 else f'{len(names)} hosts'}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="sub">{escape(made)}, in {report.took_s:.1f} s; {escape(grouping.count_verdicts(readings))}</p>',
        f'<div class="finding fail"><b>{escape(grouping.name_hosts(report.missing, ()))}</b>did not arrive</div>'
        * bool(report.missing),
        "<h2>Findings</h2>" if bad else '<p class="finding ok">No failures and no warnings.</p>',
        *(_render_finding(line, names) for line in bad),
        *_render_maps(report, names),
        *_render_all_reduce(report),
        *(_render_hosts(report) if len(names) > 1 else ()),
        # Where nothing is wrong, what was looked at is all that the page has to say.
        f"<details{'' if bad else ' open'}><summary>{len(good)} checks passed or skipped</summary>{''.join(_render_rest(good, names))}</details>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}{_style_tabs(len(make_maps(report)))}</style></head>\n<body>\n"
        + "\n".join(filter(None, parts))
        + "\n</body></html>\n"
    )


def _write(words: str) -> str:
    """Return a sentence: what stands between backticks is code."""
    return re.sub(r"`([^`\n]+)`", r"<code>\1</code>", escape(words))


def _render_finding(line: Line, names: Sequence[str]) -> str:
    one = line.reading
    whose = grouping.format_hosts(line, names)
    class_id = escape(one.class_id)
    named = f' <span class="tag" title="rankwise rule {class_id}">{class_id}</span>' if class_id else ""
    why = f'<div class="why">{_write(one.why)}</div>' if one.why else ""
    fix = f"<pre>{escape(one.fix)}</pre>" if one.fix else ""
    return (
        f'<div class="finding {one.verdict}"><span class="tag {one.verdict}">{_NAMES[one.verdict]}</span> <b>{escape(one.probe)}</b>'
        f"{_write(whose + one.what)}{named}{why}{fix}</div>"
    )


def _render_hosts(report: ClusterReport) -> Iterator[str]:
    yield "<h2>Hosts</h2><table><tr><th>host</th><th>address</th><th>clock</th><th>state</th><th>readings</th></tr>"
    for host in report.hosts:
        clock = "" if host.clock_ahead_s is None else f"{host.clock_ahead_s:+.3f} s"
        worst = grouping.judge_host(host, report)
        state = f'<span class="tag {worst}">{escape("lost" if host.lost else _NAMES[worst])}</span>'
        info = grouping.count_host(host, report)
        shown = (escape(host.name), escape(host.address), clock, state, escape(info))
        cells = "".join(f"<td>{cell}</td>" for cell in shown)
        yield f"<tr>{cells}</tr>"
    yield "</table>"


def _render_maps(report: ClusterReport, names: Sequence[str]) -> Iterator[str]:
    maps = make_maps(report)
    if not maps:
        return
    yield '<h2>Links</h2><div class="tabs">'
    for number, one in enumerate(maps):
        checked = "" if number else " checked"
        yield f'<input type="radio" name="map" id="map{number}"{checked}><label for="map{number}">{escape(one.title)}</label>'
    for number, one in enumerate(maps):
        yield f'<section class="map{number}">{render_map(one, names)}</section>'
    yield "</div>"


def _style_tabs(count: int) -> str:
    """Without a script: the radio button that is on shows its map."""
    return "".join(f"#map{number}:checked ~ .map{number} {{ display: block; }}\n" for number in range(count))


def _render_all_reduce(report: ClusterReport) -> Iterator[str]:
    reduced = report.all_reduce
    if reduced is None:
        return
    yield f"<h2>All-reduce by torch</h2>\n<p>{escape(reduced.why or reduced.summary)}</p>"
    if reduced.waited_s and not reduced.why:
        late = ", ".join(f"{escape(host)} {format_seconds(waited)}" for host, waited in reduced.waited_s)
        yield f"<p>The others waited for: {late}</p>"


def _render_rest(lines: Iterable[Line], names: Sequence[str]) -> Iterator[str]:
    yield "<table><tr><th></th><th>probe</th><th>what</th></tr>"
    for line in lines:
        one: Reading = line.reading
        whose = grouping.format_hosts(line, names)
        why = f" ({one.why})" if one.why else ""
        yield (
            f'<tr><td><span class="tag {one.verdict}">{_NAMES[one.verdict]}</span></td><td>{escape(one.probe)}</td>'
            f"<td>{_write(whose + one.what + why)}</td></tr>"
        )
    yield "</table>"


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
            cells = _report_losses(measures)
            maps.append(HeatMap(title="Sent again", about=about, cells=cells, legend=legend))
    return maps


def render_map(one: HeatMap, names: Sequence[str]) -> str:
    """Return a map as a table."""
    small = " small" if len(names) > 16 else ""
    head = "".join(f'<th class="top"><span>{escape(name)}</span></th>' for name in names)
    rows = []
    for source in names:
        cells = "".join(_render_cell(one.cells.get((source, target)), is_self=source == target) for target in names)
        rows.append(f"<tr><th>{escape(source)}</th>{cells}</tr>")
    steps = "".join(f'<span style="background:{color(heat)}">{escape(text)}</span>' for heat, text in one.legend)
    return f'<p>{escape(one.about)}</p><p class="legend">{steps}</p><div class="scroll"><table class="heat{small}"><tr><th></th>{head}</tr>{"".join(rows)}</table></div>'


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
        by_pair.setdefault(link.way, []).append(link)
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
        cells[one.way] = Cell(
            text=write(value(one)), info=f"{one.source} to {one.target}: {write(value(one))}, the middle of all is {write(middle)}", heat=heat
        )  # fmt: skip
    return cells


def _report_losses(measures: Sequence[Measure]) -> dict[tuple[str, str], Cell]:
    return {
        one.way: Cell(
            text=f"{one.resent:.2%}", info=f"{one.source} to {one.target}: {one.resent:.3%} sent again", heat=min(1.0, one.resent * 50)
        )
        for one in measures
        if one.resent is not None
    }  # fmt: skip
