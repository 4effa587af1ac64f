"""Ranks whose collectives do not correspond: each way to differ has its rule, and the ranks that deviate are named."""

from __future__ import annotations

from typing import Any

import pytest

from rankwise.evidence.facts import Group, Op, RankFacts
from rankwise.verdict.look import look
from scenes import (
    buffers,
    ended,
    gradient,
    in_backward,
    in_call,
    in_forward,
    in_wrapping,
    op,
    rank,
    scene,
)  # fmt: skip

_OPEN = {"is_over": False}
_WRAPPING = {"source": "native", "inside": ("__init__", "_verify_param_shape_across_processes")}


def _first(*ranks: RankFacts, **facts: Any) -> Any:
    return look(scene(*ranks, **facts))[0]


@pytest.mark.parametrize(
    ("ops", "rule", "class_id", "is_stuck"),
    [
        ((op("all_reduce", **_OPEN), op("barrier", **_OPEN)), "other_op", "C8", True),
        ((op("broadcast", root=0, **_OPEN), op("broadcast", root=1, **_OPEN)), "other_root", "C8", True),
        ((op("reduce", root=0, **_OPEN), op("reduce", root=1, **_OPEN)), "other_root", "C8", True),
        ((op(reduce_op="sum"), op(reduce_op="max")), "other_reduction", None, False),
        ((op(shape=(2,), **_OPEN), op(shape=(50,), **_OPEN)), "other_size", "C5", True),
        (
            (op("all_gather", shape=(2,), **_OPEN), op("all_gather", shape=(3,), **_OPEN)),
            "other_size",
            "C5",
            True,
        ),
        (
            (op("broadcast", shape=(1,), **_OPEN), op("broadcast", shape=(0,), **_OPEN)),
            "other_size",
            "C5",
            True,
        ),
        ((op(**_OPEN), op(dtypes=("int32",), **_OPEN)), "other_dtype", "C7", False),
        ((op(**_OPEN), op(dtypes=("float64",), **_OPEN)), "other_dtype", "C7", True),
        ((op(shape=(2, 3)), op(shape=(3, 2))), "other_shape", "C6", False),
    ],
)
def test_each_way_to_differ_has_its_rule(
    ops: tuple[Op, Op], rule: str, class_id: str | None, is_stuck: bool
) -> None:
    """Two ranks that differ under one number are named together, and what went through is no hang."""
    sight = _first(rank(0, op(), ops[0]), rank(1, op(), ops[1]))
    assert (sight.kind, sight.rule, sight.class_id, sight.is_stuck) == ("mismatch", rule, class_id, is_stuck)
    assert sight.culprits == (0, 1)
    assert sight.where == "/job/train.py:7"
    assert "collective #2" in sight.message
    assert "train.py:7" in sight.fix


def test_of_many_ranks_the_few_are_named() -> None:
    """Seven ranks that agree are innocent, and the eighth stands first in the sentence."""
    ranks = [
        rank(number, op(), op(at=20, **_OPEN), at=in_call(at=20), world=8)
        for number in range(8)
        if number != 5
    ]
    odd = rank(5, op(), op("barrier", at=31, **_OPEN), at=in_call("barrier", 31), world=8)
    sight = _first(*ranks[:5], odd, *ranks[5:])
    assert (sight.culprits, sight.where) == ((5,), "/job/train.py:31")
    assert sight.message.index("rank 5 is in barrier") < sight.message.index(
        "ranks 0-4, 6, 7 are in all_reduce"
    )
    assert [one.rank for one in sight.waiting] == [0, 1, 2, 3, 4, 6, 7]


def test_the_first_difference_is_told_and_not_what_follows_from_it() -> None:
    """When ranks have slipped by one, all later numbers differ too."""
    sights = look(
        scene(
            rank(0, op(), op("barrier", at=3), op(), op("barrier", at=3)),
            rank(1, op("barrier", at=3), op(), op("barrier", at=3), op()),
        )
    )
    assert len(sights) == 1
    assert "collective #1" in sights[0].message


def test_groups_are_compared_by_their_members_not_by_their_names() -> None:
    """A rank that made one group more calls the next one by another name."""
    pair = (Group(name="1", ranks=(0, 1), backend="nccl"),)
    other = (Group(name="2", ranks=(0, 1), backend="nccl"),)
    sight = _first(
        rank(0, op(group="1", shape=(2,)), groups=pair, world=3, backend="nccl"),
        rank(1, op(group="2", shape=(3,)), groups=other, world=3, backend="nccl"),
        rank(2, world=3, backend="nccl"),
    )
    assert (sight.rule, sight.culprits) == ("other_size", (0, 1))


def test_uneven_steps_met_by_a_metric_are_named() -> None:
    """D14: gradients of one rank summed with a metric of another, although both are of one size."""
    sight = _first(
        ended(0, gradient(shape=(3,)), op(at=8, shape=(3,))),
        rank(1, gradient(shape=(3,)), gradient(shape=(3,)), op(at=8, shape=(3,), **_OPEN), at=in_call(at=8)),
    )
    assert (sight.rule, sight.class_id, sight.is_stuck) == ("gradients_met", "D14", False)


@pytest.mark.parametrize("world", [2, 5])
def test_a_barrier_met_by_gradients_is_stuck(world: int) -> None:
    """D14: the rank with one batch more is in backward, and all others are at the end of the epoch."""
    most = [
        rank(number, gradient(8), op("barrier", at=9, **_OPEN), at=in_call("barrier", 9), world=world)
        for number in range(world - 1)
    ]
    odd = rank(world - 1, gradient(8), gradient(8, **_OPEN), at=in_backward(8), world=world)
    sight = _first(*most, odd)
    assert (sight.kind, sight.certainty, sight.class_id, sight.is_stuck) == ("mismatch", "proof", "D14", True)
    assert sight.culprits == ((0, 1) if world == 2 else (world - 1,))


