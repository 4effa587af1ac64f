"""Who left a job with exit code 0, and why: by the records of all ranks, and only if none failed by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rankwise.base.faults import FaultRecord
from rankwise.verdict.case import Case, RankEnd
from rankwise.verdict.early_exits import find_early_exits
from rankwise.verdict.first_failure import judge
from scenes import ended, gradient, op, scene

PEER = FaultRecord(message="RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.1]:5")
OWN = FaultRecord(message="ValueError: boom")
LEFT = ended(2, op(), op(), world=3)
LOST = [ended(number, op(), op(), op(at=9, is_over=False), code=1, fault=PEER, world=3) for number in (0, 1)]


def test_who_ended_well_before_a_collective_that_others_had_entered_is_named() -> None:
    """Ranks 0 and 1 lost their peer in the third collective; rank 2 has made two and ended with 0."""
    finding = find_early_exits(scene(*LOST, LEFT), ())
    assert finding is not None
    assert (finding.kind, finding.rule, finding.class_id, finding.culprits) == (
        "failure",
        "member_ended",
        "R6",
        (2,),
    )
    assert finding.where == "/job/train.py:7"  # its own last collective, not that of those who wait
    assert [one.rank for one in finding.waiting] == [0, 1]
    assert finding.message.startswith("rank 2 has ended with exit code 0; ranks 0, 1 still needed it in all_reduce #3")


def test_who_had_no_part_in_it_is_not_named() -> None:
    """Rank 1 was stopped by its launcher, and exits with 0 on SIGTERM: that tells nothing of it."""
    stopped = ended(1, op(), world=3)
    finding = find_early_exits(scene(LOST[0], stopped, LEFT), {1})
    assert finding is not None
    assert finding.culprits == (2,)


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
    assert find_early_exits(scene(*ranks), ()) is None  # type: ignore[arg-type]


def test_a_node_that_tells_nothing_leaves_it_open() -> None:
    """Not all ranks are known: the one that failed may be among the others."""
    assert find_early_exits(scene(*LOST, LEFT, world_size=4, is_whole=False), ()) is None


_SKIPS = "for b in loader:\n    loss = f(b)\n    if loss.isnan():\n        continue\n    loss.backward()\n"
_STOPS = "for b in loader:\n    loss.backward()\n    if bad > patience:\n        break\n"


@pytest.mark.parametrize(
    ("text", "at", "class_id", "told"),
    [(_SKIPS, 5, "D15", "the continue at train.py:4"), (_STOPS, 2, "D16", "the break at train.py:4"), ("", 5, "D14", "train.py:5")],
)  # fmt: skip
def test_the_script_tells_why_it_left(text: str, at: int, class_id: str, told: str) -> None:
    """Of gradients that were missed the loop around them shows which line skipped or stopped."""
    lost = ended(0, gradient(at), gradient(at, is_over=False), code=1, fault=PEER)
    finding = find_early_exits(scene(lost, ended(1, gradient(at)), sources={"/job/train.py": text}), ())
    assert finding is not None
    assert (finding.kind, finding.rule, finding.class_id, finding.culprits) == (
        "failure",
        "fewer_steps",
        class_id,
        (1,),
    )
    assert told in finding.fix


def test_who_goes_on_under_a_rank_test_is_alone_and_those_that_end_are_right() -> None:
    """A collective under `if rank == 0` at the end of a script: the others are through, and had no part in it."""
    text = "train()\nif rank == 0:\n    tidy_up()\n    dist.barrier()\n"
    lost = ended(0, gradient(1), op("barrier", 2, at=4, is_over=False), code=1, fault=PEER)
    finding = find_early_exits(scene(lost, ended(1, gradient(1)), sources={"/job/train.py": text}), ())
    assert finding is not None
    assert (finding.rule, finding.class_id, finding.culprits) == ("member_ended", "C1", (0,))
    assert "the rank test at train.py:2" in finding.fix


def test_on_one_node_the_same_is_told() -> None:
    """The scene is of the moment when the first one had complained; the ends are the launcher's own. Kind and class are those of several nodes."""
    ends = tuple(
        RankEnd(rank=number, local_rank=number, code=int(number != 2), ended_s=2.0 - number / 2, fault=None if number == 2 else PEER)
        for number in range(3)
    )  # fmt: skip
    seen = [replace(facts, state="running", code=None, fault=None) for facts in LOST]
    verdict = judge(Case(ranks=ends, world_size=3, scene=scene(*seen, LEFT)))
    assert (verdict.kind, verdict.rule, verdict.class_id, verdict.culprits) == (
        "failure", "member_ended", "R6", (2,),
    )  # fmt: skip
    assert verdict.message.startswith("rank 2 has ended with exit code 0; ranks 0, 1 still needed it")
    assert verdict.exit_code == 1


_EXITS = "if rank == 2 and step == 1:\n    sys.exit({0})\nif __name__ == '__main__':\n    sys.exit(main())\n    sys.exit({0})\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (_EXITS.format(""), 2),
        (_EXITS.format("0"), 2),
        ("if a:\n    os._exit(0)\nif b:\n    sys.exit(1)\n", 2),
        ("if a:\n    raise SystemExit(0)\n", 2),
        (_EXITS.format("3"), None),
        ("if a:\n    sys.exit()\nif b:\n    exit(0)\n", None),
        ("train()\nsys.exit(0)\n", None),
        ("if :", None),
    ],
)
def test_the_only_exit_call_that_fits_is_the_place(text: str, line: int | None) -> None:
    """With the exit code that the rank had, under a condition, and only one of the kind; the script's regular end is none."""
    finding = find_early_exits(scene(*LOST, LEFT, sources={"/job/train.py": text}), ())
    assert finding is not None
    assert finding.where == f"/job/train.py:{line or 7}"
    assert (f"may have left by the exit call at train.py:{line}" in finding.fix) == (line is not None)


@pytest.mark.parametrize(
    ("left_at", "line"), [("/job/other.py:5", 5), ("/job/train.py:2", 2), ("/job/train.py:3", None)]
)
def test_the_noted_exit_call_is_no_guess(left_at: str, line: int | None) -> None:
    """Where the rank called os._exit is known; a call that every rank comes to at its end is still no cause."""
    text = "if a:\n    os._exit(0)\nos._exit(0)\nif b:\n    sys.exit(0)\n"
    finding = find_early_exits(scene(*LOST, replace(LEFT, left_at=left_at), sources={"/job/train.py": text}), ())
    assert finding is not None
    assert ("rank 2 left by the exit call at" in finding.fix) == (line is not None)
    assert finding.where == (left_at if line else "/job/train.py:7")
