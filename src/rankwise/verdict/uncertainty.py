"""What keeps a proof from being one: facts about a job that the rules don't ask for, and that make their answer a guess.

A healthy job that is ended is the worst that can happen here. So what is seen is passed on only if nothing speaks against it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.evidence.reader.thread_choice import MAIN, has_others_at_work
from rankwise.verdict.explain import key_of
from rankwise.verdict.handlers import goes_on
from rankwise.verdict.rank_state import is_at_exit

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rankwise.evidence.reader.scene import Op, RankFacts, Scene
    from rankwise.verdict.finding import JobFinding
    from rankwise.verdict.group_sequences import GroupSequence
    from rankwise.verdict.rank_state import RankState
    from rankwise.verdict.scene_view import SceneView

#: They say that ranks wait for each other, by where the main threads stand.
_OF_WAITS = {"wait_cycle", "absent_from_rendezvous", "kept_waiting", "fewer_steps", "state_on_some", "split_barrier"}


def are_ranks_the_launchers(scene: Scene) -> bool:
    """Tell whether ranks are numbered in torch.distributed as the launcher has numbered them, and are all of one world.

    A script may give its own numbers to ``init_process_group``, or make two worlds of one launch. Then nobody knows
    from outside which records belong together.
    """
    for facts in scene.ranks:
        for group in facts.evidence.groups.values() if facts.evidence is not None else ():
            if group.own is not None and group.own != facts.rank:
                return False
    return True


def doubt(findings: Iterable[JobFinding], view: SceneView) -> tuple[JobFinding, ...]:
    """Return the findings, and call those suspicions that something speaks against."""
    return tuple(
        replace(finding, certainty="suspicion") if finding.is_proof and _is_doubtful(finding, view) else finding
        for finding in findings
    )


def _is_doubtful(finding: JobFinding, view: SceneView) -> bool:
    if finding.kind == "hang" and finding.is_stuck and _is_handled(finding, view):
        return True
    if finding.rule not in _OF_WAITS:
        return False
    involved = {*finding.culprits, *(one.rank for one in finding.waiting)}
    if any(has_others_at_work(facts.evidence) for facts in view.scene.ranks if facts.rank in involved):
        return True
    return finding.rule == "absent_from_rendezvous" and _may_still_meet(view)


def _may_still_meet(view: SceneView) -> bool:
    """Tell whether a living rank has yet to reach init_process_group: the world that is awaited may be a part of the job only."""
    return any(
        facts.state != "ended" and not view.has_joined(facts.rank) and view.rank_states[facts.rank].wait != "rendezvous"
        for facts in view.scene.ranks
        if facts.rank in view.rank_states
    )


# ------------------------------------------------ a wait that ends by an exception


def _is_handled(finding: JobFinding, view: SceneView) -> bool:
    """Tell whether the script goes on when the wait for a rank that has ended comes to its end by an exception.

    Gloo tells a rank whose neighbour has closed its connection; and when that one goes on and leaves, the next. Where
    nobody has ended, only a timeout would end the wait: that is the hang.
    """
    absence = next((one for one in view.absences if key_of(one) == finding.key), None)
    met = () if absence is None else (*absence.missing, *(one.rank for one in absence.waiting))
    involved = {*finding.culprits, *(one.rank for one in finding.waiting), *met} & view.rank_states.keys()
    if not any(view.by_rank[rank].state == "ended" for rank in involved):
        return False
    waiting = [view.rank_states[rank] for rank in involved if view.by_rank[rank].state != "ended"]
    return any(_goes_on(one, view) or _has_gone_on(one, view) for one in waiting if one.wait is not None)


def _goes_on(one: RankState, view: SceneView) -> bool:
    """Tell whether a line that waits stands in a ``try`` whose handler goes on with the work."""
    sequence = view.sequence_of(one.rank, one.op) if one.op is not None else None
    if sequence is not None and sequence.backends == {"nccl"}:
        return False  # what it notices ends the process: no handler is asked
    return goes_on(view.scene.sources, view.source.lines_where(one.rank, one.site))


def _has_gone_on(one: RankState, view: SceneView) -> bool:
    """Tell whether another rank has come out of the same collective by an exception, and lives on."""
    sequence = view.sequence_of(one.rank, one.op) if one.op is not None else None
    if sequence is None or one.op is None:
        return False
    return any(_lives_on(view.by_rank[rank], sequence, one.op) for rank in sequence.ops if rank in view.by_rank)


def _lives_on(facts: RankFacts, sequence: GroupSequence, op: Op) -> bool:
    raised = sequence.ops[facts.rank].get(op.seq)
    if raised is None or not raised.has_raised or facts.state == "ended" or facts.evidence is None:
        return False
    # Its end takes a while; and what stands in a finally may be raised again behind it.
    is_ending = facts.fault is not None or facts.finished_s is not None or facts.evidence.has_left
    is_ending = is_ending or (facts.stack is not None and (is_at_exit(facts.stack) or facts.stack.is_farewell))
    return not is_ending and MAIN not in (facts.evidence.handled or {})
