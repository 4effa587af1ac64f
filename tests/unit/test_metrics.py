"""Metrics on given numbers: right values, sums that add up, and clear words for shapes that don't fit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from rankwise.base.errors import UsageError
from rankwise.data.metric_totals import MetricTotals
from rankwise.data.metrics import (
    Accuracy,
    ConfusionMatrix,
    Extreme,
    Mean,
    MeanSquaredError,
    Metric,
    Perplexity,
    Sum,
)
from rankwise.train.evaluating import Evaluation

SCORES = torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 1.0], [1.0, 0.0, 2.0], [2.0, 1.0, 0.0]])
TARGETS = torch.tensor([0, 2, 2, 1])


def first(outputs: Any, _: Any) -> Any:
    return outputs[:, 0]


def measure(metric: Any, outputs: Any, targets: Any, *, cut: int = 2) -> Any:
    """Return the result from two batches."""
    metric_totals = MetricTotals({"m": metric}, torch.device("cpu"), None)
    for part in (slice(None, cut), slice(cut, None)):
        metric_totals.add(outputs[part], targets[part], len(outputs[part]))
    return metric_totals.conclude()


@pytest.mark.parametrize(
    ("metric", "wanted"),
    [
        (Mean(first), 1.5),
        (Mean(lambda outputs, targets: (outputs[:, 0], targets.float())), 4 / 5),
        (Sum(first), 6.0),
        (Sum(lambda outputs, targets: (outputs[:, 0], targets.float())), 4.0),
        (Extreme(first, "min"), 0.0),
        (Extreme(first, "max"), 3.0),
        (Accuracy(), 0.5),
        (Accuracy(top_k=2), 1.0),
        (Accuracy(ignore_index=2), 0.5),
        (Perplexity(), math.exp(cross_entropy(SCORES, TARGETS).item())),
        (Perplexity(ignore_index=2), math.exp(cross_entropy(SCORES[[0, 3]], TARGETS[[0, 3]]).item())),
    ],
)
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_the_value_is_right_for_any_cut_into_batches(metric: Any, wanted: float, cut: int) -> None:
    """Sums of two batches conclude to what one batch gives, wherever the cut is."""
    assert isinstance(metric, Metric)
    assert measure(metric, SCORES, TARGETS, cut=cut) == {"m": pytest.approx(wanted, rel=1e-6)}


def test_confusion_matrix_gives_the_usual_shares() -> None:
    """Worked out by hand; a class that nobody has or guesses is left out of the averages."""
    told = measure(ConfusionMatrix(3, per_class=True), SCORES, TARGETS)
    # Guesses 0, 1, 2, 0 for targets 0, 2, 2, 1.
    assert told["m/accuracy"] == 0.5
    assert [told[f"m/precision/{k}"] for k in range(3)] == [0.5, 0.0, 1.0]
    assert [told[f"m/recall/{k}"] for k in range(3)] == [1.0, 0.0, 0.5]
    assert told["m/f1"] == pytest.approx((2 / 3 + 0 + 2 / 3) / 3)
    absent = torch.cat([SCORES, torch.full((4, 1), -9.0)], dim=1)
    assert measure(ConfusionMatrix(4), absent, TARGETS)["m/f1"] == told["m/f1"]


def test_mean_squared_error() -> None:
    """The mean is over all numbers, and so is its root."""
    outputs, targets = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 0.0], [0.0, 4.0]])
    assert measure(MeanSquaredError(), outputs, targets, cut=1) == {"m": 13 / 4}
    assert measure(MeanSquaredError(root=True), outputs, targets, cut=1) == {"m": math.sqrt(13 / 4)}


def test_sums_are_float64() -> None:
    """Ten million and a half, and a hundred halves more: float32 would have lost the halves."""
    values = torch.cat([torch.tensor([1e8]), torch.full((100,), 0.5)]).reshape(-1, 1)
    assert measure(Sum(first), values, values) == {"m": 1e8 + 50}


@pytest.mark.parametrize(
    ("metric", "outputs", "targets", "told"),
    [
        (
            Mean(cross_entropy),
            SCORES,
            TARGETS,
            r"returned a tensor of shape \(\) and float32.*reduction='none'",
        ),
        (Mean(lambda outputs, _: outputs), SCORES, TARGETS, r"returned a tensor of shape \(2, 3\)"),
        (
            Mean(lambda outputs, _: (outputs[:, 0], outputs)),
            SCORES,
            TARGETS,
            r"weights of a tensor of shape \(2, 3\)",
        ),
        (Accuracy(), SCORES[:, 0], TARGETS, r"outputs are a tensor of shape \(2,\) and float32 and targets"),
        (Accuracy(), SCORES, TARGETS.float(), "targets .* float32"),
        (Accuracy(top_k=4), SCORES, TARGETS, "top_k=4 of 3 classes"),
        (ConfusionMatrix(2), SCORES, TARGETS, r"ConfusionMatrix\(2\): outputs have 3 classes"),
        (ConfusionMatrix(3), SCORES, TARGETS + 2, "targets are 2 to 4"),
        (MeanSquaredError(), SCORES[:, :1], SCORES[:, 0], r"shape \(2, 1\) .* shape \(2,\)"),
    ],
)
def test_what_does_not_fit_is_told_with_its_shapes(metric: Any, outputs: Any, targets: Any, told: str) -> None:
    """The message has the shape that came and the form that is needed."""
    with pytest.raises(UsageError, match="(?s)" + told):
        measure(metric, outputs, targets)


@pytest.mark.parametrize(
    ("metric", "told"),
    [
        (Accuracy, r"give an instance: Accuracy\(\)"),
        (cross_entropy, r"rankwise\.data\.metrics\.Mean\(function\)"),
        (7, "is a int, not a metric"),
    ],
)
def test_what_is_no_metric_is_told(metric: Any, told: str) -> None:
    """A class, a function and a number each get their own advice, from a Trainer's Evaluation when it is made."""
    for make in (
        lambda: MetricTotals({"m": metric}, torch.device("cpu"), None),
        lambda: Evaluation([], {"m": metric}, batch_size=1),
    ):
        with pytest.raises(UsageError, match="(?s)" + told):
            make()


