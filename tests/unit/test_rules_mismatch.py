"""Ranks whose collectives do not correspond: each way to differ has its rule, and the ranks that deviate are named."""

from __future__ import annotations

from typing import Any

import pytest

from rankwise.evidence.reader.notes import Frame, Stack
from rankwise.evidence.reader.scene import Group, Op, RankFacts
from rankwise.verdict.run_rules import look
from rankwise.verdict.split_mismatch import find_item_size
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
    stack,
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
def test_each_way_to_differ_has_its_rule(ops: tuple[Op, Op], rule: str, class_id: str | None, is_stuck: bool) -> None:
    """Two ranks that differ under one number are named together, and what went through is no hang."""
    finding = _first(rank(0, op(), ops[0]), rank(1, op(), ops[1]))
    assert (finding.kind, finding.rule, finding.class_id, finding.is_stuck) == (
        "mismatch",
        rule,
        class_id,
        is_stuck,
    )
    assert finding.culprits == (0, 1)
    assert finding.where == "/job/train.py:7"
    assert "collective #2" in finding.message
    assert "train.py:7" in finding.fix


def test_of_many_ranks_the_few_are_named() -> None:
    """Seven ranks that agree are innocent, and the eighth stands first in the sentence."""
    ranks = [rank(number, op(), op(at=20, **_OPEN), at=in_call(at=20), world=8) for number in range(8) if number != 5]
    odd = rank(5, op(), op("barrier", at=31, **_OPEN), at=in_call("barrier", 31), world=8)
    finding = _first(*ranks[:5], odd, *ranks[5:])
    assert (finding.culprits, finding.where) == ((5,), "/job/train.py:31")
    assert finding.message.index("rank 5 is in barrier") < finding.message.index("ranks 0-4, 6, 7 are in all_reduce")
    assert [one.rank for one in finding.waiting] == [0, 1, 2, 3, 4, 6, 7]


def test_the_first_difference_is_told_and_not_what_follows_from_it() -> None:
    """When ranks have slipped by one, all later numbers differ too."""
    findings = look(
        scene(
            rank(0, op(), op("barrier", at=3), op(), op("barrier", at=3)),
            rank(1, op("barrier", at=3), op(), op("barrier", at=3), op()),
        )
    )
    assert len(findings) == 1
    assert "collective #1" in findings[0].message


def test_groups_are_compared_by_their_members_not_by_their_names() -> None:
    """A rank that made one group more calls the next one by another name."""
    pair = (Group(name="1", ranks=(0, 1), backend="nccl"),)
    other = (Group(name="2", ranks=(0, 1), backend="nccl"),)
    finding = _first(
        rank(0, op(group="1", shape=(2,)), groups=pair, world=3, backend="nccl"),
        rank(1, op(group="2", shape=(3,)), groups=other, world=3, backend="nccl"),
        rank(2, world=3, backend="nccl"),
    )
    assert (finding.rule, finding.culprits) == ("other_size", (0, 1))


def test_uneven_steps_met_by_a_metric_are_named() -> None:
    """D14: gradients of one rank summed with a metric of another, although both are of one size."""
    finding = _first(
        ended(0, gradient(shape=(3,)), op(at=8, shape=(3,))),
        rank(1, gradient(shape=(3,)), gradient(shape=(3,)), op(at=8, shape=(3,), **_OPEN), at=in_call(at=8)),
    )
    assert (finding.rule, finding.class_id, finding.is_stuck) == ("mispaired_gradients", "D14", False)


@pytest.mark.parametrize("world", [2, 5])
def test_a_barrier_met_by_gradients_is_stuck(world: int) -> None:
    """D14: the rank with one batch more is in backward, and all others are at the end of the epoch."""
    most = [
        rank(number, gradient(8), op("barrier", at=9, **_OPEN), at=in_call("barrier", 9), world=world)
        for number in range(world - 1)
    ]
    odd = rank(world - 1, gradient(8), gradient(8, **_OPEN), at=in_backward(8), world=world)
    finding = _first(*most, odd)
    assert (finding.kind, finding.certainty, finding.class_id, finding.is_stuck) == (
        "mismatch",
        "proof",
        "D14",
        True,
    )
    assert finding.culprits == ((0, 1) if world == 2 else (world - 1,))


def test_gradients_of_a_line_that_the_others_never_saw_get_no_class() -> None:
    """Without a common past it is not known that somebody made more steps."""
    finding = _first(rank(0, gradient(8, **_OPEN)), rank(1, op("barrier", at=9, **_OPEN)))
    assert (finding.rule, finding.class_id) == ("mispaired_gradients", None)


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
def test_a_forward_pass_on_some_ranks_is_named(mine: list[Op], theirs: list[Op], class_id: str | None) -> None:
    """D17, D19: what the ranks did before tells which of them it is."""
    finding = _first(rank(0, *mine, at=in_forward(mine[-1].seq or 11)), rank(1, *theirs, at=in_call("barrier", 13)))
    assert (finding.rule, finding.class_id, finding.is_stuck) == ("forward_on_some", class_id, True)


