"""Ranks with roles, in words."""

from __future__ import annotations

import pytest

from rankwise.base.roles import are_spare, list_roles, name_roles, read_counts

ROLES = list_roles(read_counts("ps=2,worker=4"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("rank 1: killed by SIGKILL", "server 1 (rank 1): killed by SIGKILL"),
        ("rank 5 waited for rank 0", "worker 3 (rank 5) waited for server 0 (rank 0)"),
        ("  others   ranks 0, 2-4 stopped", "  others   ranks 0, 2-4 (server 0, workers 0-2) stopped"),
        ("ranks 0, 1, 3 and 5", "ranks 0, 1, 3 (servers 0-1, worker 1) and 5"),
        ("[rank 1] server 1 (rank 1) is gone", "[rank 1] server 1 (rank 1) is gone"),
        ("    | print('rank 1')", "    | print('rank 1')"),
        ("rank 9 of another job", "rank 9 of another job"),
        ("--node-rank 1", "--node-rank 1"),
    ],
)
def test_sentences_tell_roles(text: str, told: str) -> None:
    """Each rank with its role, once; what the script has said is left alone, and without roles everything is."""
    assert name_roles(text, ROLES) == told
    assert name_roles(told, ROLES) == told
    assert name_roles(text, ()) == text


@pytest.mark.parametrize(
    ("lost", "is_spare"), [([3, 4, 5], True), ([1, 3], False), ([2, 3], False), ([6], False), ([], True)]
)
def test_a_job_continues_without_workers_alone(lost: list[int], is_spare: bool) -> None:
    """Not without a server, the first worker (it may be the coordinator), or a rank that has no role."""
    assert are_spare(lost, ROLES) == is_spare
