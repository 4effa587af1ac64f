"""Groups readings for people: what is the same on several hosts is reported once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rankwise.doctor.multi_host.cluster_report import ClusterReport, HostReport
from rankwise.doctor.probe import Reading, Verdict, find_worst
from rankwise.doctor.units import join_names

#: So many hosts are named; of more the others are counted.
_MOST_NAMED = 6
#: From so many hosts on, readings that differ in their numbers only are told once.
_MANY_ALIKE = 4
_NUMBER = re.compile(r"\d+(?:[.:]\d+)*")
_ORDER: tuple[Verdict, ...] = ("fail", "warn", "ok", "skipped")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A reading, all hosts on which it was the same, and those on which only its numbers were others."""

    reading: Reading
    hosts: tuple[str, ...]
    alike: tuple[str, ...] = ()


def list_readings(report: ClusterReport) -> list[Reading]:
    """Return all readings: those of comparing hosts first, then those of each host."""
    return [*report.readings, *(one for host in report.hosts for one in host.readings)]


def group(readings: Iterable[Reading]) -> list[Line]:
    """Join readings that say the same of several hosts; the worst first, else in the order of the readings.

    Where many hosts say the same with other numbers (a process id, what is free), the first one's is told for all of
    them.
    """
    lines: dict[tuple[str, ...], list[Line]] = {}
    for line in join_same(readings):
        one = line.reading
        key = (one.probe, one.verdict, _NUMBER.sub("0", one.what), _NUMBER.sub("0", one.fix))
        lines.setdefault(key, []).append(line)
    return [
        one
        for same in lines.values()
        for one in (same if len(same) < _MANY_ALIKE else [replace(same[0], alike=_join_hosts(same[1:]))])
    ]


def join_same(readings: Iterable[Reading]) -> list[Line]:
    """Join readings that say the very same of several hosts; the worst first, else in the order of the readings."""
    joined: dict[tuple[str, str, str, str], list[Reading]] = {}
    for one in readings:
        joined.setdefault((one.probe, one.verdict, one.what, one.fix), []).append(one)
    lines = [Line(reading=same[0], hosts=_join_hosts(same)) for same in joined.values()]
    return sorted(lines, key=lambda line: _ORDER.index(line.reading.verdict))


def _join_hosts(parts: Iterable[Line | Reading]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(host for one in parts for host in one.hosts))


def format_hosts(line: Line, all_hosts: Sequence[str]) -> str:
    """Return whose a line is, with a colon behind; empty where there is one host only, or where it begins with the host's name."""
    if len(all_hosts) < 2 or not line.hosts:
        return ""
    first = line.hosts[0]
    if len(line.hosts) == 1 and line.reading.what.startswith((f"{first} ", f"{first}:", f"{first}'")):
        return ""
    alike = f" (and alike on {name_hosts(line.alike, ())})" if line.alike else ""
    return f"{name_hosts(line.hosts, all_hosts)}{alike}: "


def judge_host(host: HostReport, report: ClusterReport) -> Verdict:
    """Return how a host is, by its own readings and by those of several hosts that are about some of them; what was skipped counts for nothing."""
    readings = [one for one in (*host.readings, *_list_shared(host, report)) if one.verdict != "skipped"]
    return "fail" if host.lost else find_worst(readings)


def count_host(host: HostReport, report: ClusterReport) -> str:
    """Return the counts by which a host is judged: ``18 ok, 10 skipped, 1 fail with others``; why it was lost, if it was."""
    shared = [one for one in _list_shared(host, report) if one.is_bad]
    info = (count_verdicts(host.readings), f"{count_verdicts(shared)} with others" if shared else "")
    return host.lost or ", ".join(part for part in info if part)


def _list_shared(host: HostReport, report: ClusterReport) -> list[Reading]:
    """Return what was found by comparing hosts, and is about some of them, with this one."""
    return [one for one in report.readings if host.name in one.hosts and len(one.hosts) < len(report.hosts)]


def judge(report: ClusterReport) -> Verdict:
    """Return how it all is: what was skipped counts only where nothing else was seen, and who did not come is a failure."""
    if report.missing:
        return "fail"
    readings = list_readings(report)
    return find_worst([one for one in readings if one.verdict != "skipped"] or readings)


def join_skipped(lines: Iterable[Line]) -> list[Line]:
    """Join what several probes skipped for the same reason: their names stand in the place of one."""
    joined: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        joined.setdefault((line.reading.what, line.reading.why), []).append(line)
    found = []
    for first, *others in joined.values():
        one, names = first.reading, ", ".join(line.reading.probe for line in (first, *others))
        if others:
            one = replace(one, probe=f"{len(others) + 1} probes", what=f"{one.what}: {names}")
        found.append(replace(first, reading=one))
    return found


def name_hosts(hosts: Sequence[str], all_hosts: Sequence[str]) -> str:
    """Return hosts by name: ``node1 and node3``; ``all 8 hosts``; of very many some, and the number of the others."""
    if len(all_hosts) > 1 and set(hosts) >= set(all_hosts):
        return "both hosts" if len(all_hosts) == 2 else f"all {len(all_hosts)} hosts"
    return join_names(hosts, _MOST_NAMED)


def count_verdicts(readings: Iterable[Reading]) -> str:
    """Return the counts: ``1 fail, 2 warn, 30 ok, 4 skipped``."""
    by_verdict: Counter[Verdict] = Counter(one.verdict for one in readings)
    return ", ".join(f"{by_verdict[one]} {one}" for one in _ORDER if by_verdict[one])
