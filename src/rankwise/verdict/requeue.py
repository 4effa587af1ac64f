"""The verdict on a job that has stopped by itself, to be started again: nothing failed, and it is not through."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from rankwise.base.os_calls import KILL_SIGNAL
from rankwise.base.rank_names import name_ranks
from rankwise.base.requeue import REQUEUE
from rankwise.verdict.case import Casualty, Verdict
from rankwise.verdict.exit_codes import name_signal

if TYPE_CHECKING:
    from rankwise.verdict.case import Case, RankEnd


def is_requeue(case: Case) -> bool:
    """Tell whether all ranks left with 0 or for a requeue, at least one for that; those that we had to kill don't count."""
    if case.supervisor_lost or case.left_behind or case.store_code is not None:
        return False
    own = [end for end in case.ranks if not _was_killed(end)]
    return any(map(leaves_for_requeue, own)) and all(end.code == 0 or leaves_for_requeue(end) for end in own)


def leaves_for_requeue(end: RankEnd) -> bool:
    """Tell whether one rank left so, whatever the others did."""
    return end.asks_requeue and end.fault is None


def judge_requeue(case: Case) -> Verdict:
    """Return the verdict on such a job."""
    killed = [end.rank for end in case.ranks if _was_killed(end)]
    stopped_by = None if case.interrupted is None else name_signal(case.interrupted)
    text = f" after {stopped_by}" if stopped_by else ""
    notes = (
        (
            f"{name_ranks(killed)} had not left in time and was killed"
            if len(killed) == 1
            else f"{name_ranks(killed)} had not left in time and were killed",
        )
        if killed
        else ()
    )
    return Verdict(
        kind="requeue",
        message=f"stopped for a requeue{text}: start the same command again to continue (exit code {REQUEUE})",
        casualties=tuple(Casualty(rank=rank, fate="terminated by rankwise") for rank in killed),
        exits={end.rank: end.code for end in case.ranks},
        logs={end.rank: end.log for end in case.ranks if end.log},
        exit_code=REQUEUE,
        notes=notes,
        stopped_by=stopped_by,
    )


def _was_killed(end: RankEnd) -> bool:
    """Tell whether a rank did not follow: one that had failed before, and only did not come to its end, is not meant."""
    return end.stopped_s is not None and end.fault is None and end.code in {-KILL_SIGNAL, -signal.SIGTERM}