def test_ddp_on_some_ranks_is_named() -> None:
    """D13: the constructor's comparison of the models met a barrier."""
    finding = _first(
        rank(0, op("all_gather", at=5, **_WRAPPING, **_OPEN), at=in_wrapping()),
        rank(1, op("barrier", at=8, **_OPEN), at=in_call("barrier", 8)),
    )
    assert (finding.rule, finding.class_id) == ("wrapped_on_some", "D13")


def test_two_metrics_in_opposite_order_are_seen_although_nothing_hangs() -> None:
    """C3: same operation, same shape; only the lines tell, and it is said as a suspicion."""
    lines = {"/job/train.py": "\n" * 5 + "all_reduce(loss)\nall_reduce(accuracy)\n"}
    finding = _first(rank(0, op(at=6), op(at=7)), rank(1, op(at=7), op(at=6)), sources=lines)
    assert (finding.rule, finding.class_id, finding.certainty, finding.is_stuck) == (
        "swapped_order",
        "C3",
        "suspicion",
        False,
    )


def test_two_sizes_in_opposite_order_are_an_order_not_a_size() -> None:
    """C3: when each rank made next what the other makes now."""
    finding = _first(
        rank(0, op(at=6, shape=(2,)), op(at=7, shape=(50,), **_OPEN)), rank(1, op(at=7, shape=(50,)), op(at=6, shape=(2,), **_OPEN))
    )  # fmt: skip
    assert (finding.rule, finding.class_id, finding.certainty) == ("swapped_order", "C3", "proof")


def test_lists_of_objects_of_different_length_are_named() -> None:
    """C20: broadcast_object_list sends the sizes first."""
    told = {"inside": ("broadcast_object_list",), "dtypes": ("int64",), "root": 0}
    finding = _first(rank(0, op("broadcast", shape=(1,), **told)), rank(1, op("broadcast", shape=(0,), **told)))
    assert finding.class_id == "C20"


def test_new_groups_with_lists_of_each_rank_are_named() -> None:
    """C10: one number, two lists of members."""
    low, high = Group(name="1", ranks=(0, 1), backend="gloo"), Group(name="1", ranks=(2, 3), backend="gloo")
    ranks = [
        rank(number, op(group="1", at=6, **_OPEN), groups=(low if number < 2 else high,), world=4)
        for number in range(4)
    ]
    finding = _first(*ranks)
    assert (finding.rule, finding.class_id, finding.where) == ("other_members", "C10", "/job/train.py:6")
    assert "ranks 0, 1 list [0, 1]" in finding.message


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
    finding = _first(*ranks, sources={"/job/train.py": _CLEANUP})
    assert (finding.rule, finding.class_id, finding.culprits, finding.where) == (
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


_DEEP = """R = dist.get_rank()
def train():
    dist.all_reduce(x)
def cleanup():
    dist.barrier()
def save(x):
    dist.broadcast(x, 0)
try: train()
finally: cleanup()
if R == 0:
    save(x)
dist.all_reduce(x)
try: train()
except KeyError: cleanup()
"""
_DEEP_SOURCES = {"/job/train.py": _DEEP}


def _called(name: str, *lines: int) -> Stack:
    """Return the stack of a collective at the first line, called from the lines after it."""
    callers = tuple(Frame(file="/job/train.py", line=line, function="main") for line in lines[1:])
    return Stack(frames=(*in_call(name, lines[0]).frames, *callers))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("body", "clean"), [(8, 9), (13, 14)], ids=["finally", "except"])
def test_a_clean_up_in_functions_is_named_by_their_callers(world: int, body: int, clean: int) -> None:
    """C25: neither collective stands in the try itself; the lines that called them do."""
    ranks = [
        rank(number, op(at=3), op(at=3, **_OPEN), at=_called("all_reduce", 3, body), world=world)
        for number in range(world - 1)
    ]
    odd = rank(world - 1, op(at=3), op("barrier", at=5, **_OPEN), at=_called("barrier", 5, clean), world=world)
    finding = _first(*ranks, odd, sources=_DEEP_SOURCES)
    assert (finding.rule, finding.class_id, finding.culprits) == ("cleanup_collective", "C25", (world - 1,))
    assert _first(*ranks, odd).rule == "other_op"


def test_a_finally_met_by_gradients_may_be_a_loop_that_ended() -> None:
    """The rank is through with its batches or has raised: it is named, and no class is."""
    finding = _first(
        rank(0, gradient(3), gradient(3, **_OPEN), at=_called("_engine_run_backward", 3, 8)),
        rank(1, gradient(3), op("barrier", at=5, **_OPEN), at=_called("barrier", 5, 9)),
        sources=_DEEP_SOURCES,
    )
    assert (finding.rule, finding.culprits) == ("cleanup_collective", (1,))
    assert "a loop that ended earlier" in finding.fix


