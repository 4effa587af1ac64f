"""Replicas of a model in DistributedDataParallel that have diverged: its gradients, or its state, are not shared (D7-D10, D23, D26)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.base.rank_names import name_ranks
from rankwise.verdict.finding import JobFinding
from rankwise.verdict.replica_drift import (
    are_carried,
    explain_drift,
    find_drifts,
    have_averaged,
    is_beyond_rounding,
)
from rankwise.verdict.wording import is_gradient, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.verdict.replica_drift import ReplicaDrift
    from rankwise.verdict.scene_view import SceneView

RULE = "drift"
#: Replicas may be averaged by hand every so many steps. After as many without it, that is not likely any more.
_PATIENCE = 512
#: What the wrapper does not know of, by the letter of its state.
_UNKNOWN = {
    "a": ("D8", "added or replaced after the model had been wrapped",
          "add all layers to the model before it is wrapped{wrapped}, or wrap it again after they were changed"),
    "u": ("D9", "frozen when the model was wrapped, and unfrozen later",
          "unfreeze before wrapping{wrapped}, or wrap the model again after its layers were unfrozen"),
    "m": ("D10", "moved to another device or dtype after the model had been wrapped",
          "move the model to its device and dtype before it is wrapped{wrapped}"),
}  # fmt: skip


_Cause = tuple[str | None, str, str]
#: It is, or may be, meant.
_LEGAL: _Cause = (None, "", "")


def find(view: SceneView) -> Iterator[JobFinding]:
    """Yield the findings of it: not of models whose ranks average their weights themselves."""
    for drift in find_drifts(view.scene, "ddp"):
        cause = (
            _find_unknown(drift)
            or _find_loaded(drift)
            or _find_bypassed(view, drift)
            or _find_unsynced(view, drift)
            or _find_rates(drift)
            or _find_none(view, drift)
        )
        if cause != _LEGAL:
            yield _make_finding(drift, *cause)


def _find_unknown(drift: ReplicaDrift) -> _Cause | None:
    """Find parameters that the wrapper does not know as they are, and no others."""
    letters = [_find_letter(drift, place) for place in drift.places]
    if "k" in letters:
        return None
    class_id, text, fix = _UNKNOWN[max(_UNKNOWN, key=letters.count)]
    they = "they were" if len(letters) > 1 else "it was"
    return (
        class_id,
        f"{they} {text}, so the gradients of {'those' if len(letters) > 1 else 'it'} are not averaged",
        fix.format(wrapped=_wrapped(drift)),
    )


def _find_letter(drift: ReplicaDrift, place: int) -> str:
    letters = {replica.states[place : place + 1] for replica in drift.by_rank.values()}
    return next((letter for letter in "amu" if letter in letters), "k")


def _find_loaded(drift: ReplicaDrift) -> _Cause | None:
    """Find a model that was not the same before its first step: the wrapper had made it so."""
    if drift.step > 0:
        return None
    return (
        "D26",
        "the model was changed on some ranks after it had been wrapped: state loaded there only, or differently",
        f"load state before the model is wrapped{_wrapped(drift)}, or on all ranks from the same file",
    )


def _find_bypassed(view: SceneView, drift: ReplicaDrift) -> _Cause | None:
    """Find a wrapper that was never called, or never averaged anything."""
    was_called = any(digest.forwarded for digest in drift.digests.values())
    if was_called and (_is_unsynced(drift) or _have_averaged(view, drift) is not False):
        return None
    if not _is_sure(drift):
        return _LEGAL
    return (
        "D7",
        "it is trained without its wrapper, and no gradient was averaged",
        f"in training call what DistributedDataParallel returned{_wrapped(drift)}, and not its .module or a method of that: only the wrapper's forward "
        "prepares the averaging",
    )  # fmt: skip


def _have_averaged(view: SceneView, drift: ReplicaDrift) -> bool | None:
    """Tell whether buckets of gradients were sent; None if that can't be known."""
    found = have_averaged(drift)
    if found is not None:
        return found
    if any(is_gradient(op) for evidence in drift.evidence.values() for op in evidence.ops):
        return True
    is_known = all(view.is_fresh(rank) and not evidence.missing for rank, evidence in drift.evidence.items())
    return False if is_known else None


def _find_unsynced(view: SceneView, drift: ReplicaDrift) -> _Cause | None:
    """Find a model all of whose forwards were made under no_sync."""
    if not _is_unsynced(drift) or _have_averaged(view, drift):
        return None
    if not _is_sure(drift):
        return _LEGAL
    return (
        "D23",
        "the optimizer steps on gradients from no_sync(), which are never averaged",
        "leave no_sync() for forward and backward of the last micro-batch before each step",
    )


def _is_unsynced(drift: ReplicaDrift) -> bool:
    return any(digest.forwarded and not digest.synced for digest in drift.digests.values())


def _find_rates(drift: ReplicaDrift) -> _Cause | None:
    """Find learning rates that differ."""
    held: dict[tuple[float, ...], list[int]] = {}
    for rank, digest in drift.digests.items():
        held.setdefault(digest.rates, []).append(rank)
    if len(held) < 2:
        return None
    text = "; ".join(
        f"{', '.join(f'{rate:g}' for rate in rates[:3])} on {name_ranks(tuple(ranks))}"
        for rates, ranks in sorted(held.items(), key=lambda one: one[1])[:3]
    )
    return (
        None,
        f"their learning rates differ: {text}",
        "step the scheduler on all ranks, and pass one that depends on a loss (ReduceLROnPlateau) the mean over the ranks",
    )


def _find_none(view: SceneView, drift: ReplicaDrift) -> _Cause:
    is_meant = _is_unsynced(drift) and not _is_sure(drift)
    if is_meant or not is_beyond_rounding(drift) or are_carried(drift):
        return _LEGAL
    averaged = "their gradients were averaged, so " if _have_averaged(view, drift) else ""
    return (
        None,
        f"{averaged}something else changes them: the optimizer's state, or what is done to gradients or weights on some ranks only",
        "look for what differs between ranks from that step on: loading, clipping, noise or resets under a test of the rank or of its own loss",
    )


def _is_sure(drift: ReplicaDrift) -> bool:
    """Tell whether nobody averages the model by hand: nothing was sent that is as large, for long or to the end."""
    return (drift.is_over or drift.last_step >= _PATIENCE) and not are_carried(drift)


def _wrapped(drift: ReplicaDrift) -> str:
    return f" at {shorten(drift.replica.site)}" if drift.replica.site else ""


def _make_finding(drift: ReplicaDrift, class_id: str | None, cause: str, fix: str) -> JobFinding:
    replica = drift.replica
    sofar = "" if drift.is_proof else ", as far as can be seen" if drift.is_over else " so far"
    return JobFinding(
        kind="mismatch",
        # Only what the job has reached is certain: as long as it runs, weights may be averaged or restored.
        certainty="proof" if drift.is_proof else "suspicion",
        rule=RULE,
        culprits=drift.culprits,
        class_id=class_id,
        where=replica.site or None,
        message=f"the replicas of the model wrapped{_wrapped(drift)} have diverged{sofar}: {explain_drift(drift)}; {cause}",
        fix=fix,
        is_stuck=False,
        key=f"drift of model {replica.model} of {name_ranks(replica.members)}",
    )
