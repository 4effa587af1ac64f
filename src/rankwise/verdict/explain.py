"""From what was found to the sentence that the user reads: the odd one first, then who waits, where, in what."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.base.rank_names import name_ranks
from rankwise.verdict.finding import JobFinding
from rankwise.verdict.rank_state import is_at_exit
from rankwise.verdict.wording import join_clauses, name_op, name_stages, name_wait, shorten, verb

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rankwise.evidence.reader.scene import Op, RankFacts
    from rankwise.verdict.finding import Certainty, Doing
    from rankwise.verdict.mismatch import Mismatch
    from rankwise.verdict.rank_state import RankState
    from rankwise.verdict.scene_view import Absence, SceneView


#: Of what an exception says.
_LONGEST = 120


def explain_mismatch(
    view: SceneView,
    mismatch: Mismatch,
    *,
    rule: str,
    text: str,
    fix: str,
    class_id: str | None,
    culprits: tuple[int, ...] = (),
    lead: Op | None = None,
) -> JobFinding:
    """Return the finding of ranks that diverged under one number; ``lead`` is the side to name first, where no side is the minority."""
    culprits = culprits or _find_culprits(view, mismatch)
    ordered = sorted(mismatch.sides, key=lambda side: (not set(side[0]) & set(culprits), side[1] is not lead, side[0]))
    is_past = mismatch.is_through or mismatch.later is not None
    sides = [
        f"{name_ranks(ranks)} {verb(ranks, 'were' if is_past else 'are', 'was' if is_past else 'is')} "
        f"in {name_op(op, number=False)} at {shorten(op.site)}"
        for ranks, op in ordered
    ]
    went_on = "; they were paired anyway and continued, with wrong results" if mismatch.is_through else mismatch.then
    involved = [
        view.rank_states[rank]
        for rank in mismatch.sequence.ranks
        if rank in view.rank_states and rank not in culprits and view.rank_states[rank].wait is not None
    ]
    return JobFinding(
        kind="mismatch",
        # Of these only lines and shapes tell, and there are programs in which they are meant.
        certainty="suspicion" if mismatch.respect in {"order", "shape", "bucket"} else "proof",
        rule=rule,
        culprits=culprits,
        class_id=class_id,
        where=next((op.site for _, op in (*ordered[:1], *mismatch.sides) if op.site), None),
        waiting=view.list_waiting(involved),
        message=f"{text}: at collective #{mismatch.seq} of their group {join_clauses(sides)}{went_on}",
        fix=fix,
        is_stuck=not mismatch.is_through,
        key=mismatch.key,
        doing="in a collective",
        since_s=mismatch.moment_s if mismatch.moment_s != float("inf") else None,
    )


def _find_culprits(view: SceneView, mismatch: Mismatch) -> tuple[int, ...]:
    """Return those who deviate; where there is no most, those who made a collective under a test of the rank."""
    culprits = mismatch.culprits
    if len(culprits) < sum(len(ranks) for ranks, _ in mismatch.sides):
        return culprits
    guarded = find_guarded(view, mismatch)
    return guarded[0][0] if len(guarded) == 1 else culprits


def find_guarded(view: SceneView, mismatch: Mismatch) -> tuple[tuple[tuple[int, ...], Op], ...]:
    """Return the sides that stand, for the first time, under a test of the rank that no other side is under."""
    guards = [{*view.source.guards_where(ranks[0], op.site)} for ranks, op in mismatch.sides]
    found = []
    for number, (ranks, op) in enumerate(mismatch.sides):
        others = set().union(*(some for other, some in enumerate(guards) if other != number))
        was_there = mismatch.sequence.has_been_at(ranks[0], op.site, before=op.seq)
        if not was_there and any(guard.is_rank_test for guard in guards[number] - others):
            found.append((ranks, op))
    return tuple(found)


def explain_absence(
    view: SceneView,
    absence: Absence,
    *,
    rule: str,
    fix: str,
    class_id: str | None = None,
    certainty: Certainty | None = None,
    culprits: Sequence[int] = (),
    is_stuck: bool | None = None,
) -> JobFinding:
    """Return the finding of ranks that others wait for; who deviates is the minority, if it is not given.

    It is a proof if all have ended, and stuck if it is a proof, unless the rule knows better.
    """
    certainty = certainty or ("proof" if view.have_ended(absence) else "suspicion")
    blamed = tuple(sorted(culprits)) or find_deviating(absence)
    if len(blamed) > len(absence.missing) and _are_kept_apart(view, absence):
        blamed = absence.missing
    away = explain_away(view, absence.missing)
    clause = f"{away}; {explain_waiting(absence.waiting)}"
    return JobFinding(
        kind="hang",
        certainty=certainty,
        rule=rule,
        culprits=blamed,
        class_id=class_id,
        where=find_place(view, blamed, absence),
        waiting=view.list_waiting([one for one in absence.waiting if one.rank not in blamed or len(blamed) > 1]),
        message=clause,
        fix=fix,
        is_stuck=certainty == "proof" if is_stuck is None else is_stuck,
        key=key_of(absence),
        doing=find_doing(view, absence.missing),
        since_s=view.since(absence.waiting),
    )


def _are_kept_apart(view: SceneView, absence: Absence) -> bool:
    """Tell whether those that are missing, and nobody else, stand where a test of the rank has led them."""
    came = {guard for one in absence.waiting for guard in view.source.guards_of(one.rank)}
    away = [{*view.source.guards_of(rank)} for rank in absence.missing]
    led = all(any(guard.is_rank_test for guard in guards - came) for guards in away)
    return led and not any(guard.is_rank_test for guard in came.difference(*away))


def are_alone(view: SceneView, ranks: Sequence[int]) -> bool:
    """Tell whether ranks stand where a test of the rank has led them: what they do there, the others don't."""
    tested = [any(guard.is_rank_test for guard in view.source.guards_of(rank)) for rank in ranks]
    return bool(tested) and all(tested)


