"""Where ranks parted before it showed: collectives that were paired by chance are walked back to the first of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rankwise.base.faults import FaultRecord
from rankwise.verdict.run_rules import look
from scenes import buffers, ended, gradient, in_backward, in_call, in_forward, op, rank, scene

if TYPE_CHECKING:
    from rankwise.evidence.reader.scene import Op, RankFacts
    from rankwise.verdict.finding import JobFinding

_OPEN = {"is_over": False}
_RAISED = {"has_raised": True}


def _first(*ranks: RankFacts, **facts: Any) -> JobFinding:
    return look(scene(*ranks, **facts))[0]


def _steps(count: int) -> list[Op]:
    return [one for _ in range(count) for one in (buffers(11), gradient(11))]


def _evaluates(number: int, world: int) -> RankFacts:
    """Return a rank that runs one forward pass of its own, at line 9, after three steps."""
    done = [*_steps(3), buffers(9)]
    return rank(number, *done, buffers(11, **_OPEN), at=in_forward(11), world=world)


def _trains(number: int, world: int) -> RankFacts:
    return rank(number, *_steps(3), buffers(11), gradient(11, **_OPEN), at=in_backward(11), world=world)


@pytest.mark.parametrize("world", [2, 3])
def test_an_evaluation_of_one_rank_is_told_and_not_the_step_behind_it(world: int) -> None:
    """Its broadcast meets that of the others' training; what can't be paired comes later, at a line that is right."""
    ranks = [_trains(number, world) for number in range(world)]
    ranks[1] = _evaluates(1, world)
    finding = _first(*ranks)
    assert (finding.rule, finding.certainty, finding.class_id) == ("mispaired_calls", "proof", "D17")
    assert (finding.culprits, finding.where) == ((1,), "/job/train.py:9")
    assert "at collective #7 of their group rank 1 was in broadcast" in finding.message
    assert "at #8" in finding.message
    assert "at train.py:9 use model.module(...)" in finding.fix


_METRIC = "rank = dist.get_rank()\nif rank == 0:\n    print(metric.compute())\ndist.barrier()\n"


def _met_barrier(text: str = _METRIC) -> JobFinding | None:
    """Return what is seen of a metric on rank 0, whose barrier met the last one of the others, which have ended."""
    raised = 'Traceback (most recent call last):\n  File "/job/train.py", line 3, in <module>\nRuntimeError: closed\n'
    fault = FaultRecord(message="RuntimeError: closed", callstack=raised, where="/job/train.py:3")
    seen = scene(
        ended(0, op("barrier", at=3), op("all_gather", at=3, **_RAISED), code=1, fault=fault, world=3),
        *(ended(number, op("barrier", at=4), world=3) for number in (1, 2)),
        sources={"/job/train.py": text},
    )  # fmt: skip
    return next(iter(look(seen)), None)


def test_a_metric_on_rank_0_is_told_and_not_those_who_have_ended() -> None:
    """Its inner barrier met the others' last one: they were through, and rank 0 stands under a rank test."""
    finding = _met_barrier()
    assert finding is not None
    assert (finding.rule, finding.culprits, finding.class_id, finding.where) == (
        "mispaired_calls",
        (0,),
        "C1",
        "/job/train.py:3",
    )
    assert "rank test at line 2" in finding.fix


def test_without_a_reason_other_lines_are_nothing() -> None:
    """Nothing shows who left the common path: the lines are two, and each was used once."""
    assert _met_barrier("x = 1\nx = 2\nprint(metric.compute())\ndist.barrier()\n") is None


_FIRST = "rank = dist.get_rank()\nif rank != 0:\n    dist.barrier()\nwork()\nif rank == 0:\n    dist.barrier()\ndist.all_reduce(x)\n"
_ARMS = "if a:\n    dist.barrier()\n\nelse:\n\n    dist.barrier()\ndist.all_reduce(x)\n"


@pytest.mark.parametrize(("text", "other"), [(_FIRST, 3), (_ARMS, 2)], ids=["rank 0 first", "two arms"])
def test_lines_that_belong_together_are_no_parting(text: str, other: int) -> None:
    """A barrier for "rank 0 first" stands on two lines, as do the arms of an if: what comes after it is the cause."""
    odd = rank(0, op("barrier", at=6), op("broadcast", at=9, **_OPEN), at=in_call("broadcast", 9), world=3)
    others = [rank(number, op("barrier", at=other), op(at=7, **_OPEN), at=in_call(at=7), world=3) for number in (1, 2)]
    finding = _first(odd, *others, sources={"/job/train.py": text})
    assert (finding.rule, finding.culprits, finding.where) == ("other_op", (0,), "/job/train.py:9")


def test_lines_of_its_own_in_every_step_are_no_parting() -> None:
    """Rank 0 goes through a function of its own in every step: that was right until now."""
    odd = rank(0, *(op(at=30) for _ in range(5)), op("barrier", at=9, **_OPEN), at=in_call("barrier", 9), world=3)
    others = [
        rank(number, *(op(at=31) for _ in range(5)), op(at=31, **_OPEN), at=in_call(at=31), world=3)
        for number in (1, 2)
    ]
    finding = _first(odd, *others)
    assert (finding.rule, finding.where) == ("other_op", "/job/train.py:9")


