"""A rank that has an exception on its hands and makes a collective with it is told by that exception, which nobody has seen."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.base.faults import FaultRecord
from rankwise.evidence.reader.notes import Frame, Stack
from rankwise.verdict.run_rules import look
from scenes import gradient, in_backward, in_call, op, rank, scene

if TYPE_CHECKING:
    from rankwise.evidence.reader.scene import Op, RankFacts

_OPEN = {"is_over": False}


def _with_raised(facts: RankFacts, *lines: tuple[int, str], message: str = "KeyError: 'x'") -> RankFacts:
    """Return a rank whose main thread handles an exception that came through these lines, outermost first."""
    trace = "\n".join(f'  File "/job/train.py", line {line}, in {function}' for line, function in lines)
    fault = FaultRecord(
        message=message, callstack=f"Traceback (most recent call last):\n{trace}\n{message}",
        where=f"/job/train.py:{lines[-1][0]}",
    )  # fmt: skip
    assert facts.evidence is not None
    return replace(facts, evidence=replace(facts.evidence, handled={"MainThread": fault}))


def _called(name: str, *frames: tuple[int, str]) -> Stack:
    own = tuple(Frame(file="/job/train.py", line=line, function=function) for line, function in frames)
    return Stack(frames=(*in_call(name).frames[:-1], *own))


def _clean(*frames: tuple[int, str]) -> RankFacts:
    barrier = op("barrier", at=frames[0][0], **_OPEN)
    return rank(1, op(), barrier, at=_called("barrier", *frames), world=2)


def _waits(one: Op) -> RankFacts:
    return rank(0, op(), one, at=in_call(at=20) if one.source == "python" else in_backward(20))


def test_what_was_raised_and_where_is_told_without_the_text() -> None:
    """C25: also where the collective stands in an __exit__, which no text of the script shows."""
    cleaning = _with_raised(_clean((52, "close"), (30, "main")), (30, "main"), (40, "load"))
    (finding,) = look(scene(_waits(op(at=20, **_OPEN)), cleaning))
    assert (finding.rule, finding.class_id, finding.culprits) == ("cleanup_collective", "C25", (1,))
    assert "rank 1 raised KeyError: 'x' at train.py:40" in finding.message
    assert "train.py:52" in finding.message
    assert "train.py:40" in finding.fix


def test_an_exception_decides_what_the_text_leaves_open() -> None:
    """A finally that is met by gradients may be a loop that ended; with an exception on hand it is none."""
    text = "try:\n    work()\n" + "    pass\n" * 20 + "finally:\n    dist.barrier()\n"
    at = text[: text.index("dist")].count("\n") + 1
    sources = {"/job/train.py": text}
    waits, clean = _waits(gradient(20, **_OPEN)), _clean((at, "<module>"))
    (open_,) = look(scene(waits, clean, sources=sources))
    assert (open_.rule, open_.class_id) == ("cleanup_collective", None)
    (finding,) = look(scene(waits, _with_raised(clean, (2, "<module>"), (9, "work")), sources=sources))
    assert (finding.rule, finding.class_id, finding.culprits) == ("cleanup_collective", "C25", (1,))


def test_an_exception_that_explains_nothing_accuses_nobody() -> None:
    """One that all are handling, as after an import that failed; one of a function that the rank is no longer in; one that is behind it."""
    waits, clean = _waits(op(at=20, **_OPEN)), _clean((52, "close"), (30, "main"))
    both = (_with_raised(waits, (1, "<module>")), _with_raised(_clean((52, "<module>")), (1, "<module>")))
    assert [one.rule for one in look(scene(*both))] == ["other_op"]
    elsewhere = _with_raised(clean, (70, "other"))
    assert [one.rule for one in look(scene(waits, elsewhere))] == ["other_op"]
    gone_on = replace(_with_raised(clean, (30, "main"), (40, "load")), stack=_called("barrier", (60, "main")))
    assert [one.rule for one in look(scene(waits, gone_on))] == ["other_op"]