def put_at(finding: JobFinding, where: str | None) -> JobFinding:
    """Return a finding whose place is the line that led a culprit away, if that is known: its own, not that of those who wait."""
    return replace(finding, where=where or finding.where)


def key_of(absence: Absence) -> str:
    """Return what is equal for the same absence at a later moment."""
    at = f" {absence.sequence.key if absence.sequence else absence.op.name} #{absence.op.seq}" if absence.op else ""
    return f"absent {name_ranks(absence.missing, None)}{at}"


def find_deviating(absence: Absence) -> tuple[int, ...]:
    """Return the minority of those who came and those who did not; of two equal halves those who did not, if they did before."""
    came = tuple(sorted(one.rank for one in absence.waiting))
    if absence.op is not None and absence.op.flow is not None:
        return absence.missing  # stages are not alike: how many wait for one tells nothing
    members = len(absence.sequence.ranks) if absence.sequence else len(came) + len(absence.missing)
    if len(absence.missing) * 2 < members or len(came) > len(absence.missing):
        return absence.missing
    if len(came) == len(absence.missing):
        return absence.missing if absence.have_been_here else tuple(sorted((*came, *absence.missing)))
    return came if not absence.have_been_here and absence.is_known else absence.missing


def find_fewer(absence: Absence) -> tuple[int, ...]:
    """Return the fewer of those who came and those who did not; of two equal halves those who did not."""
    came = tuple(sorted(one.rank for one in absence.waiting))
    return absence.missing if len(absence.missing) <= len(came) else came


def find_place(view: SceneView, culprits: Sequence[int], absence: Absence) -> str | None:
    """Return the line of the first culprit that has one; else the line that the others wait at."""
    missing = [rank for rank in culprits if rank in absence.missing]
    for rank in (*missing, *culprits):
        rank_state = view.rank_states.get(rank)
        if rank_state and (place := rank_state.site if rank_state.wait else rank_state.where):
            return place
    return next((one.site for one in absence.waiting if one.site), None)


def find_doing(view: SceneView, ranks: Sequence[int]) -> Doing:
    """Return what the missing ranks do: the most hopeful of it, if they do several things."""
    order: tuple[Doing, ...] = (
        "debugged", "compiling", "busy", "saving", "loading data", "unknown", "in a collective", "asleep", "stopped", "ended",
    )  # fmt: skip
    found = {view.rank_states[rank].doing for rank in ranks if rank in view.rank_states}
    return next((doing for doing in order if doing in found), "unknown")


def explain_away(view: SceneView, missing: Sequence[int]) -> str:
    """Return what ranks do instead, each group of alike ones in a clause; of a pipeline's with their stage."""
    groups: dict[str, list[int]] = {}
    for rank in missing:
        facts = view.by_rank[rank]
        # A figure of its own for each rank would keep them from being told together.
        share = f" ({100 * (facts.cpu_share or 0):.0f} % CPU)" if len(missing) == 1 else ""
        doing = _describe_pause(view, rank) or _describe_doing(facts, view.rank_states[rank], share)
        groups.setdefault(doing, []).append(rank)
    clauses = [
        f"{_describe_who(view, ranks, doing)} {doing}"
        for doing, ranks in sorted(groups.items(), key=lambda group: (len(group[1]), group[1]))
    ]
    return join_clauses(clauses)


