"""Look at living ranks: who keeps the others waiting, and whose collectives do not correspond."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.doubt import are_ranks_the_launchers, doubt
from rankwise.verdict.rules import (
    absent_from_meeting,
    circle,
    cleanup_collective,
    dead_worker,
    drift,
    fewer_steps,
    forward_on_some,
    gradients_met,
    kept_waiting,
    member_ended,
    never_wrapped,
    other_dtype,
    other_line,
    other_members,
    other_module,
    other_op,
    other_reduction,
    other_root,
    other_shape,
    other_size,
    other_splits,
    split_barrier,
    state_on_some,
    stopped_process,
    swapped_order,
    went_on_without,
    wrapped_on_some,
)
from rankwise.verdict.view import View

if TYPE_CHECKING:
    from rankwise.evidence.facts import Scene
    from rankwise.verdict.sight import Sight

#: Of two rules that see the same cause the first one tells it: what knows more of it comes first.
RULES = (
    dead_worker,
    stopped_process,
    other_members,
    cleanup_collective,
    other_line,
    wrapped_on_some,
    other_module,
    forward_on_some,
    gradients_met,
    state_on_some,
    swapped_order,
    other_op,
    other_root,
    other_reduction,
    other_size,
    other_splits,
    other_dtype,
    other_shape,
    circle,
    absent_from_meeting,
    fewer_steps,
    split_barrier,
    member_ended,
    kept_waiting,
    went_on_without,
    drift,
    never_wrapped,
)


def look(scene: Scene) -> tuple[Sight, ...]:
    """Return what can be told of the ranks at one moment, best first.

    Causes come before their consequences: ranks whose collectives do not correspond before ranks that wait; what is
    proved before what is suspected; what began earlier before what began later. Each cause is told once.

    Args:
        scene: All that is known of the ranks.
    """
    if not are_ranks_the_launchers(scene):
        return ()
    view = View(scene)
    sights: dict[str, Sight] = {}
    for rule in RULES:
        for sight in doubt(rule.find(view), view):
            sights.setdefault(sight.key, sight)
    ordered = sorted(sights.values(), key=_order)
    proofs = [sight for sight in ordered if sight.is_proof and (sight.is_stuck or sight.kind == "hang")]
    return tuple(
        sight
        for sight in ordered
        if sight.is_proof or not any(set(sight.culprits) <= set(proof.culprits) for proof in proofs)
    )


def _order(sight: Sight) -> tuple[bool, bool, bool, bool, float]:
    since = float("inf") if sight.since_s is None else sight.since_s
    return sight.is_drift, sight.kind != "mismatch", not sight.is_proof, not sight.is_stuck, since
