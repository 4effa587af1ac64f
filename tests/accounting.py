"""Where a test run's time goes: CPU seconds and launches by folder, and the dearest tests; shown below each long run.

What counts is the CPU of the test's own process and of what it has waited for, of the Pythons that `python_forks` has forked for it, and of
the ranks of `run_ranks`. Ranks that a resident server has forked are not among these: the resident servers' sum stands in a line of its own.
What daemons, servers that have ended, and ranks of servers that were killed have used is in the sum of the host alone, with all else that ran there.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, final

import pytest

import python_forks
import support

if TYPE_CHECKING:
    from collections.abc import Iterator

#: A few tests that somebody has picked need no account.
_WORTH_IT, _DEAREST = 1000, 30
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def _measure_cpu() -> float:
    times = os.times()
    own_s = times.user + times.system + times.children_user + times.children_system
    return own_s + python_forks.measure_cpu_s() + _measure_forkserver_s()


def _measure_forkserver_s() -> float:
    """Return the CPU seconds of multiprocessing's fork server, which imports torch, and of its children that have ended."""
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS


@final
class Accounting:
    """The plugin: measures in each worker, and adds up in the process that shows the result."""

    def __init__(self) -> None:
        self._seconds, self._cpu, self._launches = Counter[str](), Counter[str](), Counter[str]()
        self._num_tests, self._host_s = 0, _measure_host_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Measure one test."""
        cpu, launches = _measure_cpu(), support.count_launches()
        try:
            return (yield)
        finally:
            item.user_properties.append(("cpu_s", _measure_cpu() - cpu))
            item.user_properties.append(("launches", support.count_launches() - launches))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up; a test's setup and end count as its own time."""
        self._seconds[report.nodeid] += report.duration
        if report.when == "teardown":
            self._num_tests += 1
            facts = dict(report.user_properties)
            self._cpu[report.nodeid] += float(str(facts.get("cpu_s", 0)))
            self._launches[report.nodeid] += int(str(facts.get("launches", 0)))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Show the account of a long run."""
        if self._num_tests < _WORTH_IT:
            return
        rows = {
            name: [_sum_up(counted).get(name, 0) for counted in (self._seconds, self._cpu, self._launches)]
            for name in _sum_up(self._seconds)
        }
        terminalreporter.section("where the time went")
        terminalreporter.line(f"{'folder':24} {'seconds':>8} {'CPU':>8} {'launches':>8}")
        for name, (seconds, cpu, launches) in sorted(rows.items(), key=lambda row: -row[1][0]):
            terminalreporter.line(f"{name:24} {seconds:8.0f} {cpu:8.0f} {launches:8.0f}")
        terminalreporter.line(f"{'resident servers':24} {'':8} {_measure_residents():8.0f}")
        terminalreporter.line(f"{'this host':24} {'':8} {_measure_host_s() - self._host_s:8.0f}")
        terminalreporter.line(f"for comparison of machines: 20 million additions take {_time_loop():.2f} s here, now")
        for name, seconds in self._seconds.most_common(_DEAREST):
            terminalreporter.line(f"{seconds:6.1f} s  {self._cpu[name]:6.1f} s of CPU  {name}")


def _sum_up(counted: Counter[str]) -> dict[str, float]:
    found = Counter[str]()
    for name, value in counted.items():
        found["/".join(name.split("/")[:2])] += value  # type: ignore[assignment]
    return dict(found)


def _time_loop() -> float:
    begin, total = time.perf_counter(), 0
    for number in range(20_000_000):
        total += number
    return time.perf_counter() - begin


def _measure_host_s() -> float:
    """Return the CPU seconds that this host has used since it was started."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq) / _TICKS


def _measure_residents() -> float:
    """Return the CPU seconds of this session's resident servers, and of all that they have waited for."""
    total = 0
    for path in support.RESIDENT_FOLDER.glob("*.sock"):
        try:
            fields = Path(f"/proc/{path.stem.rpartition('-')[2]}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11:15]))
    return total / _TICKS