def test_who_left_the_loop_is_told_where_it_left() -> None:
    """Rank 2 breaks, and its last barrier meets that of the loop: it shows only in what follows."""
    loop = [op(at=9), op("barrier", at=10), op(at=9)]
    others = [
        rank(number, *loop, op("barrier", at=10), op(at=9, **_OPEN), at=in_call(at=9), world=3) for number in (0, 1)
    ]
    odd = rank(
        2,
        *loop,
        op("barrier", at=14),
        op("all_gather", at=15, **_OPEN),
        at=in_call("all_gather", 15),
        world=3,
    )
    finding = _first(*others, odd)
    assert (finding.rule, finding.culprits, finding.where) == ("mispaired_calls", (2,), "/job/train.py:14")


def _ended_job(*odd: Op, name: str = "all_reduce", **facts: Any) -> tuple[JobFinding, ...]:
    """Return what is seen of a job that ended well although the last collective of ranks 0 and 1 failed."""
    most = [ended(number, op(name), op(name), op(name, at=9, **_RAISED), world=3, **facts) for number in range(2)]
    return look(scene(*most, ended(2, *odd, world=3)))


def test_a_result_that_never_came_is_told_although_all_ended_well() -> None:
    """Rank 2 skipped one; the others' last collective failed, the exception was caught, and all exit codes are 0."""
    (finding,) = _ended_job(op(), op(at=7))
    assert (finding.kind, finding.rule, finding.culprits, finding.is_stuck) == (
        "mismatch",
        "went_on_without",
        (2,),
        False,
    )
    assert "rank 2 ended after 2 collectives" in finding.message
    assert "all_reduce #3" in finding.message
    assert finding.where == "/job/train.py:7"


def test_a_result_that_is_not_used_is_not_lost() -> None:
    """The handler leaves the loop: the exception was the sign that the others were through."""
    text = "\n" * 5 + "for x in y:\n  try:\n\n    all_reduce(x)\n  except RuntimeError: break\n"
    ranks = [
        ended(0, op(at=9), op(at=9), op(at=9, **_RAISED)),
        ended(1, op(at=9), op(at=9)),
    ]
    assert look(scene(*ranks, sources={"/job/train.py": text})) == ()
    (finding,) = look(scene(*ranks, sources={"/job/train.py": text.replace("break", "continue")}))
    assert finding.rule == "went_on_without"


def test_what_may_fail_is_no_lost_result() -> None:
    """A barrier carries nothing; all came to it; or a rank failed, and that is told."""
    assert _ended_job(op("barrier"), op("barrier"), name="barrier") == ()
    assert _ended_job(op(), op(), op(at=9, **_RAISED)) == ()
    assert not [one for one in _ended_job(op(), op(), code=1) if one.rule == "went_on_without"]


def test_a_class_is_named_for_a_state_that_one_rank_gathers() -> None:
    """D28: its first all_gather met one of the others, and the next one meets a barrier."""
    gathers = {"inside": ("full_tensor", "redistribute")}
    odd = [op("all_gather", at=13, **gathers), op("all_gather", at=13, is_over=False, **gathers)]
    others = [
        rank(number, op("all_gather", at=20), op("all_gather", at=21), op("barrier", at=15, **_OPEN), at=in_call("barrier", 15), world=3)
        for number in (0, 1)
    ]  # fmt: skip
    finding = _first(*others, rank(2, op("all_gather", at=20), *odd, at=in_call("all_gather", 13), world=3))
    assert (finding.rule, finding.class_id, finding.culprits) == ("state_on_some", "D28", (2,))
    text = "rank = dist.get_rank()\nif rank == 2:\n" + "\n" * 10 + "    state = gather()\ndist.barrier()\n"
    begun = _first(
        *others,
        rank(2, op("all_gather", at=20), *odd, at=in_call("all_gather", 13), world=3),
        sources={"/job/train.py": text},
    )
    assert (begun.rule, begun.class_id, begun.where) == ("mispaired_calls", "D28", "/job/train.py:13")
    assert "collective #2" in begun.message


def test_the_callers_of_a_line_are_those_of_its_function_a_moment_later() -> None:
    """Rank 0 stands two lines on in the same function: who called it stands on its stack, and asks for the rank."""
    text = "rank = dist.get_rank()\ndef score():\n    dist.barrier()\n    return gather()\nif rank == 0:\n    score()\ndist.barrier()\n"
    raised = 'Traceback (most recent call last):\n  File "/job/train.py", line 6, in <module>\n  File "/job/train.py", line 4, in score\nRuntimeError: closed\n'
    fault = FaultRecord(message="RuntimeError: closed", callstack=raised, where="/job/train.py:4")
    odd = ended(0, op("barrier", at=3), op("all_gather", at=4, **_RAISED), code=1, fault=fault, world=3)
    others = [ended(number, op("barrier", at=7), world=3) for number in (1, 2)]
    finding = _first(odd, *others, sources={"/job/train.py": text})
    assert (finding.class_id, finding.culprits, finding.where) == ("C1", (0,), "/job/train.py:3")
    assert "rank test at line 5" in finding.fix
