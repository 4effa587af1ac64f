"""Why two runs may part: each reason is given where a fact speaks for it, and not elsewhere."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from journals import make_losses, write_run
from rankwise.train.comparison.reasons import explain
from rankwise.train.comparison.runs import compare
from rankwise.train.journal import read_journal

if TYPE_CHECKING:
    from pathlib import Path

LOSSES = make_losses(100)
OTHERS = make_losses(100, seed=5)
EQUAL = {"digests": {"w": "1"}}


def explain_runs(folder: Path, b: list[float], *, of_a: Any = None, of_b: Any = None) -> list[str]:
    """Return what is said of a run against the usual one, fact and advice."""
    runs = [write_run(folder / name, losses, **(more or {})) for name, losses, more in (("a", LOSSES, of_a), ("b", b, of_b))]  # fmt: skip
    journals = [read_journal(run) for run in runs]
    return [f"{one.fact} -> {one.do}" for one in explain(compare(*journals), *journals)]


def test_runs_that_agree_need_no_reason(tmp_path: Path) -> None:
    """Settings may differ as they like: where no loss parts, nothing is to be explained."""
    assert explain_runs(tmp_path, LOSSES, of_b={"ranks": 2, "settings": {"seed": 1}, "lr": 0.2}) == []


def test_initial_weights_come_first(tmp_path: Path) -> None:
    """Other initial weights are the reason, with the seeds if they differ; nothing is guessed beside them, whatever the manner is."""
    slow = [loss * (1 + (-1) ** step * 1e-7 * 2 ** (step / 5)) for step, loss in enumerate(LOSSES)]
    for number, other in enumerate((OTHERS, slow, [*LOSSES[:30], *OTHERS[30:]])):
        of_b = {"digests": {"w": "2"}, "ranks": 2, "settings": {"seed": 1, "precision": "bf16"}}
        (said,) = explain_runs(tmp_path / str(number), other, of_a=EQUAL, of_b=of_b)
        assert said.startswith("the initial weights differ, as the seeds do (0 and 1)")


def test_nan_is_told_beside_a_certain_cause(tmp_path: Path) -> None:
    """That a loss is no number is a fact, not a guess."""
    said = explain_runs(tmp_path, [*LOSSES[:30], math.nan, *LOSSES[31:]], of_a=EQUAL, of_b={"digests": {"w": "2"}})  # fmt: skip
    assert len(said) == 2
    assert said[0].startswith("the initial weights differ")
    assert said[1].startswith("the loss of b is nan at step 31")


def test_weights_that_differ_after_the_divergence_are_no_cause(tmp_path: Path) -> None:
    """Two runs that diverge at step 20 and were both started again at step 50 went on with other weights, but not therefore."""
    runs = []
    for name, losses in (("a", LOSSES), ("b", [*LOSSES[:19], *OTHERS[19:]])):
        run = write_run(tmp_path / name, losses[:50], digests={"w": "0"}, reason=None)
        runs.append(read_journal(write_run(run, losses[50:], start=50, digests={"w": name})))
    (said,) = explain(compare(*runs), *runs)
    assert said.fact.startswith("they are equal up to step 19")


def test_other_models_are_named(tmp_path: Path) -> None:
    """Parameters that only one model has are the reason."""
    said = explain_runs(tmp_path, OTHERS, of_a=EQUAL, of_b={"digests": {"w": "1", "v": "2"}})
    assert "the models are not the same: 0 parameters are in a only, 1 in b only" in said[0]


def test_another_global_batch_is_another_training(tmp_path: Path) -> None:
    """Steps of other sizes are the reason, and nothing else is looked for."""
    (said,) = explain_runs(tmp_path, OTHERS, of_b={"global_batch": 96})
    assert said.startswith("a step of a has 48 samples and one of b has 96")


def test_equal_weights_and_other_losses_point_to_samples_and_dropout(tmp_path: Path) -> None:
    """With equal weights it may be samples or dropout; BatchNorm only where the ranks differ and it is not synchronised."""
    alike = explain_runs(tmp_path / "1", OTHERS, of_a=EQUAL, of_b=EQUAL)
    assert len(alike) == 1
    assert "though the weights are equal to the bit: it may be the samples, or random numbers" in alike[0]
    ranks = explain_runs(tmp_path / "2", OTHERS, of_b={"ranks": 2})
    assert "whether the weights do is not known" in ranks[0]
    assert "BatchNorm" in ranks[1]
    in_step = {"settings": {"sync_batchnorm": True}}
    synchronised = explain_runs(tmp_path / "3", OTHERS, of_a=in_step, of_b={"ranks": 2, **in_step})
    assert not any("BatchNorm" in one for one in synchronised)


@pytest.mark.parametrize("name", ["seed", "data_seed", "order"])
def test_seeds_of_data_are_named(tmp_path: Path, name: str) -> None:
    """Where a seed or the order of the data differs, that is said instead of a guess."""
    (said,) = explain_runs(tmp_path, OTHERS, of_a={**EQUAL, "settings": {name: 3}}, of_b={**EQUAL, "settings": {name: 4}})  # fmt: skip
    assert f"what differs is {name.replace('_', ' ')} 3 and 4" in said


def test_slow_divergence_is_rounding_with_what_changes_it(tmp_path: Path) -> None:
    """A difference that grows out of rounding is blamed on it, with the ranks; without any such setting, on kernels."""
    slow = [loss * (1 + (-1) ** step * 1e-7 * 2 ** (step / 5)) for step, loss in enumerate(LOSSES)]
    (said,) = explain_runs(tmp_path / "1", slow, of_b={"ranks": 4})
    assert "with ranks 1 and 4 the same sums are added in another order" in said
    (said,) = explain_runs(tmp_path / "2", slow)
    assert "kernels that are not deterministic" in said


def test_a_norm_that_parts_before_the_losses_is_pointed_at(tmp_path: Path) -> None:
    """A parameter whose norm differs before the losses part is named: it may begin there. One that differs only later is not."""
    slow = [loss * (1 + (-1) ** step * 1e-7 * 2 ** (step / 5)) for step, loss in enumerate(LOSSES)]
    for step, num_reasons in ((10, 2), (90, 1)):
        of_a, of_b = ({"norms": {step: {"v": 1.0, "w": norm}}} for norm in (2.0, 2.1))
        said = explain_runs(tmp_path / str(step), slow, of_a=of_a, of_b=of_b)
        assert len(said) == num_reasons
        if step == 10:
            assert "at step 10, before the losses diverge, the norm of w differs by 0.048" in said[1]


def test_a_rate_is_blamed_only_for_later_steps(tmp_path: Path) -> None:
    """The rate of a step moves the loss of the next: it is a reason from step 2 on, and none for the first loss."""
    later = [LOSSES[0], *OTHERS[1:]]
    said = explain_runs(tmp_path / "1", later, of_b={"lr": 0.2})
    assert said[0].startswith("the learning rates differ from step 1 on: 0.1 and 0.2")
    assert len(said) == 1
    assert not any("learning rates" in one for one in explain_runs(tmp_path / "2", OTHERS, of_b={"lr": 0.2}))


@pytest.mark.parametrize(
    ("gradients", "wanted"),
    [
        (LOSSES, ", though the gradient's norm does not ->"),
        (OTHERS, ", and so does the gradient before it (norms "),
        ((), "the update between them differs ->"),
    ],
)
def test_an_equal_first_step_points_to_the_update(tmp_path: Path, gradients: Any, wanted: str) -> None:
    """Equal at step 1 and not at step 2: the update, or the gradient before it if its norm says so."""
    said = explain_runs(tmp_path, [LOSSES[0], *OTHERS[1:]], of_a={"grad_norms": LOSSES}, of_b={"grad_norms": gradients})  # fmt: skip
    assert said[0].startswith("step 1 is equal and step 2 is not")
    assert wanted in said[0]


def test_a_resume_right_before_is_the_suspect(tmp_path: Path) -> None:
    """A run that was started again just before the divergence is named; one that was started again long before is not."""
    a = read_journal(write_run(tmp_path / "a", LOSSES))
    run = write_run(tmp_path / "b", LOSSES[:30], reason=None)
    write_run(run, LOSSES[30:60], start=30, reason=None)
    write_run(run, OTHERS[60:], start=60)
    b = read_journal(run)
    (said,) = explain(compare(a, b), a, b)
    assert said.fact == "b was started again after step 60, and they diverge at step 61"
    write_run(run, [*LOSSES[30:70], *OTHERS[70:]], start=30)
    b = read_journal(run)
    (said,) = explain(compare(a, b), a, b)
    assert said.fact.startswith("they are equal up to step 70; step 71 is another step")


def test_a_loss_that_is_no_number_is_said(tmp_path: Path) -> None:
    """NaN in one run is told with the run and the step."""
    (said,) = explain_runs(tmp_path, [*LOSSES[:40], math.nan, *LOSSES[41:]])
    assert said.startswith("the loss of b is nan at step 41, and that of the other is not")


def test_other_settings_are_listed_but_not_those_without_effect(tmp_path: Path) -> None:
    """Where no better reason covers it, a differing setting is named; how often a run logs is not."""
    of_a, of_b = ({"settings": {"clip_norm": clip, "log_every": every}} for clip, every in ((None, 1), (1.0, 5)))
    said = explain_runs(tmp_path, [*LOSSES[:40], *OTHERS[40:]], of_a=of_a, of_b=of_b)
    assert "these settings differ as well: clip norm None and 1.0" in said[-1]
    assert not any("log" in one for one in said)
