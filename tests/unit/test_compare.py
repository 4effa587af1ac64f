"""Two journals compared: where runs part, in which manner, and in what else they differ."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings, strategies as st

from journals import make_losses, write_run
from rankwise.base.errors import UsageError
from rankwise.train.comparison.parameters import relative_difference, strip_all, strip_wrappers
from rankwise.train.comparison.runs import compare
from rankwise.train.journal import read_journal

if TYPE_CHECKING:
    from pathlib import Path

    from rankwise.train.comparison.runs import Comparison

LOSSES = make_losses(100)


def compare_runs(
    folder: Path,
    a: list[float],
    b: list[float],
    *,
    tolerance: float | None = None,
    of_a: Any = None,
    of_b: Any = None,
) -> Comparison:
    """Write two journals and compare them."""
    runs = [write_run(folder / name, losses, **(more or {})) for name, losses, more in (("a", a, of_a), ("b", b, of_b))]  # fmt: skip
    return compare(*map(read_journal, runs), tolerance=tolerance)


def drift(losses: list[float], *, rounding: float, double_every: float, begin: int = 0) -> list[float]:
    """Return losses that go away from others as rounding does: step by step, a bit up and a bit down."""
    return [
        loss if step < begin else loss * (1 + (-1) ** step * rounding * 2 ** ((step - begin) / double_every))
        for step, loss in enumerate(losses)
    ]


# ----------------------------------------------------------------- manners


def test_equal_runs_agree_to_the_bit(tmp_path: Path) -> None:
    """Losses that are the same numbers, NaN at the same step among them, are equal at any tolerance."""
    losses = [*LOSSES[:50], math.nan, math.inf, *LOSSES[52:]]
    found = compare_runs(tmp_path, losses, losses, tolerance=0.0)
    assert (found.manner, found.agree, found.losses.unequal, found.losses.num_common) == (
        "equal",
        True,
        None,
        100,
    )


def test_differences_within_the_tolerance_agree(tmp_path: Path) -> None:
    """What stays below the tolerance is agreement, with the largest difference and its step."""
    found = compare_runs(tmp_path, LOSSES, [*LOSSES[:70], LOSSES[70] * (1 + 5e-5), *LOSSES[71:]])
    assert (found.manner, found.agree, found.tolerance) == ("within", True, 1e-4)
    assert found.losses.largest.step == 71
    assert math.isclose(found.losses.largest.difference, 5e-5, rel_tol=1e-3)


def test_rounding_that_grows_is_slow(tmp_path: Path) -> None:
    """A difference that begins at 1e-7 and doubles every five steps parts slowly, at the first step above the tolerance."""
    found = compare_runs(tmp_path, LOSSES, drift(LOSSES, rounding=1e-7, double_every=5.0, begin=9))
    assert (found.manner, found.agree) == ("slowly", False)
    assert found.losses.unequal is not None
    assert found.losses.unequal.step == 10
    assert found.losses.divergence is not None
    assert found.losses.divergence.step == 10 + math.ceil(5 * math.log2(1e-4 / 1e-7))


def test_other_losses_from_the_first_step_part_at_once(tmp_path: Path) -> None:
    """A first loss that differs by more than rounding is another training from the start."""
    found = compare_runs(tmp_path, LOSSES, make_losses(100, seed=5))
    assert (found.manner, found.losses.divergence) == ("at once", found.losses.first)


@pytest.mark.parametrize("noise", [0.0, 1e-7])
def test_a_jump_out_of_equality_or_rounding_is_sudden(tmp_path: Path, noise: float) -> None:
    """Runs that are equal, or equal but for rounding, and then differ by a hundredth in one step, part suddenly."""
    other = [loss * (1 + (0.01 if step >= 60 else noise)) for step, loss in enumerate(LOSSES)]
    found = compare_runs(tmp_path, LOSSES, other)
    assert found.losses.divergence is not None
    assert (found.manner, found.losses.divergence.step) == ("suddenly", 61)


def test_a_jump_over_steps_that_nobody_told_is_not_called_sudden(tmp_path: Path) -> None:
    """Where only one run has told forty steps, rounding may have grown in them: the judgement is not made."""
    other = drift(LOSSES, rounding=1e-7, double_every=2.0)
    run = write_run(tmp_path / "b", other[:10], reason=None)
    write_run(run, other[60:], start=60)
    told = compare(read_journal(write_run(tmp_path / "a", LOSSES)), read_journal(run))
    assert told.losses.divergence is not None
    assert (told.losses.divergence.step, told.manner, told.losses.num_common) == (61, "slowly", 50)


def test_nan_in_one_run_only_is_the_divergence(tmp_path: Path) -> None:
    """A loss that is NaN, or infinite, in one run and a number in the other differs by more than any tolerance."""
    for value in (math.nan, math.inf, -math.inf):
        found = compare_runs(tmp_path / str(value), LOSSES, [*LOSSES[:40], value, *LOSSES[41:]], tolerance=1e9)
        assert found.losses.divergence is not None
        assert (found.losses.divergence.step, found.losses.divergence.difference, found.manner) == (41, math.inf, "suddenly")  # fmt: skip


def test_the_table_shows_the_steps_around_the_divergence(tmp_path: Path) -> None:
    """The rows are the first and the last step, three before and after the divergence, and the largest difference."""
    other = [loss + (0.01 if step == 49 else 0.02 if step == 79 else 0) for step, loss in enumerate(LOSSES)]
    found = compare_runs(tmp_path, LOSSES, other)
    assert [one.step for one in found.rows] == [1, *range(47, 54), 80, 100]  # fmt: skip
    assert found.losses.largest.step == 80


# --------------------------------------------------------------- tolerances


@pytest.mark.parametrize(
    ("of_a", "of_b", "precision", "tolerance"),
    [
        ({}, {}, "fp32", 1e-4),
        ({"dtype": "float64"}, {"dtype": "float64"}, "float64", 1e-9),
        ({"dtype": "float64"}, {}, "fp32", 1e-4),
        ({"precision": "bf16"}, {}, "bf16", 1e-2),
        ({"dtype": "bfloat16"}, {"precision": "fp16"}, "bf16", 1e-2),
        ({"dtype": "float32+float64"}, {"dtype": "float64"}, "fp32", 1e-4),
    ],
)
def test_the_tolerance_is_that_of_the_coarser_run(tmp_path: Path, of_a: Any, of_b: Any, precision: str, tolerance: float) -> None:  # fmt: skip
    """By default the tolerance follows from the coarser precision of the two, autocast or the parameters' own."""
    found = compare_runs(tmp_path, LOSSES, LOSSES, of_a={"settings": of_a}, of_b={"settings": of_b})
    assert (found.precision, found.tolerance) == (precision, tolerance)


