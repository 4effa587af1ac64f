"""Look at living ranks: who keeps the others waiting, and whose collectives do not correspond."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.rules import (
    absent_from_rendezvous,
    cleanup_collective,
    dead_worker,
    different_calls,
    drift,
    fewer_steps,
    forward_on_some,
    kept_waiting,
    local_wait,
    member_ended,
    mispaired_calls,
    mispaired_gradients,
    never_wrapped,
    other_members,
    other_module,
    split_barrier,
    state_on_some,
    stopped_process,
    swapped_order,
    wait_cycle,
    went_on_without,
    wrapped_on_some,
)
from rankwise.verdict.scene_view import SceneView
from rankwise.verdict.uncertainty import are_ranks_the_launchers, doubt

if TYPE_CHECKING:
    from rankwise.evidence.reader.scene import Scene
    from rankwise.verdict.finding import JobFinding

#: Of two rules that see the same cause the first one tells it: what knows more of it comes first.
RULES = (
    dead_worker, stopped_process, other_members, cleanup_collective, mispaired_calls, wrapped_on_some,
    other_module, forward_on_some, mispaired_gradients, state_on_some, swapped_order, different_calls, wait_cycle,
    absent_from_rendezvous, fewer_steps, split_barrier, member_ended,
    kept_waiting, local_wait, went_on_without, drift, never_wrapped,
)  # fmt: skip


def look(scene: Scene) -> tuple[JobFinding, ...]:
    """Return what can be told of the ranks at one moment, best first.

    Causes come before their consequences: ranks whose collectives do not correspond before ranks that wait; what is
    proved before what is suspected; what began earlier before what began later. Each cause is told once.
    """
    if not are_ranks_the_launchers(scene):
        return ()
    view = SceneView(scene)
    findings: dict[str, JobFinding] = {}
    for rule in RULES:
        for finding in doubt(rule.find(view), view):
            findings.setdefault(finding.key, finding)
    ordered = sorted(findings.values(), key=_order)
    proofs = [one for one in ordered if one.is_proof and (one.is_stuck or one.kind == "hang")]
    return tuple(
        finding
        for finding in ordered
        if finding.is_proof or not any(set(finding.culprits) <= set(proof.culprits) for proof in proofs)
    )


def _order(finding: JobFinding) -> tuple[bool, bool, bool, bool, float]:
    since = float("inf") if finding.since_s is None else finding.since_s
    return finding.is_drift, finding.kind != "mismatch", not finding.is_proof, not finding.is_stuck, since
