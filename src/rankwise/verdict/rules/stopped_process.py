"""Ranks wait for one whose process is stopped, as by SIGSTOP or Ctrl-Z: it goes on when somebody sends SIGCONT."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.telling import tell_absence

if TYPE_CHECKING:
    from rankwise.verdict.sight import Sight
    from rankwise.verdict.view import View

RULE = "stopped_process"


def find(view: View) -> tuple[Sight, ...]:
    """Return the sights of it. Somebody can wake the process, so it is no reason to stop the job."""
    sights = []
    for absence in view.absences:
        stopped = tuple(rank for rank in absence.missing if view.by_rank[rank].state == "stopped")
        if stopped:
            pids = " ".join(str(view.by_rank[rank].pid) for rank in stopped if view.by_rank[rank].pid)
            sights.append(
                tell_absence(
                    view, absence, rule=RULE, certainty="proof", is_stuck=False, culprits=stopped,
                    fix=f"somebody or something stopped it: `kill -CONT {pids or 'PID'}` lets it go on",
                )
            )  # fmt: skip
    return tuple(sights)
