"""What the doctor has found, as lines for a terminal or a log."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator

from rankwise.doctor.multi_host.cluster_report import ClusterReport
from rankwise.doctor.probe import Verdict, find_worst
from rankwise.doctor.reporters import grouping
from rankwise.doctor.reporters.grouping import Line
from rankwise.doctor.units import align, format_count, format_rate, format_seconds

_STYLES: dict[Verdict, str] = {"ok": "32", "skipped": "2", "warn": "1;33", "fail": "1;31"}
_SHOWN: dict[Verdict, str] = {"ok": "ok", "skipped": "skip", "warn": "warn", "fail": "FAIL"}
_NARROWEST = 60
#: Of more hosts a matrix does not fit into lines: the JSON has all of it.
_MOST_IN_MATRIX = 10
#: So wide it may be where there is no terminal.
_WIDEST = 200
#: Of more hosts only those that are not well are listed.
_MOST_SHOWN = 16


def render(
    report: ClusterReport, *, color: bool = False, width: int | None = None, verbose: bool = False, quiet: bool = False
) -> str:
    """Return the report.

    ``width`` is that of the terminal (None: a file, which keeps a sentence in a line); ``verbose`` tells of several
    hosts also what is well, ``quiet`` of none.
    """
    return "\n".join(_Text(report, color=color, width=width).lines(verbose=verbose, quiet=quiet))


class _Text:
    def __init__(self, report: ClusterReport, *, color: bool, width: int | None) -> None:
        self._all, self._names = report, [host.name for host in report.hosts]
        self._paint: Callable[[str, str], str] = _paint if color else lambda _style, text: text
        self._width = None if width is None or width < _NARROWEST else width
        self._readings = grouping.list_readings(report)
        self._column = max([8, *(len(one.probe) for one in self._readings)]) + 2

    def lines(self, *, verbose: bool, quiet: bool) -> Iterator[str]:
        here, missing = len(self._names), len(self._all.missing)
        is_one, absent = here == 1 and not missing, f", {missing} of {here + missing} missing" if missing else ""
        several = f"{format_count(here, 'host')}: {grouping.name_hosts(self._names, ())}{absent}"
        yield self._paint("1", f"rankwise doctor: {self._names[0] if is_one else several}")
        lines = grouping.group(self._readings)
        skipped = grouping.join_skipped(line for line in lines if line.reading.verdict == "skipped")
        for line in (*(line for line in lines if line.reading.verdict != "skipped"), *skipped):
            if line.reading.is_bad or (not quiet and (is_one or verbose)):
                yield from self._report(line)
        if not is_one:
            yield from self._report_hosts()
        verdict, took = find_worst(self._readings), "" if is_one else f", in {self._all.took_s:.1f} s"
        worst = next((one.probe for one in self._readings if one.verdict == verdict), "")
        more = f"; for details: rankwise rule {worst}" if verdict in {"warn", "fail"} else ""
        yield self._paint("1", f"{grouping.count_verdicts(self._readings)}{took}{more}")

    def _report(self, line: Line) -> Iterator[str]:
        one, verdict = line.reading, line.reading.verdict
        head = f"  {self._paint(_STYLES[verdict], f'{_SHOWN[verdict]:<4}')}  {one.probe:<{self._column}}"
        margin = 8 + self._column
        whose = grouping.format_hosts(line, self._names)
        named = f" [{one.class_id}]" if one.class_id and one.is_bad else ""
        reason = f" ({one.why})" if verdict == "skipped" and one.why else ""
        yield from self._wrap(head, f"{whose}{one.what}{named}{reason}", margin, verdict)
        if not one.is_bad:
            return
        if one.why:
            yield from self._wrap(" " * margin, one.why, margin, "ok", dim=True)
        for number, command in enumerate(one.fix.splitlines()):
            label = "do" if not number else ""
            yield f"{' ' * (margin - 4)}{label:<4}{self._paint('32', command)}"  # never wrapped: it is to be copied

    def _wrap(self, head: str, text: str, left: int, verdict: Verdict, *, dim: bool = False) -> Iterator[str]:
        lines = [text]
        if self._width is not None:
            room = max(30, self._width - left)
            lines = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]
        style = "2" if dim or verdict == "skipped" else "1" if verdict == "fail" else ""
        for number, line in enumerate(lines):
            shown = self._paint(style, line) if style else line
            yield f"{' ' * left if number else head}{shown}"

    def _report_hosts(self) -> Iterator[str]:
        width = max([4, *map(len, self._names)])
        yield ""
        shown = self._all.hosts
        if len(shown) > _MOST_SHOWN:
            shown = tuple(one for one in shown if grouping.judge_host(one, self._all) != "ok")
            yield f"  {len(self._names) - len(shown)} of {len(self._names)} hosts are ok"
        for host in shown:
            clock = "" if host.clock_ahead_s is None else f"clock {host.clock_ahead_s:+.3f} s"
            worst = grouping.judge_host(host, self._all)
            state = self._paint(_STYLES[worst], "lost" if host.lost else _SHOWN[worst])
            info = grouping.count_host(host, self._all)
            yield f"  {host.name:<{width}}  {host.address:<15}  {clock:<16}  {state:<4}  {info}".rstrip()
        for name in self._all.missing:
            yield f"  {name:<{width}}  {self._paint('1;31', 'did not arrive')}"
        yield from self._report_measures()
        if (reduced := self._all.all_reduce) is not None:
            yield f"  all-reduce by torch{': ' + self._paint('2', reduced.why) if reduced.why else ' ' + reduced.summary}"

    def _report_measures(self) -> Iterator[str]:
        measures = self._all.measures
        if not measures:
            return
        yield ""
        matrix = self._make_matrix()
        if not matrix or max(map(len, matrix)) > (self._width or _WIDEST):
            yield f"  {len(measures)} links measured; --format json has all of them. The slowest:"
            for one in sorted(measures, key=lambda one: one.bytes_per_s)[:3]:
                yield f"    {one.source} to {one.target}: {format_rate(one.bytes_per_s)}, round trip {format_seconds(one.latency_s)}"
            return
        yield "  from \\ to: one stream, round trip"
        yield from matrix

    def _make_matrix(self) -> list[str]:
        if len(self._names) > _MOST_IN_MATRIX:
            return []
        cells = {
            one.way: f"{format_rate(one.bytes_per_s)}, {format_seconds(one.latency_s)}" for one in self._all.measures
        }
        cells |= {(one, one): "." for one in self._names}
        rows = [[source, *(cells.get((source, one), "-") for one in self._names)] for source in self._names]
        return [f"  {line}".rstrip() for line in align([["", *self._names], *rows])]


def _paint(style: str, text: str) -> str:
    return f"\x1b[{style}m{text}\x1b[0m"