@pytest.mark.parametrize("tolerance", [-1e-9, math.nan, math.inf])
def test_a_tolerance_that_is_none_is_refused(tmp_path: Path, tolerance: float) -> None:
    """A tolerance is a number of 0 or more."""
    with pytest.raises(UsageError, match="tolerance="):
        compare_runs(tmp_path, LOSSES, LOSSES, tolerance=tolerance)


def test_runs_without_a_common_step_are_refused(tmp_path: Path) -> None:
    """Runs of different steps, or one that has told of none yet, can't be compared: the error has both ranges."""
    with pytest.raises(UsageError, match=r"a/journal.jsonl has steps 1 to 100, and .*b/journal.jsonl has steps 201 to 300"):  # fmt: skip
        compare_runs(tmp_path, LOSSES, LOSSES, of_b={"start": 200})
    with pytest.raises(UsageError, match="has no step yet"):
        compare_runs(tmp_path / "other", LOSSES, [])


# ------------------------------------------------- settings, weights, others


def test_settings_are_those_in_force_where_the_runs_part(tmp_path: Path) -> None:
    """Of a run that went on with other settings, those count that the step of the divergence had; what only one run tells does not."""
    a = read_journal(write_run(tmp_path / "a", LOSSES))
    run = write_run(tmp_path / "b", LOSSES[:50], settings={"seed": 1}, reason=None)
    write_run(
        run,
        [loss * 1.1 for loss in LOSSES[50:]],
        start=50,
        ranks=3,
        settings={"precision": "bf16", "clip_norm": 1.0},
    )
    found = {one.name: (one.a, one.b) for one in compare(a, read_journal(run)).settings}
    assert found.pop("folder") == (str(a.folder), str(run))
    assert found == {"ranks": (1, 3), "precision": ("fp32", "bf16")}


def test_digests_are_compared_at_common_starts(tmp_path: Path) -> None:
    """Initial weights are equal, differ by name, or belong to one run only; wrappers' prefixes don't count."""
    found = compare_runs(
        tmp_path, LOSSES, LOSSES,
        of_a={"digests": {"0.weight": "aa", "0.bias": "bb", "old": "cc"}},
        of_b={"digests": {"_orig_mod.0.weight": "aa", "_orig_mod.0.bias": "xx", "_orig_mod.new": "cc"}},
    )  # fmt: skip
    (weights,) = found.weights
    assert (weights.step, weights.num_common, weights.differing) == (0, 2, ("0.bias",))
    assert (weights.only_a, weights.only_b, weights.are_equal) == (("old",), ("new",), False)


def test_weights_are_compared_where_both_went_on(tmp_path: Path) -> None:
    """Two runs that were both started again after step 50 are compared there too, and not at a start that only one has."""
    runs = []
    for name, digest, own in (("a", "1", 20), ("b", "2", 30)):
        run = write_run(tmp_path / name, LOSSES[:50], digests={"w": "0"}, reason=None)
        write_run(run, LOSSES[own:50], start=own, digests={"w": name}, reason=None)
        runs.append(read_journal(write_run(run, LOSSES[50:], start=50, digests={"w": digest})))
    assert [(one.step, one.are_equal) for one in compare(*runs).weights] == [(0, True), (50, False)]


