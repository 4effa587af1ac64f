"""A wait for a rank that has ended is no proof of a hang where the script handles the exception by which it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rankwise.base.faults import FaultRecord
from rankwise.verdict.run_rules import look
from scenes import elsewhere, ended, in_call, op, rank, scene

if TYPE_CHECKING:
    from rankwise.verdict.finding import JobFinding

_DRAIN = "for step in range(9):\n  try:\n\n\n\n\n    dist.all_reduce(one)\n  except RuntimeError:\n    break\nsave()\n"


def _see(**facts: Any) -> JobFinding:
    """Return the finding of rank 0, which waits in #2 for rank 2, which has ended; rank 1 has come out of it by an exception."""
    text, backend = facts.pop("text", ""), facts.pop("backend", "gloo")
    return look(
        scene(
            rank(0, op(), op(is_over=False), at=in_call(), world=3, backend=backend),
            rank(1, op(), op(has_raised=True), world=3, backend=backend, **{"at": elsewhere(), **facts}),
            ended(2, op(), world=3, backend=backend),
            sources={"/job/train.py": text},
        )
    )[0]


@pytest.mark.parametrize(
    ("facts", "certainty"),
    [
        ({}, "suspicion"),
        ({"fault": FaultRecord(message="RuntimeError: closed")}, "proof"),
        ({"finished_s": 1.0}, "proof"),
        ({"has_left": True}, "proof"),
        ({"state": "ended", "code": 1}, "proof"),
        ({"state": "ended", "code": 1, "text": _DRAIN}, "suspicion"),
        ({"state": "ended", "code": 1, "text": _DRAIN, "backend": "nccl"}, "proof"),
        ({"state": "ended", "code": 1, "text": _DRAIN.replace("break", "raise")}, "proof"),
    ],
)
def test_a_wait_that_ends_by_an_exception_may_be_handled(facts: dict[str, Any], certainty: str) -> None:
    """By another rank that raised in the same collective and lives on, or by the text of the line that waits; NCCL asks no handler."""
    finding = _see(**facts)
    assert (finding.rule, finding.certainty) == ("member_ended", certainty)


def test_a_wait_for_who_has_not_ended_stays_as_it_is() -> None:
    """Two collectives that do not correspond: only a timeout would end that, handler or not."""
    finding = look(
        scene(
            rank(0, op(), op(is_over=False), at=in_call()),
            rank(1, op(), op("barrier", is_over=False), at=in_call("barrier")),
            sources={"/job/train.py": _DRAIN},
        )
    )[0]
    assert (finding.kind, finding.certainty) == ("mismatch", "proof")
