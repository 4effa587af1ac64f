"""Who left first, and why. The rank that complains is usually innocent: it lost the one that left before."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rankwise.base.os_calls import KILL_SIGNAL
from rankwise.base.rank_names import name_ranks
from rankwise.base.requeue import REQUEUE
from rankwise.verdict.case import Casualty, Verdict
from rankwise.verdict.early_exits import find_early_exits_here
from rankwise.verdict.error_meanings import find_file_fix, find_fix, find_meaning, find_missing
from rankwise.verdict.error_origin import find_blame, find_meaning_of, first_line, say, unwrap
from rankwise.verdict.exit_calls import find_exit_call, find_exit_words
from rankwise.verdict.exit_codes import explain_exit, is_abort_at_exit, is_wordless_abort, name_signal
from rankwise.verdict.gloo_size_error import find_size_error
from rankwise.verdict.judge_hang import (
    are_at_work_alone,
    find_last,
    find_mismatch,
    has_met_model_check,
    judge_hung,
    judge_mismatch,
    judge_silent,
    list_beside,
    list_earlier,
    was_in_mismatch,
)
from rankwise.verdict.requeue import is_requeue, judge_requeue, leaves_for_requeue
from rankwise.verdict.silent_exits import find_silent_exits, has_closed
from rankwise.verdict.waiting_ranks import list_waiting
from rankwise.verdict.wording import name_op, shorten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.verdict.case import Case, Fate, Kind, RankEnd


_SILENT_EXIT = "look for a silent exit (os._exit, sys.exit), anywhere in what runs once {at} has run: an exception instead would name its line"
_EXIT_CALL = "it {left} by the exit call at {at}: raise an exception there instead, which the report would name"
_EXPIRED = (
    "the body of the timer's `with` took longer than `after`: look at what the rank did there, or allow more time"
)
_LOST_NODE = "check that host; with --nnodes MIN:MAX the job continues on the remaining nodes, with --max-restarts it waits for a replacement"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cause:
    """The answer before it is dressed for the reader."""

    message: str
    kind: Kind = "failure"
    culprits: tuple[RankEnd, ...] = ()
    class_id: str | None = None
    where: str | None = None
    fix: str = ""
    reason: str = ""


def judge(case: Case) -> Verdict:
    """Return the verdict on an attempt that has ended."""
    forgiven = [end.rank for end in case.ranks if is_abort_at_exit(end)]
    ended = (replace(end, code=0) if end.rank in forgiven else end for end in case.ranks)
    case = replace(case, ranks=tuple(map(unwrap, ended)))
    notes: tuple[str, ...] = (
        (f"torch aborted {name_ranks(forgiven)} at exit, after the script had finished: counted as success",)
        if forgiven
        else ()
    )
    notes += _describe_what_came_before(case)
    exits = {end.rank: end.code for end in case.ranks}
    logs = {end.rank: end.log for end in case.ranks if end.log}
    outside = (case.interrupted, case.store_code) != (None, None) or any(
        (case.supervisor_lost, case.left_behind, case.hung, case.lost_nodes, case.given_up, case.elsewhere)
    )
    if not outside and all(end.code == 0 for end in case.ranks):
        verdict = judge_silent(case) or Verdict(kind="ok", message="all ranks finished")
        return replace(verdict, exits=exits, logs=logs, notes=notes + verdict.notes)
    if is_requeue(case) and not case.elsewhere:
        verdict = judge_requeue(case)
        return replace(verdict, notes=notes + verdict.notes)
    found = _judge_by_finding(case)
    if found is not None:
        innocent = tuple(_casualty(end, None) for end in case.ranks if end.rank not in found.culprits)
        return replace(found, exits=exits, logs=logs, notes=notes + found.notes, casualties=innocent)
    cause = _find_cause(case)
    first = cause.culprits[0] if cause.culprits else None
    blamed = {end.rank for end in cause.culprits}
    return Verdict(
        kind=cause.kind,
        culprits=tuple(sorted(blamed)),
        class_id=cause.class_id,
        where=cause.where,
        waiting=list_waiting(case, blamed),
        message=cause.message,
        reason=cause.reason,
        fix=cause.fix,
        traceback=first.fault.callstack if first and first.fault else "",
        last_words=first.last_words if first else case.store_words if case.store_code is not None else "",
        casualties=tuple(_casualty(end, first) for end in case.ranks if end.rank not in blamed),
        exits=exits,
        logs=logs,
        exit_code=_exit_code(case, cause),
        notes=notes + (list_beside(case, blamed) if case.interrupted is None else ()),
        stopped_by=None if case.interrupted is None else name_signal(case.interrupted),
        first=first.rank if first else None,
    )


def _judge_by_finding(case: Case) -> Verdict | None:
    """Return what was seen of the ranks while they ran, where no rank has an error of its own."""
    if case.interrupted is not None or case.supervisor_lost or case.lost_nodes or case.given_up:
        return None
    left = sorted((end for end in case.ranks if _left_in_error(end)), key=_moment)
    if case.hung:
        # A rank that went by our signal a moment before we had written it down did not fail.
        left = [end for end in left if end.fault or end.code not in {-KILL_SIGNAL, -signal.SIGTERM}]
    if any(_is_own(case, end) for end in left):
        return None
    if left and any(end.problem for end in case.ranks):
        return None
    # Who lost a peer after the hang had been decided lost the one that we stopped first.
    if case.hung and all(find_blame(end) == "peer" for end in left):
        return judge_hung(case)
    mismatch = find_mismatch(case) or find_size_error(case, left)
    if mismatch is None and left and all(find_blame(end) == "peer" for end in left):
        mismatch = find_early_exits_here(case)
    return None if mismatch is None else judge_mismatch(case, mismatch, left)


def _is_own(case: Case, end: RankEnd) -> bool:
    """Tell whether a rank failed by itself: DDP calls models different, too, when it compared them with what was no model."""
    meaning = find_meaning_of(end)
    if meaning is not None and meaning.class_id == "D12" and has_met_model_check(case):
        return False
    if meaning is None and is_wordless_abort(end) and was_in_mismatch(case, end.rank):
        return False
    return meaning is None or meaning.blame == "own"


def _describe_what_came_before(case: Case) -> tuple[str, ...]:
    """Return what was wrong already when the user ended the job: a failure, or ranks that hung."""
    if case.interrupted is None or is_requeue(case) or _failed_on_notice(case):
        return ()
    if not any(_left_in_error(end) for end in case.ranks):
        return list_earlier(case)
    return (f"before that: {_find_cause(replace(case, interrupted=None)).message}",)


def _find_cause(case: Case) -> _Cause:  # noqa: PLR0911 - one for each cause, the strongest first
    if case.interrupted is not None and not _failed_on_notice(case):
        name = name_signal(case.interrupted) + (" (Ctrl-C)" if case.interrupted == signal.SIGINT else "")
        return _Cause(message=f"the launcher received {name}")
    if case.supervisor_lost:
        return _Cause(
            message="the launcher's own supervisor process was killed, and the kernel killed all ranks with it",
            reason="it was killed by hand, or by the kernel's OOM killer",
        )
    left = sorted((end for end in case.ranks if _left_in_error(end)), key=_moment)
    own = [end for end in left if find_blame(end) in {"own", "mismatch"}]
    if (problem := _judge_problem(case, left, own)) or own:
        return problem or _judge_own(case, own)
    if case.elsewhere:
        return _Cause(message=case.elsewhere)
    if case.lost_nodes or case.given_up:
        return _judge_lost_nodes(case)
    if waited := [end for end in left if find_blame(end) == "timeout"]:
        return _judge_timeout(case, waited)
    if case.store_code is not None:
        return _Cause(
            message="the ranks' store process ended: no new process group could form",
            reason=f"killed by {name_signal(-case.store_code)}" if case.store_code < 0 else "it exited",
        )
    return _judge_lost(case, left)


def _judge_lost_nodes(case: Case) -> _Cause:
    if case.given_up:
        return _Cause(message=f"the other nodes continue without this one: {case.given_up}")
    return _Cause(message="; ".join(one.describe() for one in case.lost_nodes), fix=_LOST_NODE)


def _failed_on_notice(case: Case) -> bool:
    """Tell whether a rank that had a notice, and time to save, failed over it: when one leaves for a requeue, all had it."""
    all_had_it = any(map(leaves_for_requeue, case.ranks))
    return any((end.was_noticed or all_had_it) and _left_in_error(end) for end in case.ranks)


def _left_in_error(end: RankEnd) -> bool:
    if end.left_s is None or leaves_for_requeue(end):
        return False
    return end.fault is not None or end.code not in {0, None}


def _moment(end: RankEnd) -> float:
    return end.left_s if end.left_s is not None else float("inf")


def _judge_own(case: Case, own: Sequence[RankEnd]) -> _Cause:
    first = own[0]
    alike = [end for end in own if end is first or _is_alike(end, first)]
    meaning = find_meaning_of(first)
    who = name_ranks([end.rank for end in alike])
    # Of an exit that says nothing, as by os._exit, the last collective is the only trace.
    is_silent = first.where in {None, first.left_at} and (first.code or 0) > 0 and not first_line(first)
    last = find_last(case, first.rank) if is_silent else None
    left_at = first.left_at if is_silent else None
    if is_silent and left_at is None and case.scene is not None:
        left_at = find_exit_call(case.scene.sources, first.code)
    message_at = None
    if first.where is None and first.code == 1 and case.scene is not None:
        message_at = find_exit_words(case.scene.sources, first_line(first))
    if len(alike) == len(case.ranks) and len(alike) > 1:
        who = f"{_name_alike(case, alike)}, rank {first.rank} first"
    return _Cause(
        kind="mismatch" if meaning and meaning.blame == "mismatch" else "failure",
        culprits=tuple(alike),
        message=f"{who}: {_describe_end(first)}"
        + (f"; its last collective was {name_op(last)} at {shorten(last.site)}" if last else ""),
        class_id=meaning.class_id if meaning else _class_of_exit(first),
        where=message_at or left_at or (last.site if last else first.where),
        fix=(_EXPIRED if first.expired else "")
        or find_file_fix(first_line(first), first.where or "", is_on_all=len(alike) == len(case.ranks))
        or find_fix(first.error, meaning)
        or (
            _EXIT_CALL.format(at=shorten(left_at), left="left" if first.left_at else "may have left") if left_at else ""
        )
        or (_SILENT_EXIT.format(at=shorten(last.site)) if last else ""),
        # How a rank ended that we stopped while it still dealt with its error tells nothing.
        reason=""
        if first.code is None or first.stopped_s is not None or first.expired
        else explain_exit(first.code, case, first),
    )


def _is_handshake(end: RankEnd) -> bool:
    return end.fault is not None and end.fault.message.startswith("rankwise.HandshakeError: ")


def _judge_problem(case: Case, left: Sequence[RankEnd], own: Sequence[RankEnd]) -> _Cause | None:
    """Ranks lost each other, and one had found that they did not fit together when they were to meet.

    The error of a handshake tells the same of one of them: then only where it is known whom the problem concerns.
    """
    if not left or not all(map(_is_handshake, own)):
        return None
    for finder in case.ranks:
        problem = finder.problem
        if problem is None or (own and not problem.local_ranks):
            continue
        meaning = find_meaning(f"rankwise.HandshakeError: {problem.text}")
        return _Cause(
            culprits=tuple(end for end in case.ranks if end.local_rank in problem.local_ranks) or (finder,),
            message=problem.text,
            class_id=meaning.class_id if meaning else None,
            where=left[0].where,
            fix=problem.fix,
        )
    return None


def _name_alike(case: Case, alike: Sequence[RankEnd]) -> str:
    if len(alike) < len(case.ranks) or len(alike) < 2:
        return name_ranks(sorted(end.rank for end in alike))
    return "both ranks" if len(alike) == 2 else f"all {len(alike)} ranks"


def _describe_end(end: RankEnd) -> str:
    found = first_line(end)
    if end.fault is not None or end.code is None:
        return found
    if end.code < 0:
        by = f"killed by {name_signal(-end.code)}"
        if end.expired:
            return f"{by} by torch's watchdog, as {end.expired} expired"
        return f"{by}: {found}" if end.code == -6 and found else by
    return found or f"ended with exit code {end.code}"


def _is_alike(end: RankEnd, first: RankEnd) -> bool:
    """Whether two ranks failed in the same way at the same place."""
    if end.fault is None or first.fault is None:
        return end.fault is first.fault and end.code == first.code and end.where == first.where
    same_kind = end.fault.message.split(":")[0] == first.fault.message.split(":")[0]
    return same_kind and end.fault.where == first.fault.where


def _class_of_exit(end: RankEnd) -> str | None:
    if end.stopped_s is not None:
        return None
    if end.code == -7:
        return "X16"
    return "R3" if end.code is not None and end.code < 0 else None


def _judge_timeout(case: Case, waited: Sequence[RankEnd]) -> _Cause:
    by_rank = {end.rank: end for end in case.ranks}
    first = next((end for end in waited if find_missing(end.error)), waited[0])
    missing, meaning = find_missing(first.error), find_meaning_of(first)
    class_id = meaning.class_id if meaning else None
    fix = find_fix(first.error, meaning)
    if missing and min(missing) >= case.world_size:
        alike = [end for end in waited if min(find_missing(end.error) or (0,)) >= case.world_size]
        return _Cause(
            kind="hang",
            culprits=tuple(alike),
            class_id="I12",
            where=first.where,
            message=f"{_name_alike(case, alike)} waited for rank {missing[0]}, but this job has "
            f"{case.world_size} rank{'s' * (case.world_size > 1)}: the script set another world size",
            fix="don't set WORLD_SIZE in the script and don't pass world_size=: the launcher gives every rank the same value",
        )
    culprits = [by_rank[rank] for rank in missing if rank in by_rank]
    if missing and not culprits:
        return _Cause(
            kind="hang",
            where=first.where,
            message=f"rank {first.rank} timed out waiting for {name_ranks(missing)} of another node: {first_line(first)}",
            fix="see that node's report",
        )
    if not culprits:
        gone = find_silent_exits(case, first)
        if gone:
            return _judge_lost(case, waited)
        quiet = [end for end in case.ranks if end not in waited and end.code != 0]
        # Those that were in no collective when the others gave up; if all were, all that did not complain.
        culprits = [end for end in quiet if end.stack is None or end.stack.op is None] or quiet
    if not culprits:
        return _Cause(kind="hang", culprits=(first,), where=first.where, message=say(first), fix=fix)
    if class_id is None and all(_is_in_init(end) for end in culprits):
        class_id, fix = (
            "L12",
            "both sides were in init_process_group but never connected: the script changes RANK, "
            "WORLD_SIZE, MASTER_ADDR or MASTER_PORT on some ranks",
        )
    if class_id is None and are_at_work_alone(case, [end.rank for end in culprits]):
        class_id, fix = (
            "X14",
            "do what only some ranks have to do before init_process_group, or give it a longer timeout: "
            "the others wait for it from there on",
        )
    place = culprits[0].where or first.where
    doing = f", which {'was' if len(culprits) == 1 else 'were'} at {place}" if place else ""
    return _Cause(
        kind="hang",
        culprits=tuple(culprits),
        class_id=class_id,
        where=place,
        message=f"rank {first.rank} timed out waiting for {name_ranks([end.rank for end in culprits])}{doing}: {first_line(first)}",
        fix=fix,
    )


def _is_in_init(end: RankEnd) -> bool:
    frames = end.stack.frames if end.stack else ()
    return any(frame.function in {"init_process_group", "_env_rendezvous_handler"} for frame in frames)


def _judge_lost(case: Case, left: Sequence[RankEnd]) -> _Cause:
    """All that failed only lost a peer: it was one that left without an error, or one of another node."""
    felt = left[0] if left else next((end for end in case.ranks if end.stack is not None), None)
    gone = find_silent_exits(case, felt)
    place = felt.where if felt else None
    if gone and felt is not None:
        needed = f"rank {felt.rank} still needed it{f' at {place}' if place else ''}"
        return _Cause(
            kind="hang" if case.left_behind else "failure",
            culprits=tuple(gone),
            where=place,
            message=f"{name_ranks([end.rank for end in gone])} ended with exit code 0 while others were still running: {needed}",
            fix="make all ranks run the same number of steps and collectives, and end together "
            "(a barrier before destroy_process_group)",
        )
    if felt is None:
        return _Cause(message="the job ended, but no rank failed first")
    closed = [end for end in case.ranks if end not in left and has_closed(case, end.rank)]
    if closed:
        return _Cause(
            culprits=tuple(closed),
            where=place,
            message=f"{name_ranks([end.rank for end in closed])} destroyed the process group while rank {felt.rank} still needed it"
            + (f" at {place}" if place else ""),
            fix="make all ranks run the same number of steps and collectives, with a barrier before destroy_process_group",
        )
    if felt.fault is not None and "connectFullMesh" in felt.fault.message and "file://" in felt.fault.callstack:
        return _Cause(
            culprits=(felt,),
            class_id="I13",
            where=place,
            message=f"rank {felt.rank} found stale addresses of an earlier run in the file of init_method: {first_line(felt)}",
            fix="use a new file for each run, or leave init_method out, which a launcher makes unnecessary",
        )
    elsewhere = "; the first cause is on another node" if case.num_nodes > 1 else ""
    return _Cause(
        culprits=() if case.num_nodes > 1 else (felt,),
        where=place,
        message=f"rank {felt.rank} lost a peer{elsewhere}: {first_line(felt)}",
    )


def _casualty(end: RankEnd, first: RankEnd | None) -> Casualty:
    fate: Fate
    if leaves_for_requeue(end):
        fate = "left for a requeue"
    elif end.left_s is None or end.code is None:
        fate = "terminated by rankwise"
    elif not _left_in_error(end):
        fate = "finished"
    elif find_blame(end) == "peer":
        fate = "lost its peer"
    elif find_blame(end) == "timeout":
        fate = "timed out"
    elif first is not None and _is_alike(end, first):
        fate = "failed the same way"
    else:
        fate = "failed later"
    in_error = fate in {"failed later", "timed out"}
    return Casualty(rank=end.rank, fate=fate, detail=first_line(end) if in_error else "")


def _find_outer_code(case: Case) -> int | None:
    """Return the exit code of what came from outside; None if nothing did."""
    if case.interrupted is not None:
        return 128 + case.interrupted
    if case.elsewhere:
        return case.elsewhere_code
    # No fault of the script: whoever schedules the job may start it again, unless those that are lost can go on alone.
    return REQUEUE if 0 < len(case.lost_nodes) < case.min_nodes and not case.given_up else None


def _exit_code(case: Case, cause: _Cause) -> int:
    """Return the first cause's exit code; 128 + N for a signal, as shells do; 75 where only nodes were lost."""
    outer = None if cause.culprits else _find_outer_code(case)
    if outer is not None:
        return outer
    if cause.culprits and cause.culprits[0].fault is not None and cause.culprits[0].stopped_s is not None:
        return 1  # it had raised, and we stopped it before it could say so by its own exit code
    for end in (*cause.culprits, *sorted(case.ranks, key=_moment)):
        if end.code and end.stopped_s is None and not leaves_for_requeue(end):
            # The script's own 75 asks for nothing: no scheduler is to start it again for that.
            return 1 if end.code == REQUEUE else end.code if end.code > 0 else 128 - end.code
    if case.store_code:
        return case.store_code if case.store_code > 0 else 128 - case.store_code
    return 137 if case.supervisor_lost else 1