@pytest.mark.parametrize("was_there", [False, True])
def test_of_two_the_one_under_a_rank_test_is_named(was_there: bool) -> None:
    """C8: rank 0 came to a helper's collective by `if R == 0`; had it gone well there before, nobody would know."""
    past = [op("broadcast", at=7)] * was_there or [op(at=12)]
    finding = _first(
        rank(0, *past, op("broadcast", at=7, **_OPEN), at=_called("broadcast", 7, 11)),
        rank(1, *past, op(at=12, **_OPEN), at=_called("all_reduce", 12)),
        sources=_DEEP_SOURCES,
    )
    assert (finding.rule, finding.culprits) == ("other_op", (0, 1) if was_there else (0,))
    assert ("out of the rank test at line 10" in finding.fix) != was_there


_CHECKING = op("all_gather", at=12, shape=(1,), dtypes=("int64",), **_WRAPPING)


@pytest.mark.parametrize("line", [2, 7])
def test_a_models_comparison_is_no_other_gather(line: int) -> None:
    """Both are all_gather of one int64. D13, or, where the other one stands under a rank test, one collective too many."""
    told = op("all_gather", at=line, shape=(1,), dtypes=("int64",))
    finding = _first(rank(0, _CHECKING), rank(1, told, at=_called("all_gather", 7, 11)), sources=_DEEP_SOURCES)
    assert (finding.rule, finding.class_id) == (("other_op", "C1") if line == 7 else ("wrapped_on_some", "D13"))
    assert finding.culprits == ((1,) if line == 7 else (0, 1))


def test_a_gather_of_unknown_origin_is_no_other_one() -> None:
    """The flight recorder may have a collective of DDP's without the functions that it came from."""
    assert not look(scene(rank(0, _CHECKING), rank(1, op("all_gather", at=12, shape=(1,), dtypes=("int64",), source="native"))))  # fmt: skip


def test_who_names_members_that_do_not_agree_is_the_one() -> None:
    """C10: rank 3 says [2, 3], and rank 2, which is past it, has no such group."""
    low, high = Group(name="1", ranks=(0, 1), backend="gloo"), Group(name="1", ranks=(2, 3), backend="gloo")
    waiting = {"at": in_call("barrier"), "world": 4}
    ranks = [rank(number, op("barrier", **_OPEN), groups=(low,), **waiting) for number in (0, 1)]
    third = rank(2, op("barrier", **_OPEN), **waiting)
    odd = rank(3, op("barrier", **_OPEN), groups=(high,), **waiting)
    assert _first(*ranks, third, odd).culprits == (3,)
    # While rank 2 may still come, nobody is more to blame than the others.
    late = rank(2, op("barrier"), at=in_call("new_group"), world=4)
    assert _first(*ranks, late, odd).culprits == (0, 1, 3)


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_state_dict_met_by_a_barrier_is_named(is_recorded: bool) -> None:
    """D28: the others do make a collective, and it is another one; the record of the functions, or the stack, tells of it."""
    inside = ("full_tensor", "redistribute") if is_recorded else ()
    gathering = op("all_gather", at=10, inside=inside, **_OPEN)
    api = "/env/lib/python3.11/site-packages/torch/distributed/tensor/_api.py"
    at = None if is_recorded else stack((api, 731, "redistribute"), (api, 774, "full_tensor"), at=10)
    finding = _first(rank(0, gathering, at=at), rank(1, op("barrier", at=12, **_OPEN), at=in_call("barrier", 12)))
    assert (finding.rule, finding.class_id) == ("state_on_some", "D28")


def test_uneven_training_is_not_told_as_an_evaluation() -> None:
    """D14: the advice is about the steps, not about model.module."""
    finding = _first(
        rank(0, buffers(9), gradient(8), buffers(9, **_OPEN), at=in_forward(9)),
        rank(1, buffers(9), gradient(8), op("barrier", at=10, **_OPEN), at=in_call("barrier", 10)),
    )
    assert (finding.class_id, "model.module" in finding.fix) == ("D14", False)


def test_steps_tell_of_training_where_c_plus_plus_left_no_records() -> None:
    """D14: the rank that aborted had no time to tell of its gradients, but of its steps."""
    finding = _first(rank(0, gradient(8), op(seq=1, group="x")), rank(1, op(at=9, shape=(1,), **_OPEN), steps=9))
    assert (finding.rule, finding.class_id) == ("mispaired_gradients", "D14")


def test_a_group_of_the_same_members_is_told_by_its_name() -> None:
    """Its name is no number of ranks."""
    groups = (Group(name="2", ranks=(0, 1), backend="gloo"),)
    finding = _first(
        rank(0, op(at=5, **_OPEN), at=in_call(at=5), groups=groups),
        rank(1, op(at=6, group="2", **_OPEN), at=in_call(at=6), groups=groups),
    )
    assert "among ranks 0, 1 (group 2) at train.py:6" in finding.message


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("torch.complex128", 16), ("float8_e4m3fn", 1), ("torch.uint8", 1), ("bfloat16", 2), ("?", None)],
)
def test_the_size_of_an_element_is_in_its_name(dtype: str, size: int | None) -> None:
    """By it ranks of which one sends float8 and the other bytes exchange what neither notices."""
    assert find_item_size(dtype) == size