def test_norms_tell_where_and_which(tmp_path: Path) -> None:
    """The first step with a norm beyond the tolerance is found, its parameters by difference, and names that only one has."""
    of_a = {step: {"w": 1.0, "b": 2.0, "c": 3.0, "gone": 0.0} for step in (20, 40, 60)}
    of_b = {20: {"w": 1.00001, "b": 2.0, "c": 3.0}, 40: {"w": 1.01, "b": 2.2, "c": 3.0}, 60: {"w": 1.5, "b": 2.1, "c": 3.0}}  # fmt: skip
    found = compare_runs(tmp_path, LOSSES, LOSSES, of_a={"norms": of_a}, of_b={"norms": of_b})
    assert found.norms is not None
    assert (found.norms.num_steps, found.norms.divergence_step) == (3, 40)
    assert [one.name for one in found.norms.diverged] == ["b", "w"]
    assert found.norms.largest is not None
    assert (found.norms.last_step, found.norms.largest.name, found.norms.only_a) == (60, "w", ("gone",))
    assert (found.manner, found.agree) == ("equal", False)


def test_metrics_are_compared_at_common_steps(tmp_path: Path) -> None:
    """Each metric that both have is compared; one that differs is no agreement, though all losses are equal."""
    of_a = {20: {"accuracy": 0.5, "f1": 0.1}, 40: {"accuracy": 0.6}, 60: {"accuracy": 0.7}}
    of_b = {40: {"accuracy": 0.6, "f1": 0.9}, 60: {"accuracy": 0.75}}
    found = compare_runs(tmp_path, LOSSES, LOSSES, of_a={"metrics": of_a}, of_b={"metrics": of_b})
    (accuracy,) = found.metrics
    assert accuracy.divergence is not None
    assert (accuracy.name, accuracy.num_common, accuracy.divergence.step, found.agree) == ("accuracy", 2, 60, False)  # fmt: skip


def test_rates_and_gradients_are_compared(tmp_path: Path) -> None:
    """The learning rate and the gradient's norm have their own first step of difference; None where a run tells none."""
    found = compare_runs(
        tmp_path, LOSSES, LOSSES,
        of_a={"grad_norms": LOSSES, "lr": 0.1}, of_b={"grad_norms": [*LOSSES[:30], 9.0, *LOSSES[31:]], "lr": 0.1},
    )  # fmt: skip
    assert found.lrs is not None
    assert found.grad_norms is not None
    assert found.grad_norms.divergence is not None
    assert (found.lrs.divergence, found.grad_norms.divergence.step) == (None, 31)
    assert compare_runs(tmp_path / "other", LOSSES, LOSSES, of_a={"grad_norms": LOSSES}).grad_norms is None


@pytest.mark.parametrize(
    ("name", "bare"),
    [
        ("module.0.weight", "0.weight"),
        ("_orig_mod.module.0.weight", "0.weight"),
        ("model.layers._orig_mod.0.bias", "model.layers.0.bias"),
        ("model.submodule.weight", "model.submodule.weight"),
    ],
)
def test_wrappers_are_taken_off_names(name: str, bare: str) -> None:
    """DDP's and torch.compile's prefixes go, wherever they stand; other names stay."""
    assert strip_wrappers(name) == bare


def test_names_that_would_become_one_stay_as_they_are() -> None:
    """Where a model has a part that is really called so, no parameter hides another."""
    names = {"module.w": 1, "w": 2}
    assert strip_all(names) == names


# --------------------------------------------------------------- properties


any_floats = st.lists(st.floats() | st.floats(0.1, 3.0), min_size=1, max_size=30)


@settings(max_examples=40, deadline=None)
@given(losses=any_floats)
def test_a_run_agrees_with_itself(losses: list[float], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever its losses are, a run is equal to itself at tolerance 0."""
    run = read_journal(write_run(tmp_path_factory.mktemp("run"), losses))
    found = compare(run, run, tolerance=0.0)
    assert (found.agree, found.manner, found.losses.largest.difference) == (True, "equal", 0.0)


@settings(max_examples=40, deadline=None)
@given(a=any_floats, b=any_floats, tolerance=st.floats(0, 1))
def test_a_comparison_is_symmetric(
    a: list[float], b: list[float], tolerance: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Exchanging two runs exchanges their values, and changes neither the verdict nor a step nor a difference."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [read_journal(write_run(folder / name, losses)) for name, losses in (("a", a), ("b", b))]
    one, other = compare(*runs, tolerance=tolerance), compare(*reversed(runs), tolerance=tolerance)
    assert (one.agree, one.manner) == (other.agree, other.manner)
    assert [(row.step, row.difference, repr(row.a)) for row in one.rows] == [(row.step, row.difference, repr(row.b)) for row in other.rows]  # fmt: skip


@given(a=st.floats(), b=st.floats())
def test_the_difference_is_that_of_no_order_and_no_overflow(a: float, b: float) -> None:
    """The relative difference is symmetric, never NaN, 0 only for what is the same, and finite for numbers that are finite."""
    found = relative_difference(a, b)
    assert found == relative_difference(b, a)
    assert (found == 0) == (a == b or (math.isnan(a) and math.isnan(b)))
    assert (found == math.inf) == (repr(a) != repr(b) and not (math.isfinite(a) and math.isfinite(b)))
    if math.isfinite(a) and math.isfinite(b):
        assert found <= 2
