"""The verdict on a run that no launcher of ours has looked at, from what its ranks have left in a folder: while it hangs, and afterwards."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.base.faults import FaultRecord
from rankwise.base.rank_names import name_ranks
from rankwise.verdict.case import Case, Verdict, end_of
from rankwise.verdict.error_origin import find_blame
from rankwise.verdict.finding import Waiting
from rankwise.verdict.first_failure import judge
from rankwise.verdict.judge_scene import NO_PROOF, fold, judge_scene
from rankwise.verdict.rank_state import find_state
from rankwise.verdict.run_rules import look
from rankwise.verdict.wording import shorten, verb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.evidence.reader.offline import OfflineRank, OfflineRun
    from rankwise.verdict.case import RankEnd

_MOST_NAMED = 8
_WITHOUT_A_WORD = "it ended silently: {how}; its launcher's log has the exit code"
_KILLED = "killed (SIGKILL, for example by the OOM killer), or by os._exit or exec"


def judge_offline_run(left: OfflineRun) -> Verdict:
    """Return the verdict on a run; kind "ok" if nothing is wrong with it, as far as it can be seen."""
    hows = {one.how for one in left.ranks}
    found = (*_describe_hows(left.ranks), *_describe_absent(left), *left.notes)
    if hows & {"raised", "crashed", "vanished"} or hows == {"finished"}:
        verdict = judge(_to_case(left))
        casualties = tuple(one for one in verdict.casualties if one.fate != "terminated by rankwise")
        places = fold(left.scene) if hows & {"lives", "unknown"} else ()
        # Exit codes are the launcher's to know: those that the case has are read from the notes.
        return replace(verdict, casualties=casualties, exits={}, notes=(*verdict.notes, *places, *found))
    unmet = _judge_absent(left) if left.absent else None
    return judge_scene(left.scene, found) if unmet is None else replace(unmet, notes=(*unmet.notes, *found))


def _to_case(left: OfflineRun) -> Case:
    """Return the case; where all that failed only lost a peer, it was one of those that have left no end."""
    ends = {one.facts.rank: _to_end(one, left.scene.now_s) for one in left.ranks}
    failed = [end for end in ends.values() if end.fault is not None]
    if failed and all(find_blame(end) == "peer" for end in failed):
        for one in left.ranks:
            if one.how == "unknown":
                ends[one.facts.rank] = _to_end(replace(one, how="vanished"), left.scene.now_s)
    return Case(
        ranks=tuple(ends.values()),
        world_size=left.scene.world_size,
        # Who is not seen may be the cause.
        num_nodes=2 if left.absent else 1,
        scene=left.scene,
    )


def _to_end(one: OfflineRank, now_s: float) -> RankEnd:
    facts, end = one.facts, replace(end_of(one.facts, now_s), crash=one.crash)
    if one.how == "vanished":
        where = facts.left_at or (facts.ops[-1].site if facts.ops else None)
        how = f"by os._exit at {shorten(facts.left_at)}" if facts.left_at else _KILLED
        fault = FaultRecord(message=_WITHOUT_A_WORD.format(how=how), monotonic_s=facts.ended_s, where=where)
        return replace(end, code=None, stopped_s=None, fault=fault)
    return end if facts.code is not None else replace(end, finished_s=None)


def _describe_hows(ranks: Sequence[OfflineRank]) -> list[str]:
    """Return what is known of the ranks' ends that is neither a fault nor a place."""
    words = {
        "terminated": "{was} ended from outside: by SIGTERM, as from the launcher, or by Ctrl-C",
        "unrecorded": "ended without {its} end being recorded (kill -9, os._exit or exec)",
        "unknown": "left no record of an end: {is} running elsewhere, or {was} killed",
    }
    lines = []
    for how, text in words.items():
        numbers = [one.facts.rank for one in ranks if one.how == how and not one.facts.left_at]
        if numbers:
            words_of = {
                "was": verb(numbers, "were", "was"),
                "is": verb(numbers, "are", "is"),
                "its": verb(numbers, "their", "its"),
            }
            lines.append(f"{name_ranks(numbers)} {text.format(**words_of)}")
    places: dict[str, list[int]] = {}
    for one in ranks:
        if one.facts.left_at and one.how in words:
            places.setdefault(shorten(one.facts.left_at), []).append(one.facts.rank)
    return lines + [f"{name_ranks(who)} ended by os._exit at {at}" for at, who in places.items()]


def _describe_absent(left: OfflineRun) -> list[str]:
    if not left.absent:
        return []
    who = left.absent[:_MOST_NAMED]
    more = len(left.absent) - len(who)
    named = name_ranks(who) + (f" and {more} more" if more else "")
    return [
        f"{named} {verb(left.absent, 'have', 'has')} left no evidence: never started, or on a host whose folder was not passed, or without rankwise.watch"
    ]


def _judge_absent(left: OfflineRun) -> Verdict | None:
    """Return the verdict on ranks that wait in init_process_group for one that has left nothing; None if they don't."""
    rank_states = [find_state(facts) for facts in left.scene.ranks]
    waiting = [one for one in rank_states if one.wait == "rendezvous"]
    if not waiting or len(waiting) < len(rank_states) or look(left.scene):
        return None
    ranks = [one.rank for one in waiting]
    gone = name_ranks(left.absent[:_MOST_NAMED])
    return Verdict(
        kind="hang",
        culprits=left.absent,
        class_id="I1",
        waiting=tuple(Waiting(rank=one.rank, where=one.site, op=one.call) for one in waiting),
        message=f"{name_ranks(ranks)} {verb(ranks, 'wait', 'waits')} in init_process_group at {shorten(waiting[0].site)} for {gone}, which {verb(left.absent, 'have', 'has')} left no evidence",
        fix=f"check that {gone} {verb(left.absent, 'were', 'was')} started at all, on every host, with the same MASTER_ADDR and MASTER_PORT",
        exit_code=1,
        notes=(NO_PROOF, *fold(left.scene)),
    )
