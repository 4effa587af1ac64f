"""Ranks wait for others that live and do something else. It may be right: the facts are told, and the fault only if they show it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.base.rank_names import name_ranks
from rankwise.verdict.explain import are_alone, explain_absence, list_worker_places
from rankwise.verdict.wording import shorten, verb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.verdict.finding import JobFinding
    from rankwise.verdict.scene_view import Absence, SceneView

RULE = "kept_waiting"


def find(view: SceneView) -> Iterator[JobFinding]:
    """Yield the findings of it."""
    for absence in view.absences:
        is_slow = view.may_any_come(absence)
        class_id, fix = _judge_slow(view, absence) if is_slow else _judge(view, absence)
        culprits = absence.missing if is_slow else ()
        yield explain_absence(view, absence, rule=RULE, class_id=class_id, fix=fix, culprits=culprits)


def _judge_slow(view: SceneView, absence: Absence) -> tuple[str | None, str]:
    """Return class and fix of a wait that may be right: of a class only if it should last for too long."""
    doing = {view.rank_states[rank].doing for rank in absence.missing}
    if doing <= {"busy", "saving", "unknown"} and view.scene.is_whole and are_alone(view, absence.missing):
        who, at = name_ranks(absence.missing), shorten(absence.waiting[0].site)
        return "X14", (
            f"{who} works alone while the others wait at {at}: do it before the job starts, or before init_process_group, "
            "or give that group a longer timeout"
        )
    return None, _fix_slow(view, absence)


def _fix_slow(view: SceneView, absence: Absence) -> str:
    doing = {view.rank_states[rank].doing for rank in absence.missing}
    who, at = name_ranks(absence.missing), shorten(absence.waiting[0].site)
    if "debugged" in doing:
        return f"continue in the debugger of {who}: the others wait for it"
    if "compiling" in doing:
        return "the first compilation takes long: let it finish, or compile on all ranks"
    if "loading data" in doing:
        if places := list_worker_places(view.by_rank[rank] for rank in absence.missing):
            return f"check what {' and '.join(places)} waits for (a file, a server, a lock), and give it a timeout"
        return f"give {who} more loader workers or smaller batches; do one-time work before {at}"
    return f"look at what {who} is doing; long work on one rank belongs before {at}, or needs a longer timeout there"


def _judge(view: SceneView, absence: Absence) -> tuple[str | None, str]:
    """Return the class that the script's own lines decide, and what to do."""
    at, who = shorten(absence.waiting[0].site), name_ranks(absence.missing)
    away = [guard for rank in absence.missing for guard in view.source.guards_of(rank)]
    if away and all(any(guard.kind == "except" for guard in view.source.guards_of(rank)) for rank in absence.missing):
        line = next(guard.line for guard in away if guard.kind == "except")
        fix = f"{who} caught an exception at line {line} and did not reach {at}: let it end the rank, or notify the other ranks first"
        return "R1", fix
    # The stages of a pipeline stand under tests of the rank, and are meant to.
    waiting = [one for one in absence.waiting if one.op is None or one.op.flow is None]
    taken = [guard for one in waiting for guard in view.source.guards_of(one.rank) if guard.kind == "if"]
    own = [guard for guard in taken if guard not in away]
    if test := next((guard for guard in own if guard.is_rank_test), None):
        fix = f"move the collective at {at} out of the rank test at line {test.line}: all ranks must call it; only what follows may differ"
        return "C1", fix
    if own and view.scene.is_whole and not any(guard.is_rank_test for guard in away):
        fix = f"the condition at line {own[0].line} holds on some ranks only: let one rank decide, and broadcast the decision before {at}"
        return "C26", fix
    advice = {view.local_waits[rank].advice if rank in view.local_waits else "" for rank in absence.missing}
    if len(advice) == 1 and (found := advice.pop()):
        return None, f"{found}; the others wait at {at}"
    if not waiting:
        return (
            None,
            f"find out why {who} {verb(absence.missing, 'do', 'does')} not continue: each stage waits for its neighbours, so all must run the same steps",
        )
    return (
        None,
        f"find out why {who} did not reach {at}, or why the others did: all ranks of a group must call the same collectives",
    )
