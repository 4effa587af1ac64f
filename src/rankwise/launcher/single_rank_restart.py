"""Ranks with roles that are started again alone, while the others go on."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from rankwise.base.files import read_all
from rankwise.base.os_calls import IS_LINUX
from rankwise.base.roles import are_spare, is_apart, is_needed, name_roles
from rankwise.launcher.restart_policy import decide, to_failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.launcher.job import Job
    from rankwise.launcher.rank_end import Rank
    from rankwise.launcher.rendezvous.assignment import Assignment
    from rankwise.launcher.restart_policy import Failure
    from rankwise.verdict.case import Case, LostNode


@final
class SingleRankRestarts:
    """Decides whether a rank that has failed is started again while the others go on.

    That takes ranks with roles (``--role-counts``) without a process group of all, which they say in their notes, and a
    store that outlives its ranks. One that was killed before it could say so is believed like the others. On several
    nodes each node starts its own ranks again.

    Args:
        job: Whose ranks.
        part: Which of them are ours.
        failures: All of the job so far, those that lead to new attempts included; gets those that are taken here.
    """

    def __init__(self, job: Job, part: Assignment, failures: list[Failure]) -> None:
        self._job, self._failures, self._link = job, failures, part.link
        self._is_apart = False
        self._missed = set[int]()
        self.is_on = (
            IS_LINUX
            and bool(job.spec.role_counts)
            and (part.listener if job.spec.is_one_node else part.link) is not None
            and job.spec.max_restarts > 0
        )

    def continues_without(self, lost: Sequence[LostNode], ranks: Sequence[Rank]) -> bool:
        """Tell whether our ranks can continue without those of lost nodes, and say so once for each node.

        Args:
            lost: Nodes that are lost.
            ranks: All of our own.
        """
        if not lost:
            return True
        gone = {rank for node in lost for rank in range(node.base_rank, node.base_rank + node.num_ranks)}
        self._note_apart(ranks)
        are_known = all(node.num_ranks for node in lost)
        if not (self.is_on and self._is_apart and are_known and are_spare(gone, self._job.spec.roles)):
            return False
        for node in lost:
            if node.node not in self._missed:
                self._missed.add(node.node)
                found = name_roles(node.describe(), self._job.spec.roles)
                self._job.console.say(f"rankwise: {found}; the others continue without these ranks")
        return True

    def _note_apart(self, ranks: Sequence[Rank]) -> None:
        self._is_apart = self._is_apart or any(is_apart(read_all(one.notes_fd)) for one in ranks)

    def takes(self, rank: Rank, ranks: Sequence[Rank], case: Case) -> bool:
        """Tell whether a rank that has failed is to be started again alone, and say that it is.

        Args:
            rank: The one.
            ranks: All.
            case: Its own: as if there were no other.
        """
        self._note_apart(ranks)
        if not self.is_on or not self._is_apart or is_needed(read_all(rank.notes_fd)):
            return False
        if self._link is not None and self._link.lost is not None:
            return False  # the store is gone, and with it what the ranks need
        from rankwise.verdict.first_failure import judge  # noqa: PLC0415 - not before the ranks' start

        spec, verdict = self._job.spec, judge(case)
        self._failures.append(to_failure(verdict, lasted_s=rank.ended_s - rank.started_s))
        if decide(self._failures, spec.max_restarts) is not None:
            self._failures.pop()  # the end of the attempt decides the same, and says why
            return False
        self._job.events.write("rank.restarted", rank=rank.rank, code=rank.code)
        self._job.console.say(
            f"rankwise: {name_roles(verdict.message, spec.roles)}\nrankwise: it is restarted alone, the others continue: restart {len(self._failures)} of {spec.max_restarts}"
        )
        return True
