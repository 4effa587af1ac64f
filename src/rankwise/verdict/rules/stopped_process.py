"""Ranks wait for one whose process is stopped, as by SIGSTOP or Ctrl-Z: it goes on when somebody sends SIGCONT."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.telling import tell_absence
from rankwise.verdict.view import Absence

if TYPE_CHECKING:
    from rankwise.verdict.lanes import Lane
    from rankwise.verdict.sight import Sight
    from rankwise.verdict.view import View

RULE = "stopped_process"


def find(view: View) -> tuple[Sight, ...]:
    """Return the sights of it. Somebody can wake the process, so it is no reason to stop the job."""
    sights = []
    absences = [*view.absences]
    away = {rank for absence in absences for rank in absence.missing}
    absences += [one for one in _find_inside(view) if not away & {*one.missing}]
    for absence in absences:
        stopped = tuple(rank for rank in absence.missing if view.by_rank[rank].state == "stopped")
        if stopped:
            pids = " ".join(str(view.by_rank[rank].pid) for rank in stopped if view.by_rank[rank].pid)
            sights.append(
                tell_absence(
                    view, absence, rule=RULE, certainty="proof", is_stuck=False, culprits=stopped,
                    fix=f"someone or something stopped it: `kill -CONT {pids or 'PID'}` lets it continue",
                )
            )  # fmt: skip
    return tuple(sights)


def _find_inside(view: View) -> list[Absence]:
    """Return who waits in a collective for ranks that have entered it, too, and were stopped inside it."""
    found = []
    for lane in view.lanes:
        stopped = [
            rank for rank in lane.ranks if rank in view.by_rank and view.by_rank[rank].state == "stopped"
        ]
        waiting = [
            one for one in view.standings.values()
            if one.wait and one.op and view.lane_of(one.rank, one.op) is lane and any(_is_in(lane, rank, one.op.seq) for rank in stopped)
        ]  # fmt: skip
        if waiting:
            seqs = {one.op.seq for one in waiting if one.op}
            inside = tuple(rank for rank in stopped if any(_is_in(lane, rank, seq) for seq in seqs))
            found.append(
                Absence(op=waiting[0].op, lane=lane, waiting=tuple(waiting), missing=inside, is_known=True)
            )
    return found


def _is_in(lane: Lane, rank: int, seq: int) -> bool:
    op = lane.ops.get(rank, {}).get(seq)
    return op is not None and not op.is_over
