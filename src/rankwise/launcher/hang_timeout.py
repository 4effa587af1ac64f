"""How long a wait may last before a job counts as hung: pure, so that every case can be tested in a line.

A healthy job that is killed is worse than a hung one that is not: the latter is at least said, again and again. So there are
two bounds.

The user's own, ``--hang-timeout S``, is taken at its word: when ranks have waited so long in a collective while no rank made
a record or a step, the job has hung, also if the one they wait for uses the CPU: who writes 60 s means that nobody shall
keep the others waiting for longer. Only a debugger, in which somebody may be thinking, stops the clock.

Without it, 1800 s must pass, as long as Gloo waits by default, and it is a hang only if all the others are idle too: a rank
that computes, compiles, evaluates or writes a checkpoint may take as long as it likes, and one that is stopped may go on.
Ranks of other nodes can't be seen, and are thought to be at work.

Ranks that wait for one which has left without an error are different: no course of events brings it back. Where other threads
of theirs are at work, though, it may be one of these that they wait for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.evidence.reader.scene import STILL_S
from rankwise.evidence.reader.thread_choice import find_collectives, has_others_at_work

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwise.evidence.reader.scene import RankFacts, Scene

#: As long as Gloo waits by default.
DEFAULT_S = 1800.0
#: Ranks that wait, all of them and idle, for one that has left.
LEFT_BEHIND_S = 60.0
#: Functions and modules that are slow by nature, and say nothing meanwhile.
_SLOW = (
    "/torch/_dynamo/",
    "/torch/_inductor/",
    "/torch/serialization.py",
    "/torch/distributed/checkpoint/",
    "/rankwise/checkpoint/",
    "checkpoint",
)


def is_hung(scene: Scene, quiet_s: Mapping[int, float], *, timeout_s: float | None) -> bool:
    """Tell whether ranks have waited for too long.

    Args:
        scene: All ranks now, with fresh stacks.
        quiet_s: For how long each living one has made no record and no step.
        timeout_s: The user's own bound; infinite for none at all, None for the default.
    """
    living = [facts for facts in scene.ranks if facts.code is None and facts.state not in {"ended", "not started"}]
    waiting = [facts for facts in living if waits(facts) or (timeout_s is not None and waits_aside(facts))]
    is_paused = any(facts.reads_terminal for facts in living) or all(facts.state == "stopped" for facts in living)
    if not waiting or is_paused or timeout_s == float("inf"):
        return False
    bound_s = DEFAULT_S if timeout_s is None else timeout_s
    at_work = any(has_others_at_work(facts.evidence) for facts in living)
    if len(waiting) == len(living) and _has_one_left(scene) and not at_work:
        idle_s = min(facts.still_s for facts in living)
        if idle_s >= min(bound_s, LEFT_BEHIND_S):
            return True
    if min(quiet_s.get(facts.rank, 0.0) for facts in living) < bound_s:
        return False
    others = [facts for facts in living if facts not in waiting]
    if timeout_s is not None:
        return scene.is_whole or not others
    return scene.is_whole and all(_is_idle(facts, bound_s) for facts in others)


def waits(facts: RankFacts) -> bool:
    """Tell whether a rank waits for others: by its stack, or on a GPU by a collective that is not over."""
    if facts.stack is not None and facts.stack.library_wait == "turn":
        return False  # for a download, say: it has a bound of its own, and then names the rank
    op = facts.stack.op if facts.stack is not None else None
    # A backward pass that uses the CPU computes, and waits for nobody.
    if op is not None and (op != "backward" or facts.still_s >= STILL_S):
        return True
    ops = facts.evidence.ops if facts.evidence is not None else ()
    groups = facts.evidence.groups if facts.evidence is not None else {}
    # On Gloo the stack tells; there a collective may also be left open for good by a script that never waits for it.
    on_device = [op for op in ops if op.group in groups and "nccl" in groups[op.group].backend]
    return bool(on_device) and on_device[-1].is_over is False


def waits_aside(facts: RankFacts) -> bool:
    """Tell whether a thread beside the main one waits for others, in a rank that does nothing else."""
    return facts.evidence is not None and facts.still_s >= STILL_S and bool(find_collectives(facts.evidence))


def _has_one_left(scene: Scene) -> bool:
    return scene.is_whole and any(facts.code == 0 for facts in scene.ranks)


def _is_idle(facts: RankFacts, bound_s: float) -> bool:
    if facts.state == "stopped" or facts.still_s < bound_s or facts.stack is None or not facts.stack.frames:
        return False  # where it stands is not known
    return not any(part in frame.file or part in frame.function for frame in facts.stack.frames for part in _SLOW)