def _describe_who(view: SceneView, ranks: Sequence[int], doing: str) -> str:
    """Return ``ranks 4, 5 are``, or where all of them hold the same stage ``stage 2 (ranks 4, 5) is``."""
    plural, singular = ("have", "has") if doing.startswith("ended") else ("are", "is")
    stages = {view.stages.get(rank) for rank in ranks}
    held = stages.pop()
    if stages or held is None:
        return f"{name_ranks(ranks)} {verb(ranks, plural, singular)}"
    if len(held) > 1:
        return f"{name_ranks(ranks)} ({name_stages(held)}) {verb(ranks, plural, singular)}"
    return f"{name_stages(held)} ({name_ranks(ranks)}) {singular}"


def _describe_pause(view: SceneView, rank: int) -> str:
    facts, where = view.by_rank[rank], view.rank_states[rank].where
    if facts.state != "ended" and facts.stack is not None and is_at_exit(facts.stack):
        raised = facts.fault.message.strip()[:_LONGEST].splitlines()[:1] if facts.fault is not None else []
        return f"at its exit{f' after {raised[0]}' if raised else ''}{f', at {shorten(where)}' if where else ''}"
    local_wait = view.local_waits.get(rank)
    if local_wait is None:
        return ""
    at = f" at {shorten(where)}" if where else ""
    own = f" ({local_wait.own})" if local_wait.own else ""
    return f"{local_wait.doing}{at}{own}"


def _describe_doing(facts: RankFacts, rank_state: RankState, share: str) -> str:
    place = f" at {shorten(rank_state.where)}" if rank_state.where else ""
    if rank_state.doing == "ended":
        return f"ended with {'exit code' if (facts.code or 0) >= 0 else 'signal'} {abs(facts.code or 0)}{_last_words(facts)}"
    found = {
        "busy": f"busy{share}",
        "debugged": "in a debugger, waiting for input,",
        "stopped": "stopped by a signal (SIGSTOP, Ctrl-Z)",
        "unknown": "not in a collective, but",
        "loading data": "waiting for its data loader,",
        "saving": "reading or writing a file,",
        "in a collective": "in a collective",
    }.get(rank_state.doing, rank_state.doing)
    # What stays the same for all of them lets them be told together.
    found = found if place else found.removesuffix(",").removesuffix(", but")
    workers = " and ".join(list_worker_places([facts]) if rank_state.doing == "loading data" else [])
    return f"{found}{place}{f', whose worker is at {workers}' if workers else ''}"


def list_worker_places(ranks: Iterable[RankFacts]) -> list[str]:
    """Return where DataLoader workers of these ranks read samples, each place once."""
    stacks = (child.stack for facts in ranks for child in facts.children if child.stack is not None)
    # One that waits for something to do runs no line of the user's.
    reading = (stack for stack in stacks if any(frame.is_users for frame in stack.frames))
    return list(dict.fromkeys(shorten(stack.where) for stack in reading))


def _last_words(facts: RankFacts) -> str:
    ops = facts.ops
    return f" after {ops[-1].name} at {shorten(ops[-1].site)}" if ops and ops[-1].site else ""


def explain_waiting(waiting: Sequence[RankState]) -> str:
    """Return who waits, in what and where; of a pipeline's stages what each waits for."""
    groups: dict[tuple[str, str, int | None], list[int]] = {}
    stage: int | None
    for one in waiting:
        flow = one.op.flow if one.op else None
        if one.op is not None and flow is not None:
            what, stage = f"{name_wait(one.op, flow)} at", flow.stage
        else:
            what, stage = f"in {name_op(one.op) if one.op else one.call or 'a collective'} from", None
        groups.setdefault((what, shorten(one.site), stage), []).append(one.rank)
    clauses = [
        f"{name_ranks(ranks)} {verb(ranks, 'wait')} {what} {place}"
        if stage is None
        else f"stage {stage} ({name_ranks(ranks)}) waits {what} {place}"
        for (what, place, stage), ranks in sorted(groups.items(), key=lambda it: (-len(it[1]), it[1]))
    ]
    return join_clauses(clauses)
