"""The verdict on a job whose ranks left with 75: a requeue if all did, else the failure that came in between."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rankwise.base.faults import FaultRecord
from rankwise.verdict.case import Case, RankEnd, Verdict
from rankwise.verdict.first_failure import judge
from rankwise.verdict.requeue import is_requeue


def _end(
    rank: int,
    code: int,
    *,
    at: float = 1.0,
    stopped_s: float | None = None,
    fault: str = "",
    asks: bool = True,
) -> RankEnd:
    record = FaultRecord(message=fault, callstack=fault, timestamp_s=0.0, monotonic_s=at) if fault else None
    return RankEnd(rank=rank, local_rank=rank, pid=1, code=code, ended_s=at, stopped_s=stopped_s, fault=record,
                   was_noticed=True, asks_requeue=asks and code == 75, log=f"{rank}.log")  # fmt: skip


def _judge(*ends: RankEnd, interrupted: int | None = None, oom_kills: int = 0) -> Verdict:
    return judge(Case(ranks=ends, world_size=len(ends), interrupted=interrupted, oom_kills=oom_kills))


@pytest.mark.parametrize("interrupted", [None, 15])
@pytest.mark.parametrize("codes", [(75, 75), (75, 0), (0, 75)])
def test_all_with_75_or_0_is_a_requeue(codes: tuple[int, int], interrupted: int | None) -> None:
    """Exit code 75 of some and 0 of the rest is a requeue, with or without a signal to the launcher."""
    verdict = _judge(_end(0, codes[0]), _end(1, codes[1]), interrupted=interrupted)
    assert (verdict.kind, verdict.exit_code, verdict.culprits, verdict.notes) == ("requeue", 75, (), ())
    assert verdict.stopped_by == ("SIGTERM" if interrupted else None)


def test_none_with_75_is_none() -> None:
    """Exit code 0 of all is success; a rank that SIGTERM killed makes no requeue."""
    assert _judge(_end(0, 0), _end(1, 0)).kind == "ok"
    killed = [_end(rank, -15, at=2.0, stopped_s=1.0) for rank in range(2)]
    verdict = _judge(*killed, interrupted=15)
    assert (verdict.kind, verdict.exit_code) == ("failure", 143)


def test_a_rank_that_we_killed_in_the_end_is_named() -> None:
    """The checkpoint that the requeue goes on from is whole in any case: the job is not lost for a rank that hung."""
    verdict = _judge(_end(0, 75), _end(1, -9, at=40.0, stopped_s=31.0))
    assert (verdict.kind, verdict.exit_code) == ("requeue", 75)
    assert verdict.notes == ("rank 1 had not left in time and was killed",)
    assert [casualty.rank for casualty in verdict.casualties] == [1]


@pytest.mark.parametrize("interrupted", [None, 15])
def test_a_failure_meanwhile_is_the_cause(interrupted: int | None) -> None:
    """One rank raises while it saves: it is to blame, and its exit code is the job's; the others left in good order."""
    failed = _end(1, 1, at=0.9, fault="OSError: disk full")
    verdict = _judge(_end(0, 75), failed, _end(2, 75), interrupted=interrupted)
    assert (verdict.kind, verdict.exit_code, verdict.culprits) == ("failure", 1, (1,))
    assert {casualty.fate for casualty in verdict.casualties} == {"left for a requeue"}
    late = _judge(_end(0, 75, at=0.5), _end(1, -9, at=0.9), interrupted=interrupted)
    assert (late.kind, late.exit_code, late.culprits) == ("failure", 137, (1,))


@pytest.mark.parametrize("interrupted", [None, 15])
@pytest.mark.parametrize("code", [-9, -15])
def test_a_failed_rank_that_we_had_to_kill_is_the_cause(code: int, interrupted: int | None) -> None:
    """It raised while it saved, and a thread of it held it up until we killed it: the error is told, and nothing is requeued."""
    failed = replace(_end(1, code, at=0.9, stopped_s=31.0, fault="ValueError: disk full"), ended_s=31.1)
    verdict = _judge(_end(0, 75), failed, interrupted=interrupted)
    assert (verdict.kind, verdict.exit_code, verdict.culprits) == ("failure", 1, (1,))
    assert "ValueError: disk full" in verdict.message


def test_a_rank_that_the_kernel_killed_meanwhile_is_the_cause() -> None:
    """Nobody of us had killed it, so it does not count as one that only came too late."""
    verdict = _judge(_end(0, 75), _end(1, -9, at=32.0), oom_kills=1)
    assert (verdict.kind, verdict.exit_code, verdict.culprits) == ("failure", 137, (1,))
    assert "ran out of memory" in verdict.reason


def test_what_outweighs_it() -> None:
    """Where 75 has no such meaning the rank has failed, and the launcher asks for nothing by its own; and a lost supervisor is no requeue."""
    verdict = _judge(_end(0, 75, asks=False))
    assert (verdict.kind, verdict.exit_code, verdict.culprits) == ("failure", 1, (0,))
    assert "not announced as a requeue" in verdict.reason
    mixed = _judge(_end(0, 75), _end(1, 75, asks=False))
    assert (mixed.kind, mixed.exit_code, mixed.culprits) == ("failure", 1, (1,))
    assert not is_requeue(Case(ranks=(_end(0, 75),), world_size=1, supervisor_lost=True))
