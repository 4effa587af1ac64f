"""Who left a job of several nodes with exit code 0: by the records of all nodes, and only if no rank failed by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rankwise.base.faults import FaultRecord
from rankwise.verdict.leavers import find_leavers
from scenes import ended, op, scene

PEER = FaultRecord(message="RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.1]:5")
OWN = FaultRecord(message="ValueError: boom")
LEFT = ended(2, op(), op(), world=3)
LOST = [ended(number, op(), op(), op(at=9, is_over=False), code=1, fault=PEER, world=3) for number in (0, 1)]


def test_who_ended_well_before_a_collective_that_others_had_entered_is_named() -> None:
    """Ranks 0 and 1 lost their peer in the third collective; rank 2 has made two and ended with 0."""
    sight = find_leavers(scene(*LOST, LEFT), ())
    assert sight is not None
    assert (sight.kind, sight.rule, sight.class_id, sight.culprits) == ("hang", "member_ended", "R6", (2,))
    assert sight.where == "/job/train.py:9"
    assert [one.rank for one in sight.waiting] == [0, 1]
    assert sight.message.startswith(
        "rank 2 has ended with exit code 0; ranks 0, 1 still needed it in all_reduce #3"
    )


def test_who_had_no_part_in_it_is_not_named() -> None:
    """Rank 1 was stopped by its launcher, and exits with 0 on SIGTERM: that tells nothing of it."""
    stopped = ended(1, op(), world=3)
    sight = find_leavers(scene(LOST[0], stopped, LEFT), {1})
    assert sight is not None
    assert sight.culprits == (2,)


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param((replace(LOST[0], fault=OWN), LOST[1], LEFT), id="a rank failed by itself"),
        pytest.param((replace(LOST[0], code=-9, fault=None), LOST[1], LEFT), id="a rank was killed"),
        pytest.param((*LOST, ended(2, op(), op(), op(at=9), world=3)), id="it came to all of them"),
        pytest.param((*LOST, replace(LEFT, evidence=None)), id="nothing is recorded of it"),
    ],
)
def test_nobody_is_named_where_it_may_have_been_otherwise(ranks: tuple[object, ...]) -> None:
    """An error of a rank's own is the cause, and its node tells it; without a record nobody knows who was missed."""
    assert find_leavers(scene(*ranks), ()) is None  # type: ignore[arg-type]


def test_a_node_that_tells_nothing_leaves_it_open() -> None:
    """Not all ranks are known: the one that failed may be among the others."""
    assert find_leavers(scene(*LOST, LEFT, world_size=4, is_whole=False), ()) is None
