"""Says why two runs diverge, as far as their journals support it, and what to do to find out.

Most of it is no proof: each reason names the fact that speaks for it. The first is the one to look at first. Only where the runs were not
given the same, other weights, batches or rates, the cause is certain, and nothing is guessed beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rankwise.train.comparison.runs import Comparison, Point, Setting
    from rankwise.train.journal import Journal

#: Settings that say what a run writes and shows, not how it learns.
WITHOUT_EFFECT = frozenset(
    ("folder", "log_every", "progress", "evaluate_every", "save_every", "keep", "norms_every", "check_replicas_every",
     "monitor", "mode", "patience", "min_delta", "non_finite", "rankwise")
)  # fmt: skip
#: Settings by which the same sums are added up in another order, or by other kernels.
_ROUNDING = (
    "ranks",
    "precision",
    "dtype",
    "device",
    "gpu",
    "backend",
    "micro_batch",
    "compile",
    "fused",
    "optimizer",
    "torch",
)
#: Differences that are told by the curves themselves, or change sums by rounding only.
_SEEN_OTHERWISE = frozenset(
    ("steps", "epochs", "global_batch", "lr", "ranks", "device", "backend", "torch", "micro_batch")
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why two runs may part.

    Attributes:
        fact: What is known, and what it points to.
        do: What to do about it, or to be sure.
        head: What a headline says of it, where it is a cause beyond doubt; empty elsewhere.
    """

    fact: str
    do: str
    head: str = ""


def explain(comparison: Comparison, a: Journal, b: Journal) -> list[Reason]:
    """Return likely reasons why two runs diverge, the first to look at first; none if they agree.

    Args:
        comparison: Of these two runs.
        a: The first.
        b: The second.
    """
    if comparison.losses.divergence is None:
        return []
    differing = {one.name: one for one in comparison.settings if one.name not in WITHOUT_EFFECT}
    found: list[Reason] = [*_blame_model(comparison, differing), *_blame_sizes(comparison, differing)]
    if any(one.head for one in found):
        # Nothing else is needed to explain it.
        return [*sorted(found, key=lambda one: not one.head), *_blame_overflow(comparison)]
    match comparison.manner:
        case "slowly":
            found += [*_blame_rounding(differing), *_blame_parameter(comparison)]
        case "at once":
            found = found or [*_blame_beginning(comparison, differing), *_blame_batchnorm(a, b, differing)]
        case "suddenly":
            found += [*_blame_overflow(comparison)] or [*_blame_moment(comparison, a, b)]
        case "equal" | "within":  # and yet diverged: no such comparison is made
            pass
    return [*found, *_blame_settings(comparison, differing, found)]


def _show(setting: Setting) -> str:
    return f"{setting.name.replace('_', ' ')} {setting.a} and {setting.b}"


def _blame_model(comparison: Comparison, differing: dict[str, Setting]) -> Iterable[Reason]:
    weights = next((one for one in comparison.weights if not one.are_equal), None)
    if weights is None:
        return
    if weights.only_a or weights.only_b:
        yield Reason(
            fact=f"the models are not the same: {len(weights.only_a)} parameters are in a only, {len(weights.only_b)} in b only",
            do="compare runs of one model, or compare only what they have in common",
            head="the models are not the same",
        )
    if weights.differing and comparison.losses.divergence and weights.step >= comparison.losses.divergence.step:
        return  # they differ because the runs had diverged before
    if weights.differing and weights.step == 0:
        seed = differing.get("seed")
        drawn = f", as the seeds do ({seed.a} and {seed.b})" if seed else ""
        yield Reason(
            fact=f"the initial weights differ{drawn}",
            do="call torch.manual_seed with one number before the model is made, or start both from one checkpoint",
            head="the initial weights differ",
        )
    elif weights.differing:
        yield Reason(
            fact=f"the weights with which both resumed after step {weights.step} differ",
            do="resume both from the same checkpoint",
            head=f"the weights after step {weights.step}, where both resumed, differ",
        )


def _blame_sizes(comparison: Comparison, differing: dict[str, Setting]) -> Iterable[Reason]:
    batch = differing.get("global_batch")
    if batch is not None:
        yield Reason(
            fact=f"a step of a has {batch.a} samples and one of b has {batch.b}: these are two trainings, and step n of one is not step n of the other",
            do="give both the same global_batch; it holds for all ranks together",
            head=f"the global batch is {batch.a} in a, and {batch.b} in b",
        )
    rates = comparison.lrs.divergence if comparison.lrs else None
    at = comparison.losses.divergence
    if rates is not None and at is not None and rates.step < at.step:  # a step's loss is taken before its update
        yield Reason(
            fact=f"the learning rates differ from step {rates.step} on: {rates.a:.6g} and {rates.b:.6g}",
            do="give both the same rate and schedule; a schedule that counts steps of one rank depends on the number of ranks",
            head="" if _differ_by(comparison, rates.step) else f"the learning rates differ from step {rates.step} on",
        )


def _differ_by(comparison: Comparison, step: int) -> bool:
    """Tell whether the losses differ at a step or before it, by more than rounding: then what changes after it is not the cause."""
    unequal = comparison.losses.unequal
    return unequal is not None and unequal.step <= step and unequal.difference > comparison.rounding


