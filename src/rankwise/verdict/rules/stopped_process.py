"""Ranks wait for one whose process is stopped, as by SIGSTOP or Ctrl-Z: it goes on when somebody sends SIGCONT."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.explain import explain_absence
from rankwise.verdict.scene_view import Absence

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.verdict.finding import JobFinding
    from rankwise.verdict.group_sequences import GroupSequence
    from rankwise.verdict.scene_view import SceneView

RULE = "stopped_process"


def find(view: SceneView) -> Iterator[JobFinding]:
    """Yield the findings of it. Somebody can wake the process, so it is no reason to stop the job."""
    away = {rank for absence in view.absences for rank in absence.missing}
    inside = [one for one in _find_inside(view) if not away & {*one.missing}]
    for absence in (*view.absences, *inside):
        stopped = tuple(rank for rank in absence.missing if view.by_rank[rank].state == "stopped")
        if stopped:
            pids = " ".join(str(view.by_rank[rank].pid) for rank in stopped if view.by_rank[rank].pid)
            yield explain_absence(
                view, absence, rule=RULE, certainty="proof", is_stuck=False, culprits=stopped,
                fix=f"find who stopped it (Ctrl-Z, a debugger, SIGSTOP): while the job runs, `kill -CONT {pids or 'PID'}` lets it continue",
            )  # fmt: skip


def _find_inside(view: SceneView) -> Iterator[Absence]:
    """Yield who waits in a collective for ranks that have entered it, too, and were stopped inside it."""
    for sequence in view.sequences:
        stopped = [rank for rank in sequence.ranks if rank in view.by_rank and view.by_rank[rank].state == "stopped"]
        waiting = tuple(
            one
            for one in view.rank_states.values()
            if one.wait
            and one.op
            and view.sequence_of(one.rank, one.op) is sequence
            and any(_is_in(sequence, rank, one.op.seq) for rank in stopped)
        )
        if waiting:
            seqs = {one.op.seq for one in waiting if one.op}
            inside = tuple(rank for rank in stopped if any(_is_in(sequence, rank, seq) for seq in seqs))
            yield Absence(op=waiting[0].op, sequence=sequence, waiting=waiting, missing=inside, is_known=True)


def _is_in(sequence: GroupSequence, rank: int, seq: int) -> bool:
    op = sequence.ops.get(rank, {}).get(seq)
    return op is not None and not op.is_over
