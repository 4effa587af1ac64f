"""The verdict on a job whose ranks were seen to hang, or to make collectives that do not correspond."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.base.rank_names import name_ranks
from rankwise.verdict.case import Verdict
from rankwise.verdict.explain import are_alone
from rankwise.verdict.finding import Waiting
from rankwise.verdict.run_rules import look
from rankwise.verdict.scene_view import SceneView
from rankwise.verdict.wording import is_wrapping, shorten, verb

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from rankwise.evidence.reader.scene import Op
    from rankwise.verdict.case import Case, RankEnd
    from rankwise.verdict.finding import JobFinding

#: Some rank waits as long for a slower one in any step.
_PASSING_S = 2.0
_MOST_NOTES = 3
#: What these tell of is no consequence of another rank's end.
_APART = frozenset({"stopped_process", "dead_worker", "drift", "never_wrapped"})


def list_findings(case: Case, last: tuple[JobFinding, ...] | None = None) -> tuple[JobFinding, ...]:
    """Return what can be told of the ranks before they were stopped, best first, and then what was told earlier.

    Args:
        case: The attempt.
        last: What its scene shows, for whoever has looked at it: with many ranks that takes a second.
    """
    if last is None:
        last = look(case.scene) if case.scene is not None else ()
    findings: dict[str, JobFinding] = {}
    current = {finding.key for finding in last}
    # Models may have been made equal again since then.
    earlier = [one for one in case.findings if case.scene is None or not one.is_drift or one.key in current]
    for finding in (*case.decided, *last, *earlier):
        findings.setdefault(finding.key, finding)
    return tuple(findings.values())


def find_mismatch(case: Case) -> JobFinding | None:
    """Return the first of the collectives that did not correspond, if there were such."""
    return next((one for one in list_findings(case) if one.kind == "mismatch" and not one.is_drift), None)


def find_drift(case: Case) -> JobFinding | None:
    """Return the first of the models that are not the same on all ranks, if there are such."""
    return next((finding for finding in list_findings(case) if finding.is_drift), None)


def has_met_model_check(case: Case) -> bool:
    """Tell whether DDP's comparison of the models was answered by what was none."""
    mismatches = SceneView(case.scene).mismatches if case.scene is not None else ()
    return any(all(mismatch.split(is_wrapping)) for mismatch in mismatches)


def was_in_mismatch(case: Case, rank: int) -> bool:
    """Tell whether a rank has ended in collectives that are proved not to correspond: Gloo aborts a rank to which more comes than it expects."""
    finding = find_mismatch(case)
    if finding is None or not finding.is_proof or case.scene is None:
        return False
    for mismatch in SceneView(case.scene).mismatches:
        if mismatch.key == finding.key and any(rank in ranks for ranks, _ in mismatch.sides):
            return finding.is_stuck or mismatch.sequence.last(rank) == mismatch.seq
    return False


def list_earlier(case: Case) -> tuple[str, ...]:
    """Return what was seen of the ranks before the user ended the job: what was proved, and what still held then."""
    last = look(case.scene) if case.scene is not None else ()
    keys = {finding.key for finding in last}
    earlier = [one for one in case.findings if one.is_proof and not one.is_drift and one.key not in keys]
    now_s = case.scene.now_s if case.scene is not None else 0.0
    shown = [one for one in last if one.is_proof or now_s - (one.since_s or 0.0) >= _PASSING_S]
    texts = (f"{one.message}; {one.fix}" if one.fix else one.message for one in (*shown, *earlier)[:_MOST_NOTES])
    return tuple(f"before that: {text}" for text in texts)


def list_beside(case: Case, blamed: Collection[int]) -> tuple[str, ...]:
    """Return what is wrong beside a failure and can't follow from it, as a rank that somebody has stopped."""
    findings = look(case.scene) if case.scene is not None else ()
    beside = [one for one in findings if one.rule in _APART and not set(one.culprits) <= set(blamed)]
    return tuple(f"also: {one.message}" for one in beside[:_MOST_NOTES])


def find_last(case: Case, rank: int) -> Op | None:
    """Return the last collective of a rank that says nothing of its end; None if it is not known, or has no line."""
    ops = case.list_ops(rank)
    return ops[-1] if ops and ops[-1].site else None


