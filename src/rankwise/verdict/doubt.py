"""What keeps a proof from being one: facts about a job that the rules don't ask for, and that make their answer a guess.

A healthy job that is ended is the worst that can happen here. So what is seen is passed on only if nothing speaks against it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.evidence.threads import has_others_at_work

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rankwise.evidence.facts import Scene
    from rankwise.verdict.sight import Sight
    from rankwise.verdict.view import View

#: They say that ranks wait for each other, by where the main threads stand.
_OF_WAITS = {"circle", "absent_from_meeting", "kept_waiting", "fewer_steps", "state_on_some", "split_barrier"}


def are_ranks_the_launchers(scene: Scene) -> bool:
    """Tell whether ranks are numbered in torch.distributed as the launcher has numbered them, and are all of one world.

    A script may give its own numbers to ``init_process_group``, or make two worlds of one launch. Then nobody knows from
    outside which records belong together.

    Args:
        scene: All that is known of the ranks.
    """
    for facts in scene.ranks:
        for group in facts.evidence.groups.values() if facts.evidence is not None else ():
            if group.own is not None and group.own != facts.rank:
                return False
    return True


def doubt(sights: Iterable[Sight], view: View) -> tuple[Sight, ...]:
    """Return the sights, and call those suspicions that something speaks against.

    Args:
        sights: What the rules see.
        view: Where they see it.
    """
    return tuple(
        replace(sight, certainty="suspicion") if sight.is_proof and _is_doubtful(sight, view) else sight
        for sight in sights
    )


def _is_doubtful(sight: Sight, view: View) -> bool:
    if sight.rule not in _OF_WAITS:
        return False
    involved = {*sight.culprits, *(one.rank for one in sight.waiting)}
    if any(has_others_at_work(facts.evidence) for facts in view.scene.ranks if facts.rank in involved):
        return True
    return sight.rule == "absent_from_meeting" and _may_still_meet(view)


def _may_still_meet(view: View) -> bool:
    """Tell whether a living rank has yet to come to init_process_group: the world that is awaited may be a part of the job only."""
    return any(
        facts.state != "ended"
        and not view.has_joined(facts.rank)
        and view.standings[facts.rank].wait != "meeting"
        for facts in view.scene.ranks
        if facts.rank in view.standings
    )
