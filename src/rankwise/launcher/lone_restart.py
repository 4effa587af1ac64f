"""Ranks with roles that are started again alone, while the others go on."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from rankwise.base.files import read_all
from rankwise.base.osdoor import IS_LINUX
from rankwise.base.roles import is_apart, is_needed, name_roles
from rankwise.launcher.policy import GiveUp, decide, to_failure
from rankwise.verdict.judge import judge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.launcher.job import Job
    from rankwise.launcher.policy import Failure
    from rankwise.launcher.rank_end import Rank
    from rankwise.launcher.rendezvous.assignment import Assignment
    from rankwise.verdict.case import Case


@final
class LoneRestarts:
    """Decides whether a rank that has failed is started again while the others go on.

    That takes a job of one node whose ranks have roles (``--role-counts``), a store that outlives its ranks, and ranks without a
    process group of all: they say so in their notes. One that was killed before it could say so is believed like the others.

    Args:
        job: Whose ranks.
        part: Which of them are ours.
        failures: All of the job so far, those that lead to new attempts included; gets those that are taken here.
    """

    def __init__(self, job: Job, part: Assignment, failures: list[Failure]) -> None:
        self._job, self._failures = job, failures
        self._is_apart = False
        self.is_on = (
            IS_LINUX
            and bool(job.spec.role_counts)
            and job.spec.is_one_node
            and part.listener is not None
            and job.spec.max_restarts > 0
        )

    def takes(self, rank: Rank, ranks: Sequence[Rank], case: Case) -> bool:
        """Tell whether a rank that has failed is to be started again alone, and say that it is.

        Args:
            rank: The one.
            ranks: All.
            case: Its own: as if there were no other.
        """
        self._is_apart = self._is_apart or any(is_apart(read_all(one.notes_fd)) for one in ranks)
        if not self.is_on or not self._is_apart or is_needed(read_all(rank.notes_fd)):
            return False
        spec, verdict = self._job.spec, judge(case)
        self._failures.append(to_failure(verdict, lasted_s=rank.ended_s - rank.started_s))
        if isinstance(decide(self._failures, spec.max_restarts), GiveUp):
            self._failures.pop()  # the end of the attempt decides the same, and says why
            return False
        self._job.events.write("rank.restarted", rank=rank.rank, code=rank.code)
        self._job.console.say(
            f"rankwise: {name_roles(verdict.message, spec.roles)}\nrankwise: it starts again alone, the others go on: restart {len(self._failures)} of {spec.max_restarts}"
        )
        return True