def are_at_work_alone(case: Case, ranks: Sequence[int]) -> bool:
    """Tell whether ranks that others waited for in vain were at something that only they have to do, by the script's own lines."""
    view = SceneView(case.scene) if case.scene is not None else None
    if view is None or not ranks or any(rank not in view.by_rank for rank in ranks):
        return False
    has_stacks = all(view.by_rank[rank].stack for rank in ranks)
    return has_stacks and are_alone(view, ranks) and not any(view.rank_states[rank].wait for rank in ranks)


def judge_hung(case: Case) -> Verdict:
    """Return the verdict on ranks that we stopped because they hung."""
    if case.decided:
        return _to_verdict(case.decided[0], case.decided[1:], exit_code=1)
    last = look(case.scene) if case.scene is not None else None
    findings = list_findings(case, last)
    # What was said while the ranks ran, and holds no more, was somebody slow.
    current = findings if last is None else last
    lines = [one for one in (*current, *findings) if not one.is_drift]
    best = next((one for one in findings if one.kind == "mismatch" and not one.is_drift), None) or next(
        iter(lines), None
    )
    if best is None:
        return _judge_by_stacks(case)
    return _to_verdict(best, [one for one in current if one.key != best.key], exit_code=1)


def _judge_by_stacks(case: Case) -> Verdict:
    """Return the verdict where nothing was recorded: the stacks alone tell who was in a collective and who was not."""
    waiting = [(end, end.stack) for end in case.ranks if end.stack and end.stack.op]
    away = [(end, end.stack) for end in case.ranks if end.stack and not end.stack.op]
    text = "the ranks made no more progress"
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
        gone, places = [end.rank for end, _ in named], {stack.where for _, stack in named}
        where = f"at {shorten(places.pop())}" if len(places) == 1 else "elsewhere"
        waited = name_ranks([end.rank for end, _ in waiting])
        text = (
            f"{name_ranks(gone)} did not reach a collective, but {verb(gone, 'were', 'was')} {where}; {waited} waited"
        )
    return Verdict(
        kind="hang",
        culprits=tuple(sorted(end.rank for end, _ in named)),
        where=named[0][1].where if named else None,
        waiting=tuple(Waiting(rank=end.rank, where=stack.where, op=stack.op) for end, stack in waiting),
        message=text,
        fix="look at what they waited for there" if named else "look at where each of them was",
        exit_code=1,
    )


def judge_mismatch(case: Case, finding: JobFinding, left: Sequence[RankEnd]) -> Verdict:
    """Return the verdict on ranks that failed as a consequence of collectives that did not correspond."""
    code = next((end.code for end in left if end.code), 1)
    others = [one for one in list_findings(case) if one.key != finding.key and one.is_proof]
    return _to_verdict(finding, others, exit_code=code if code > 0 else 128 - code)


def judge_silent(case: Case) -> Verdict | None:
    """Return the verdict on a job that went through with collectives that were paired wrongly, or models that drifted apart; None if none was."""
    finding = find_mismatch(case) or find_drift(case)
    if finding is None:
        return None
    if finding.is_drift and not finding.is_proof:
        return Verdict(kind="ok", message="all ranks finished", notes=(f"{finding.message}\n  -> {finding.fix}",))
    is_ = "is" if finding.is_proof else "may be"
    note = f"all ranks finished with exit code 0, but what they computed from this collective on {is_} wrong"
    if finding.is_drift:
        note = "all ranks finished with exit code 0, but what they trained is not one model"
    # Where ranks came through what can't go well, by luck or with an error that they caught, that is no success either.
    is_lucky = finding.is_proof and finding.is_stuck
    verdict = _to_verdict(finding, (), exit_code=1 if case.strict or is_lucky else 0)
    return replace(verdict, waiting=(), notes=(note,))


def _to_verdict(finding: JobFinding, others: Sequence[JobFinding], *, exit_code: int) -> Verdict:
    beside = [f"also: {one.message}" for one in others if not set(one.culprits) <= set(finding.culprits)]
    return Verdict(
        kind=finding.kind,
        culprits=finding.culprits,
        class_id=finding.class_id,
        rule=finding.rule,
        where=finding.where,
        waiting=finding.waiting,
        message=finding.message,
        fix=finding.fix,
        exit_code=exit_code,
        notes=tuple(beside[:_MOST_NOTES]),
        first=finding.culprits[0] if finding.culprits else None,
    )