def test_gradients_of_a_line_that_the_others_never_saw_get_no_class() -> None:
    """Without a common past it is not known that somebody made more steps."""
    sight = _first(rank(0, gradient(8, **_OPEN)), rank(1, op("barrier", at=9, **_OPEN)))
    assert (sight.rule, sight.class_id) == ("gradients_met", None)


@pytest.mark.parametrize(
    ("mine", "theirs", "class_id"),
    [
        ([gradient(8), buffers(11, **_OPEN)], [gradient(8), op("barrier", at=13, **_OPEN)], "D17"),
        ([gradient(8), buffers(9), buffers(9), buffers(9, **_OPEN)], [gradient(8), buffers(9), buffers(9), op("barrier", at=10, **_OPEN)], "D19"),
        ([buffers(9), gradient(8), buffers(9, **_OPEN)], [buffers(9), gradient(8), op("barrier", at=10, **_OPEN)], "D14"),
        ([op(seq=999), buffers(11, seq=1000, **_OPEN)], [op(seq=999), op("barrier", seq=1000, **_OPEN)], None),
    ],
    ids=["rank 0 evaluates", "uneven evaluation", "uneven training", "the past is lost"],
)  # fmt: skip
def test_a_forward_pass_on_some_ranks_is_named(
    mine: list[Op], theirs: list[Op], class_id: str | None
) -> None:
    """D17, D19: what the ranks did before tells which of them it is."""
    sight = _first(
        rank(0, *mine, at=in_forward(mine[-1].seq or 11)), rank(1, *theirs, at=in_call("barrier", 13))
    )
    assert (sight.rule, sight.class_id, sight.is_stuck) == ("forward_on_some", class_id, True)


def test_ddp_on_some_ranks_is_named() -> None:
    """D13: the constructor's comparison of the models met a barrier."""
    sight = _first(
        rank(0, op("all_gather", at=5, **_WRAPPING, **_OPEN), at=in_wrapping()),
        rank(1, op("barrier", at=8, **_OPEN), at=in_call("barrier", 8)),
    )
    assert (sight.rule, sight.class_id) == ("wrapped_on_some", "D13")


def test_two_metrics_in_opposite_order_are_seen_although_nothing_hangs() -> None:
    """C3: same operation, same shape; only the lines tell, and it is said as a suspicion."""
    sight = _first(rank(0, op(at=6), op(at=7)), rank(1, op(at=7), op(at=6)))
    assert (sight.rule, sight.class_id, sight.certainty, sight.is_stuck) == (
        "swapped_order",
        "C3",
        "suspicion",
        False,
    )


def test_two_sizes_in_opposite_order_are_an_order_not_a_size() -> None:
    """C3: when each rank made next what the other makes now."""
    sight = _first(
        rank(0, op(at=6, shape=(2,)), op(at=7, shape=(50,), **_OPEN)), rank(1, op(at=7, shape=(50,)), op(at=6, shape=(2,), **_OPEN))
    )  # fmt: skip
    assert (sight.rule, sight.class_id, sight.certainty) == ("swapped_order", "C3", "proof")


def test_lists_of_objects_of_different_length_are_named() -> None:
    """C20: broadcast_object_list sends the sizes first."""
    told = {"inside": ("broadcast_object_list",), "dtypes": ("int64",), "root": 0}
    sight = _first(rank(0, op("broadcast", shape=(1,), **told)), rank(1, op("broadcast", shape=(0,), **told)))
    assert sight.class_id == "C20"


def test_new_groups_with_lists_of_each_rank_are_named() -> None:
    """C10: one number, two lists of members."""
    low, high = Group(name="1", ranks=(0, 1), backend="gloo"), Group(name="1", ranks=(2, 3), backend="gloo")
    ranks = [
        rank(number, op(group="1", at=6, **_OPEN), groups=(low if number < 2 else high,), world=4)
        for number in range(4)
    ]
    sight = _first(*ranks)
    assert (sight.rule, sight.class_id, sight.where) == ("other_members", "C10", "/job/train.py:6")
    assert "ranks 0, 1 say [0, 1]" in sight.message


_CLEANUP = """import torch
try:
    work()
    dist.all_reduce(x)
finally:
    dist.barrier()
"""


def test_a_collective_in_finally_is_named_where_the_text_tells_it() -> None:
    """C25: the rank in the finally left the block early; without the text both are shown as they are."""
    ranks = (
        rank(0, op(at=4, **_OPEN), at=in_call(at=4)),
        rank(1, op("barrier", at=6, **_OPEN), at=in_call("barrier", 6)),
    )
    sight = _first(*ranks, sources={"/job/train.py": _CLEANUP})
    assert (sight.rule, sight.class_id, sight.culprits, sight.where) == (
        "cleanup_collective",
        "C25",
        (1,),
        "/job/train.py:6",
    )
    assert _first(*ranks).class_id == "C8"


def test_wrong_results_come_before_the_hang_that_follows_them() -> None:
    """Both are told: the first is the cause, and the second says that the ranks can't go on."""
    silent, stuck = look(
        scene(
            ended(0, op(), op(dtypes=("int32",))),
            rank(1, op(), op(), op(**_OPEN), at=in_call()),
        )
    )
    assert (silent.rule, silent.is_stuck) == ("other_dtype", False)
    assert (stuck.rule, stuck.is_stuck) == ("member_ended", True)
