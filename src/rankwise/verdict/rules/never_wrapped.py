"""Each rank trains a model of its own on its share of the data, and nothing was ever averaged: nobody wrapped the model (D7)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.base.rank_names import name_ranks
from rankwise.verdict.finding import JobFinding
from rankwise.verdict.replica_drift import are_carried, explain_drift, find_drifts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.verdict.replica_drift import ReplicaDrift
    from rankwise.verdict.scene_view import SceneView

RULE = "never_wrapped"
#: Weights may be averaged by hand once an epoch, so a job that runs is given that long.
_PATIENCE = 4096


def find(view: SceneView) -> Iterator[JobFinding]:
    """Yield the findings of it: only where all began with the same weights, and share the data by a DistributedSampler."""
    for drift in find_drifts(view.scene, "plain"):
        if _is_meant_as_one(drift):
            yield _make_finding(drift)


def _is_meant_as_one(drift: ReplicaDrift) -> bool:
    return (
        set(drift.by_rank) == set(drift.replica.members)
        and drift.step == 1
        and drift.equal_step == 0
        and 2 * len(drift.places) > len(drift.replica.kinds)
        and len({digest.rates for digest in drift.digests.values()}) == 1
        and (drift.is_over or drift.last_step >= _PATIENCE)
        and not any(evidence.missing for evidence in drift.evidence.values())
        and not are_carried(drift)
    )


def _make_finding(drift: ReplicaDrift) -> JobFinding:
    text = "the ranks began with the same model and share the data, but train separately: no gradient was ever averaged"
    return JobFinding(
        kind="mismatch",
        # Nobody can see whether one model is meant.
        certainty="suspicion",
        rule=RULE,
        culprits=drift.culprits,
        class_id="D7",
        message=f"{text}; {explain_drift(drift)}; that is wrong unless intended (ensembles, weights averaged by files)",
        fix="wrap the model in torch.nn.parallel.DistributedDataParallel before the first step, and call the wrapper in training; if it is intended, RANKWISE_DIGESTS=0 turns this off",
        is_stuck=False,
        key=f"drift of a model of {name_ranks(drift.replica.members)} in no wrapper",
    )
