"""Ranks wait in init_process_group, or in new_group, for one that does not come (I1, C10), or for a store that nobody serves (I2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.base.rank_names import name_ranks
from rankwise.verdict.explain import explain_absence
from rankwise.verdict.finding import JobFinding
from rankwise.verdict.rank_state import list_calls
from rankwise.verdict.scene_view import Absence
from rankwise.verdict.wording import shorten, verb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.verdict.scene_view import SceneView

RULE = "absent_from_rendezvous"
_INIT = "let all ranks reach init_process_group (the others do at {at}): what takes long, or may fail, on one rank belongs after it"
#: The function of torch that makes a connection to the store.
_CONNECT = "_create_c10d_store"
_NEW_GROUP = "new_group is a collective of all ranks: let all of them call it at {at}, members or not"
_STORE = "leave out init_method=, rank= and world_size=, and don't set MASTER_ADDR or MASTER_PORT: the launcher serves the store where these variables say"


def find(view: SceneView) -> Iterator[JobFinding]:
    """Yield the findings of it; none where not all ranks can be seen: who is missed may be on another node."""
    if not view.scene.is_whole:
        return
    for has_joined in (False, True):
        known = [one for one in view.rank_states.values() if view.has_joined(one.rank) == has_joined]
        waiting = tuple(one for one in known if one.wait == "rendezvous")
        missing = tuple(
            one.rank
            for one in known
            if view.is_placed(one.rank) and (one.wait != "rendezvous" if has_joined else one.wait is None)
        )
        if not waiting or not missing:
            continue
        absence = Absence(op=None, sequence=None, waiting=waiting, missing=missing, is_known=True)
        class_id, fix = ("C10", _NEW_GROUP) if has_joined else ("I1", _INIT)
        yield explain_absence(
            view, absence, rule=RULE, class_id=None if view.may_any_come(absence) else class_id,
            culprits=() if has_joined else missing, fix=fix.format(at=shorten(waiting[0].site)),
            certainty="proof" if _is_proved(view, absence, has_joined=has_joined) else "suspicion",
        )  # fmt: skip
    yield from _find_unserved(view)


def _find_unserved(view: SceneView) -> Iterator[JobFinding]:
    """Yield the ranks if all of them look for a store, and none serves one: their launcher does, elsewhere."""
    if not view.scene.has_agent_store or not all(map(view.is_settled, view.rank_states)):
        return
    stacks = {one.rank: view.by_rank[one.rank].stack for one in view.rank_states.values() if one.wait == "rendezvous"}
    seeking = tuple(
        rank
        for rank, stack in stacks.items()
        if stack and any(frame.function == _CONNECT for frame in list_calls(stack))
    )
    if seeking and len(seeking) == len(view.rank_states):
        at = view.rank_states[seeking[0]].site
        yield JobFinding(
            kind="hang", certainty="suspicion", rule=RULE, culprits=seeking, class_id="I2", where=at, is_stuck=False, fix=_STORE,
            message=f"{name_ranks(seeking)} {verb(seeking, 'look', 'looks')} for the store in init_process_group at {shorten(at)}, and nothing answers there",
            key=f"unserved {seeking}", since_s=view.since([view.rank_states[rank] for rank in seeking]),
        )  # fmt: skip


def _is_proved(view: SceneView, absence: Absence, *, has_joined: bool) -> bool:
    have_ended = {rank for rank in absence.missing if view.by_rank[rank].state == "ended"}
    here = {one.rank for one in absence.waiting}
    if not has_joined:
        return len(have_ended) == len(absence.missing) and all(map(view.is_settled, here))
    # Who has ended does not come; nor does who waits in a collective for those that wait for it here.
    return bool(have_ended) or any(
        view.awaited.get(rank, frozenset()) & here and view.is_settled(rank) for rank in absence.missing
    )