def test_a_metric_of_ones_own_with_a_wrong_size_is_told() -> None:
    """Else its numbers would be broadcast in silence."""

    class Odd:
        num_sums, reduction = 2, "sum"

        def measure(self, outputs: Any, _: Any) -> Any:
            return outputs.sum().reshape(1)

        def conclude(self, sums: Any) -> float:
            return float(sums[0])

    with pytest.raises(UsageError, match=r"metric 'm': measure\(\) returned \(1,\), and num_sums is 2"):
        measure(Odd(), SCORES, TARGETS)


class Given:
    """A metric whose result is what a test gives it."""

    num_sums, reduction = 1, "sum"

    def __init__(self, result: Any) -> None:
        self.result = result

    def measure(self, outputs: Any, _: Any) -> Any:
        return outputs.sum().reshape(1)

    def conclude(self, _: Any) -> Any:
        return self.result


def test_a_result_is_a_number_whatever_a_metric_returns() -> None:
    """A tensor becomes a float, or one for each element: tables, monitors and checkpoints take numbers. None and text are refused."""
    assert repr(measure(Given(torch.tensor([0.5])), SCORES, TARGETS)) == "{'m': 0.5}"
    assert measure(Given(torch.arange(2)), SCORES, TARGETS) == {"m/0": 0.0, "m/1": 1.0}
    for wrong in (None, "much", torch.empty(0)):
        with pytest.raises(UsageError, match="metric 'm': the result is"):
            measure(Given(wrong), SCORES, TARGETS)


def test_an_extreme_has_two_ends() -> None:
    """Only a minimum or a maximum is one."""
    with pytest.raises(UsageError, match="reduction='sum'"):
        Extreme(first, "sum")
