"""The verdict on ranks that we only look at: they were started by somebody else, or ran on another day."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.base.rank_names import name_ranks
from rankwise.base.terminal import strip_escapes
from rankwise.evidence.reader.flight_dump import UNKNOWN_LINE
from rankwise.evidence.reader.scene import STILL_S
from rankwise.verdict.case import Case, RankEnd, Verdict
from rankwise.verdict.first_failure import judge
from rankwise.verdict.rank_state import find_state
from rankwise.verdict.report import render, render_finding
from rankwise.verdict.run_rules import look
from rankwise.verdict.wording import name_op, shorten, verb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.evidence.reader.scene import RankFacts, Scene
    from rankwise.verdict.finding import JobFinding
    from rankwise.verdict.rank_state import RankState

#: What is said of a verdict that no finding proves.
NO_PROOF = "this is what the evidence suggests, not proof"
_MOST_GROUPS = 12
#: Who does this may come yet.
_AT_WORK = frozenset({"busy", "compiling", "debugged", "loading data", "saving"})


def judge_scene(scene: Scene, notes: Sequence[str] = (), *, has_hung: bool = False) -> Verdict:
    """Return the verdict on ranks at one moment, with the stacks of all of them below it; kind "ok" if nothing is seen.

    Args:
        scene: The ranks.
        notes: What the reader must know of the scene beside.
        has_hung: Whether the scene is known to be of a hang, as it is of dumps: else ranks that move do not wait.
    """
    findings = look(scene)
    found = tuple(strip_escapes(note) for note in (*fold(scene), *notes))
    if findings and not has_hung and not _are_stuck(findings):
        message = render_finding(findings[0], now_s=scene.now_s)
        return Verdict(kind="ok", culprits=findings[0].culprits, where=findings[0].where, message=message, notes=found)
    if findings:
        verdict = judge(Case(ranks=_to_ends(scene), world_size=scene.world_size, scene=scene, hung=True))
        if not any(finding.is_proof for finding in findings):
            found = (NO_PROOF, *found)
        return _hide_unknown(replace(verdict, casualties=(), exits={}, notes=(*verdict.notes, *found)))
    if _wait_apart(scene, has_hung=has_hung):
        return Verdict(
            kind="hang",
            message="all ranks are waiting in collectives, but not all in the same one",
            fix="compare the lines below: all ranks of a group must call the same collectives in the same order",
            exit_code=1,
            notes=found,
        )
    return Verdict(kind="ok", message=_describe_nothing(scene, has_hung=has_hung), notes=found)


def _are_stuck(findings: Sequence[JobFinding]) -> bool:
    """Tell whether ranks hang: those that wait for one at work are only slow."""
    return any(finding.is_proof or finding.doing not in _AT_WORK for finding in findings)


def _hide_unknown(verdict: Verdict) -> Verdict:
    """Return a verdict in which a line that nobody has told is not shown as one."""
    hide = {name: getattr(verdict, name).replace(UNKNOWN_LINE, "an unknown line") for name in ("message", "fix")}
    return replace(
        verdict,
        where=None if verdict.where == UNKNOWN_LINE else verdict.where,
        waiting=tuple(replace(one, where=None) if one.where == UNKNOWN_LINE else one for one in verdict.waiting),
        notes=tuple(note.replace(UNKNOWN_LINE, "an unknown line") for note in verdict.notes),
        **hide,
    )


def _to_ends(scene: Scene) -> tuple[RankEnd, ...]:
    """Return all ranks as stopped at that moment: how one has ended is not what is asked."""
    return tuple(
        RankEnd(rank=facts.rank, local_rank=facts.rank, pid=facts.pid, stopped_s=scene.now_s, stack=facts.stack)
        for facts in scene.ranks
    )


def fold(scene: Scene) -> tuple[str, ...]:
    """Return where all ranks stand in a line for each place, the odd one first."""
    groups: dict[str, list[int]] = {}
    for facts in scene.ranks:
        groups.setdefault(_describe_rank(facts, find_state(facts)), []).append(facts.rank)
    ordered = sorted(groups.items(), key=lambda group: (len(group[1]), group[1]))
    lines = [f"{name_ranks(ranks)}: {text}" for text, ranks in ordered[:_MOST_GROUPS]]
    more = len(ordered) - _MOST_GROUPS
    return (*lines, f"and {more} more place{'s' * (more > 1)}") if more > 0 else tuple(lines)


def _describe_rank(facts: RankFacts, rank_state: RankState) -> str:
    last = facts.ops[-1] if facts.ops else None
    if facts.state in {"stopped", "ended"}:
        return facts.state
    if rank_state.wait is not None:
        within = name_op(rank_state.op) if rank_state.op else rank_state.call or "a collective"
        return f"in {within} from {shorten(rank_state.site)}"
    if facts.stack is not None:
        inner = facts.stack.frames[0].function if facts.stack.frames else ""
        place = next((frame for frame in facts.stack.frames if frame.is_users), None)
        within = f", in {inner}" if place is not None and place is not facts.stack.frames[0] else ""
        return f"at {shorten(facts.stack.where)}{within}"
    if last is not None:
        return (
            f"its last was {name_op(last)} from {shorten(last.site)}{', which has completed' if last.is_over else ''}"
        )
    return (
        "nothing is known about it" if facts.cpu_share is None else f"{facts.state}, {100 * facts.cpu_share:.0f} % CPU"
    )


def can_tell(scene: Scene) -> bool:
    """Tell whether silence means something: stacks are known, and not all ranks here wait for some on other hosts."""
    return any(facts.stack for facts in scene.ranks) and (scene.is_whole or not _do_all_wait(scene))


def _describe_nothing(scene: Scene, *, has_hung: bool) -> str:
    if not any(facts.stack or facts.ops for facts in scene.ranks):
        return "without stacks it is not known which rank waits for which"
    if not scene.is_whole:
        here = (
            "all ranks seen here are waiting"
            if _do_all_wait(scene, has_hung=has_hung)
            else "nothing here shows that one rank keeps another waiting"
        )
        return f"{here}; the job's other ranks can't be seen from here: look at them too"
    if _do_all_wait(scene, has_hung=has_hung):
        return "all ranks wait in the same collective: if that stays so, look at the network between them"
    return "nothing here shows that one rank keeps another waiting"


def _do_all_wait(scene: Scene, *, has_hung: bool = False) -> bool:
    """Tell whether all ranks that are seen wait for others, and have not moved."""
    waits = {find_state(facts).wait for facts in scene.ranks}
    is_still = has_hung or all(facts.still_s >= STILL_S for facts in scene.ranks)
    return is_still and waits <= {"call", "handle", "backward", "device"}


def _wait_apart(scene: Scene, *, has_hung: bool) -> bool:
    """Tell whether all ranks wait, and not at one place: which collectives these are only their lines tell."""
    rank_states = [find_state(facts) for facts in scene.ranks]
    places = {(one.call, one.site) for one in rank_states}
    # Of a device's wait the line is no place: each rank goes on until it needs a result.
    are_places_known = not any(one.wait == "device" or one.op for one in rank_states)
    return scene.is_whole and _do_all_wait(scene, has_hung=has_hung) and are_places_known and len(places) > 1


def say(verdict: Verdict, *, is_now: bool = False, width: int | None = None) -> str:
    """Return a verdict as text.

    Args:
        verdict: What `judge_scene` returned.
        is_now: Whether the ranks still run.
        width: Of the terminal, as `render` takes it.
    """
    if verdict.kind == "ok":
        return "\n".join([f"rankwise: {verdict.message}", *(f"  {note}" for note in verdict.notes)])
    text = render(verdict, width=width)
    now = "the job may hang" if NO_PROOF in verdict.notes else "the job hangs"
    return text.replace("the job hung", now, 1) if is_now else text


def say_ranks(scene: Scene) -> str:
    """Return how many ranks are seen, in words: ``ranks 0-3 of 8 are here``."""
    numbers = [facts.rank for facts in scene.ranks]
    return f"{name_ranks(numbers)} of {scene.world_size} {verb(numbers, 'are', 'is')} here"
