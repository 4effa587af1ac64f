"""What a rank met that Gloo aborted for a size: both sides of a message are named, and who alone gathered a state."""

from __future__ import annotations

from typing import Any

from rankwise.base.faults import FaultRecord
from rankwise.evidence.reader.notes import Frame, Stack
from rankwise.verdict.case import Case, RankEnd, Verdict
from rankwise.verdict.first_failure import judge
from scenes import op, rank, scene

_SIZES = "terminate called\n  what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. {} vs {}. "
_LOST = FaultRecord(
    message="RuntimeError: [pair.cc:537] Read error [127.0.0.1]:3: Connection reset by peer.",
    callstack='Traceback (most recent call last):\n  File "/job/train.py", line 16, in <module>\n    loss.backward()\nRuntimeError: x\n',
)
_GATHERS = Stack(
    frames=(
        Frame(file="/env/lib/python3.11/site-packages/torch/distributed/tensor/_api.py", line=9, function="full_tensor"),
        Frame(file="/job/train.py", line=10, function="save"),
    )
)  # fmt: skip
_MESSAGE = {"is_over": False, "seq": 4}


def _judge(given: int, expected: int, *ranks: Any, **facts: Any) -> Verdict:
    aborted = RankEnd(rank=0, local_rank=0, code=-6, last_words=_SIZES.format(given, expected), **facts)
    lost = RankEnd(rank=1, local_rank=1, code=1, fault=_LOST, ended_s=1.0)
    return judge(Case(ranks=(aborted, lost), world_size=2, scene=scene(*ranks) if ranks else None))


def test_a_message_of_another_size_names_both_sides() -> None:
    """Rank 0 was aborted, and nothing tells which of the two is wrong; an earlier message of the right size is beside the matter."""
    gives = rank(1, op("isend", peer=0, at=5, shape=(100,), seq=3), op("isend", peer=0, at=5, shape=(120,), **_MESSAGE))  # fmt: skip
    gets = rank(0, op("irecv", peer=1, at=8, shape=(100,), **_MESSAGE))
    verdict = _judge(480, 400, gets, gives)
    assert (verdict.kind, verdict.class_id, verdict.rule, verdict.culprits) == (
        "mismatch", "C5", "other_splits", (0, 1),
    )  # fmt: skip
    assert (
        "rank 1 sends rank 0 a message of [120] float32 (480 bytes) at train.py:5, but rank 0 expects [100] float32"
        in verdict.message
    )
    assert verdict.exit_code == 134


def test_messages_of_other_sizes_are_not_accused() -> None:
    """What was recorded does not have the sizes of the error: it is told as before."""
    gives = rank(1, op("isend", peer=0, shape=(7,), **_MESSAGE))
    gets = rank(0, op("irecv", peer=1, shape=(100,), **_MESSAGE))
    verdict = _judge(480, 400, gets, gives)
    assert (verdict.class_id, verdict.rule, verdict.culprits) == ("C5", None, (0,))


def test_who_alone_gathered_a_state_is_named() -> None:
    """Nothing recorded tells; the stack of the crash does, and the other rank is known to be elsewhere."""
    verdict = _judge(178, 128, crash=_GATHERS)
    assert (verdict.class_id, verdict.rule, verdict.culprits, verdict.where) == (
        "D28", "state_on_some", (0,), "/job/train.py:10",
    )  # fmt: skip
