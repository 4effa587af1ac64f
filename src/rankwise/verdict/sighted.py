"""The verdict on a job whose ranks were seen to hang, or to make collectives that do not correspond."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.verdict.case import Verdict, Waiting, name_ranks
from rankwise.verdict.look import look
from rankwise.verdict.telling import are_alone
from rankwise.verdict.view import View
from rankwise.verdict.words import is_wrapping, shorten, verb

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from rankwise.evidence.facts import Op
    from rankwise.verdict.case import Case, RankEnd
    from rankwise.verdict.sight import Sight

_MOST_NOTES = 3
#: What these tell of is no consequence of another rank's end.
_APART = frozenset({"stopped_process", "dead_worker", "drift", "never_wrapped"})


def list_sights(case: Case, last: tuple[Sight, ...] | None = None) -> tuple[Sight, ...]:
    """Return what can be told of the ranks before they were stopped, best first, and then what was told earlier.

    Args:
        case: The attempt.
        last: What its scene shows, for whoever has looked at it: with many ranks that takes a second.
    """
    if last is None:
        last = look(case.scene) if case.scene is not None else ()
    sights: dict[str, Sight] = {}
    current = {sight.key for sight in last}
    # Models may have been made equal again since then.
    earlier = [one for one in case.sights if case.scene is None or not one.is_drift or one.key in current]
    for sight in (*case.decided, *last, *earlier):
        sights.setdefault(sight.key, sight)
    return tuple(sights.values())


def find_mismatch(case: Case) -> Sight | None:
    """Return the first of the collectives that did not correspond, if there were such."""
    return next((one for one in list_sights(case) if one.kind == "mismatch" and not one.is_drift), None)


def find_drift(case: Case) -> Sight | None:
    """Return the first of the models that are not the same on all ranks, if there are such."""
    return next((sight for sight in list_sights(case) if sight.is_drift), None)


def has_met_model_check(case: Case) -> bool:
    """Tell whether DDP's comparison of the models was answered by what was none."""
    partings = View(case.scene).partings if case.scene is not None else ()
    return any(len({is_wrapping(op) for _, op in parting.sides}) == 2 for parting in partings)


def was_in_mismatch(case: Case, rank: int) -> bool:
    """Tell whether a rank has ended in collectives that are proved not to correspond: Gloo aborts a rank to which more comes than it expects."""
    sight = find_mismatch(case)
    if sight is None or not sight.is_proof or case.scene is None:
        return False
    for parting in View(case.scene).partings:
        if parting.key == sight.key and any(rank in ranks for ranks, _ in parting.sides):
            return sight.is_stuck or parting.lane.last(rank) == parting.seq
    return False


def tell_earlier(case: Case) -> tuple[str, ...]:
    """Return what was seen of the ranks before the user ended the job: what was proved, and what still held then."""
    last = look(case.scene) if case.scene is not None else ()
    keys = {sight.key for sight in last}
    earlier = [one for one in case.sights if one.is_proof and not one.is_drift and one.key not in keys]
    return tuple(f"before that: {one.message}" for one in (*last, *earlier)[:_MOST_NOTES])


def tell_beside(case: Case, blamed: Collection[int]) -> tuple[str, ...]:
    """Return what is wrong beside a failure and can't follow from it, as a rank that somebody has stopped."""
    sights = look(case.scene) if case.scene is not None else ()
    beside = [one for one in sights if one.rule in _APART and not set(one.culprits) <= set(blamed)]
    return tuple(f"also: {one.message}" for one in beside[:_MOST_NOTES])


def find_last(case: Case, rank: int) -> Op | None:
    """Return the last collective of a rank that says nothing of its end; None if it is not known, or has no line."""
    facts = case.scene.find(rank) if case.scene is not None else None
    ops = facts.evidence.ops if facts is not None and facts.evidence is not None else ()
    return ops[-1] if ops and ops[-1].site else None


def are_at_work_alone(case: Case, ranks: Sequence[int]) -> bool:
    """Tell whether ranks that others waited for in vain were at something that only they have to do, by the script's own lines."""
    view = View(case.scene) if case.scene is not None else None
    if view is None or not ranks or any(rank not in view.by_rank for rank in ranks):
        return False
    has_stacks = all(view.by_rank[rank].stack for rank in ranks)
    return has_stacks and are_alone(view, ranks) and not any(view.standings[rank].wait for rank in ranks)


