"""In a job of several hosts a finding tells on which of them its culprits run."""

from __future__ import annotations

import pytest

from rankwise.verdict.finding import JobFinding
from rankwise.verdict.hosts import with_hosts

NODES = [("a", range(2)), ("b", range(2, 4)), ("b", range(4, 12))]


@pytest.mark.parametrize(
    ("culprits", "message", "told"),
    [
        ((3,), "rank 3 sleeps; rank 30 waits", "rank 3 (host b, local rank 1) sleeps; rank 30 waits"),
        ((3,), "ranks 0, 1, 3 wait for rank 3", "ranks 0, 1, 3 wait for rank 3 (host b, local rank 1)"),
        ((1, 2), "ranks 1, 2 sleep", "ranks 1, 2 (hosts a, b) sleep"),
        ((2, 3, 4), "ranks 2-4 sleep; ranks 2-4, 7 too", "ranks 2-4 (host b) sleep; ranks 2-4, 7 too"),
        ((0, 3), "rank 0 sends; rank 3 too", "rank 0 sends; rank 3 too (rank 0: host a; rank 3: host b)"),
        ((), "nobody knows", "nobody knows"),
    ],
)
def test_hosts_stand_behind_the_ranks(culprits: tuple[int, ...], message: str, told: str) -> None:
    """At the first place that names them all; else at the end, each with its own."""
    finding = JobFinding(kind="hang", certainty="proof", rule="r", culprits=culprits, message=message, key="k")
    assert with_hosts(finding, NODES).message == told


def test_a_job_of_one_host_is_told_as_before() -> None:
    """There is nothing to tell apart."""
    finding = JobFinding(kind="hang", certainty="proof", rule="r", culprits=(0,), message="rank 0 sleeps", key="k")
    assert with_hosts(finding, NODES[:1]) == finding