def _blame_rounding(differing: dict[str, Setting]) -> Iterable[Reason]:
    causes = [_show(differing[name]) for name in _ROUNDING if name in differing]
    why = (
        f"with {', '.join(causes)} the same sums are added in another order"
        if causes
        else "nothing in the journals would change the order of sums, so kernels that are not deterministic may be the cause"
    )
    yield Reason(
        fact=f"the difference begins as small as rounding and grows step by step: {why}",
        do="train both in float64 for some steps: what is only rounding stays below 1e-9 there, and what is not shows",
    )


def _blame_parameter(comparison: Comparison) -> Iterable[Reason]:
    norms, at = comparison.norms, comparison.losses.divergence
    if norms is not None and at is not None and norms.divergence_step is not None and norms.divergence_step < at.step:
        first = norms.diverged[0]
        yield Reason(
            fact=f"at step {norms.divergence_step}, before the losses diverge, the norm of {first.name} differs by {first.difference:.2g} (more than that of any other parameter): it may begin there",
            do="look at what is special about it: its optimizer group, frozen or not, used by some ranks only; a parameter that began with zeros may differ so by rounding too",
        )


def _blame_beginning(comparison: Comparison, differing: dict[str, Setting]) -> Iterable[Reason]:
    weights = next((one for one in comparison.weights if one.step == comparison.losses.first.step - 1), None)
    known = "though the weights are equal to the bit" if weights else "and whether the weights do is not known"
    seeds = [_show(differing[name]) for name in ("seed", "data_seed", "order", "num_samples") if name in differing]
    if seeds:
        yield Reason(
            fact=f"the losses differ at the first common step, {known}; what differs is {', '.join(seeds)}",
            do="give both the same, so that they see the same samples in the same order",
        )
        return
    yield Reason(
        fact=f"the losses differ at the first common step, {known}: it may be the samples, or random numbers in the model such as dropout, or the loss function",
        do="compare the first batches; set dropout to 0 in both for some steps, or use rankwise.train.GlobalDropout, which is the same at any number of ranks",
    )


def _blame_batchnorm(a: Journal, b: Journal, differing: dict[str, Setting]) -> Iterable[Reason]:
    is_synchronised = all(one.starts[-1].started.settings.get("sync_batchnorm") for one in (a, b))
    if "ranks" in differing and not is_synchronised:
        yield Reason(
            fact=f"with {_show(differing['ranks'])}, a BatchNorm sees other samples at a time, if the model has one and it is not synchronised",
            do="train both with sync_batchnorm=True",
        )


def _find_moment(comparison: Comparison) -> Point:
    losses = comparison.losses
    at = losses.unequal if losses.unequal and losses.unequal.difference > comparison.rounding else losses.divergence
    assert at is not None  # noqa: S101 - they have diverged
    return at


def _blame_overflow(comparison: Comparison) -> Iterable[Reason]:
    at = _find_moment(comparison)
    if math.isfinite(at.a) != math.isfinite(at.b):
        who, value = ("a", at.a) if math.isfinite(at.b) else ("b", at.b)
        yield Reason(
            fact=f"the loss of {who} is {value:g} at step {at.step}, and that of the other is not",
            do=f"look at step {at.step} in {who}: its batch, the gradient's norm before it, the range of fp16 if that is its precision",
        )


def _blame_moment(comparison: Comparison, a: Journal, b: Journal) -> Iterable[Reason]:
    losses, at = comparison.losses, _find_moment(comparison)
    again = [(name, step) for name, run in (("a", a), ("b", b)) if (step := _resumed_before(run, at.step))]
    for name, step in again:
        yield Reason(
            fact=f"{name} was started again after step {step}, and they diverge at step {at.step}",
            do="look for what is not among the parts of its checkpoint: scheduler, loader, scaler; the random generators of ranks are reseeded at another number of ranks",
        )
    if again:
        return
    if at.step == losses.first.step + 1:
        yield Reason(
            fact=f"step {losses.first.step} is equal and step {at.step} is not: the update between them differs{_tell_gradient(comparison, at.step - 1)}",
            do="compare optimizer, clipping, and how gradients are averaged (accumulation, unused or frozen parameters)",
        )
        return
    rest = "equal" if at is losses.unequal else "equal but for rounding"
    yield Reason(
        fact=f"they are {rest} up to step {at.step - 1}; step {at.step} is another step in one of them: other samples, another seed from there on, a step left out, or an error in memory",
        do=f"let both stop at step {at.step} and compare its batch and its gradients",
    )


def _resumed_before(run: Journal, step: int, within: int = 2) -> int:
    """Return after which step a run was started again, if that was just before a step; else 0."""
    found = [one.started.step for one in run.starts[1:] if 0 < step - one.started.step <= within]
    return found[-1] if found else 0


def _tell_gradient(comparison: Comparison, step: int) -> str:
    gradient = comparison.grad_norms
    if gradient is None or gradient.first.step > step:
        return ""
    if gradient.divergence and gradient.divergence.step <= step:
        return (
            f", and so does the gradient before it (norms {gradient.divergence.a:.6g} and {gradient.divergence.b:.6g})"
        )
    return ", though the gradient's norm does not"


def _blame_settings(comparison: Comparison, differing: dict[str, Setting], found: list[Reason]) -> Iterable[Reason]:
    if comparison.manner == "slowly":
        return
    rest = [_show(one) for name, one in differing.items() if name not in _SEEN_OTHERWISE]
    rest = [text for text in rest if not any(text in reason.fact for reason in found)]
    if rest:
        yield Reason(fact=f"these settings differ as well: {', '.join(rest)}", do="make them equal one by one")