def judge_hung(case: Case) -> Verdict:
    """Return the verdict on ranks that we stopped because they hung."""
    if case.decided:
        return _dress(case.decided[0], case.decided[1:], exit_code=1)
    last = look(case.scene) if case.scene is not None else None
    sights = list_sights(case, last)
    # What was said while the ranks ran, and holds no more, was somebody slow.
    current = sights if last is None else last
    told = [one for one in (*current, *sights) if not one.is_drift]
    best = next((one for one in sights if one.kind == "mismatch" and not one.is_drift), None) or next(
        iter(told), None
    )
    if best is None:
        return _judge_by_stacks(case)
    return _dress(best, [one for one in current if one.key != best.key], exit_code=1)


def _judge_by_stacks(case: Case) -> Verdict:
    """Return the verdict where nothing was recorded: the stacks alone tell who was in a collective and who was not."""
    waiting = [(end, end.stack) for end in case.ranks if end.stack and end.stack.op]
    away = [(end, end.stack) for end in case.ranks if end.stack and not end.stack.op]
    told = "the ranks made no more progress"
    stopped = [facts.rank for facts in (case.scene.ranks if case.scene else ()) if facts.state == "stopped"]
    if stopped:
        return Verdict(
            kind="hang",
            culprits=tuple(stopped),
            where=next((end.stack.where for end in case.ranks if end.stack and end.rank in stopped), None),
            waiting=tuple(
                Waiting(rank=end.rank, where=stack.where, op=stack.op)
                for end, stack in waiting
                if end.rank not in stopped
            ),
            message=f"{name_ranks(stopped)} {verb(stopped, 'are', 'is')} stopped by a signal (SIGSTOP, Ctrl-Z), and the others made no more progress",
            fix="someone or something stopped it: `kill -CONT PID` lets a stopped process continue",
            exit_code=1,
        )
    # Who was elsewhere is named only beside others that waited for somebody.
    named = away if waiting and len(away) <= len(waiting) else []
    if named:
        where = shorten(named[0][1].where)
        waited = name_ranks([end.rank for end, _ in waiting])
        told = f"{name_ranks([end.rank for end, _ in named])} did not reach a collective, but was at {where}; {waited} waited"
    return Verdict(
        kind="hang",
        culprits=tuple(sorted(end.rank for end, _ in named)),
        where=named[0][1].where if named else None,
        waiting=tuple(Waiting(rank=end.rank, where=stack.where, op=stack.op) for end, stack in waiting),
        message=told,
        fix="look at where each of them was",
        exit_code=1,
    )


def judge_mismatch(case: Case, sight: Sight, left: Sequence[RankEnd]) -> Verdict:
    """Return the verdict on ranks that failed as a consequence of collectives that did not correspond.

    Args:
        case: The attempt.
        sight: The collectives.
        left: The ranks that left in error, in their order.
    """
    code = next((end.code for end in left if end.code), 1)
    others = [one for one in list_sights(case) if one.key != sight.key and one.is_proof]
    return _dress(sight, others, exit_code=code if code > 0 else 128 - code)


def judge_silent(case: Case) -> Verdict | None:
    """Return the verdict on a job that went through with collectives that were paired wrongly, or models that drifted apart; None if none was."""
    sight = find_mismatch(case) or find_drift(case)
    if sight is None:
        return None
    if sight.is_drift and not sight.is_proof:
        return Verdict(kind="ok", message="all ranks finished", notes=(f"{sight.message}\n  -> {sight.fix}",))
    is_ = "is" if sight.is_proof else "may be"
    note = f"all ranks finished with exit code 0, but what they computed from this collective on {is_} wrong"
    if sight.is_drift:
        note = "all ranks finished with exit code 0, but what they trained is not one model"
    # Where ranks came through what can't go well, by luck or with an error that they caught, that is no success either.
    is_lucky = sight.is_proof and sight.is_stuck
    verdict = _dress(sight, (), exit_code=1 if case.strict or is_lucky else 0)
    return replace(verdict, waiting=(), notes=(note,))


def _dress(sight: Sight, others: Sequence[Sight], *, exit_code: int) -> Verdict:
    beside = [f"also: {one.message}" for one in others if not set(one.culprits) <= set(sight.culprits)]
    return Verdict(
        kind=sight.kind,
        culprits=sight.culprits,
        class_id=sight.class_id,
        rule=sight.rule,
        where=sight.where,
        waiting=sight.waiting,
        message=sight.message,
        fix=sight.fix,
        exit_code=exit_code,
        notes=tuple(beside[:_MOST_NOTES]),
        first=sight.culprits[0] if sight.culprits else None,
    )
