"""What the doctor has found, for programs: a verdict and a list of findings, and behind them all that was seen."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import cast

from rankwise.doctor.json_records import to_json
from rankwise.doctor.multi_host.cluster_report import ClusterReport
from rankwise.doctor.probe import VERDICTS, Fact
from rankwise.doctor.reporters.grouping import join_same, judge, list_readings

#: Raised when a key goes or means something else; new keys may come at any time.
SCHEMA = 1


def record(report: ClusterReport, *, version: str, made: str, exit_code: int) -> dict[str, Fact]:
    """Return the report as plain JSON: first what a gate asks for, then what hosts tell each other as it is.

    ``made`` is UTC, ISO 8601.
    """
    readings = list_readings(report)
    counts = Counter(one.verdict for one in readings)
    # With all hosts that each is about; the facts, which hosts are compared by, stand with the readings.
    bad = [replace(one.reading, hosts=one.hosts).to_json() for one in join_same(readings) if one.reading.is_bad]
    findings: list[Fact] = [{name: value for name, value in one.items() if name != "facts"} for one in bad]
    return {
        "rankwise": version, "schema": SCHEMA, "made": made, "verdict": judge(report), "exit_code": exit_code,
        "counts": {one: counts[one] for one in reversed(VERDICTS)}, "findings": findings, **cast("dict[str, Fact]", to_json(report)),
    }  # fmt: skip
