"""Measures of how good a model is, as sums over samples: they add up to the same number however the samples are spread over ranks.

    metrics = {"accuracy": Accuracy(), "loss": Mean(lambda out, y: cross_entropy(out, y, reduction="none"))}
    rankwise.evaluate(model, dataset, metrics, batch_size=64)

A metric turns a batch into a few numbers (``measure``), these are added over batches and ranks, and the sums become the
result (``conclude``). A mean of each rank's mean would be wrong as soon as ranks hold different numbers of samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, final, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from rankwise.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "Accuracy",
    "ConfusionMatrix",
    "Extreme",
    "Mean",
    "MeanSquaredError",
    "Metric",
    "Perplexity",
    "Sum",
]

Reduction = Literal["sum", "min", "max"]
#: What a metric gives: a number, or several with a name each.
Result = float | dict[str, float]


@runtime_checkable
class Metric(Protocol):
    """What ``evaluate`` needs of a metric; write your own with these four."""

    @property
    def num_sums(self) -> int:
        """How many numbers ``measure`` returns."""

    @property
    def reduction(self) -> Reduction:
        """How the numbers of two batches become one: ``"sum"``, ``"min"`` or ``"max"``."""

    def measure(self, outputs: Any, targets: Any) -> Tensor:
        """Return the numbers of one batch; never called with a batch of no samples.

        Args:
            outputs: What ``predict`` has returned first; by default the model's output, shape (B, ...).
            targets: What it has returned second.

        Returns:
            Shape (num_sums,).
        """

    def conclude(self, sums: Tensor) -> Result:
        """Turn the numbers of all samples into the result.

        Args:
            sums: Shape (num_sums,), float64, on the CPU.

        Returns:
            A number, or several by name.
        """


@final
@dataclass(frozen=True, slots=True)
class Mean:
    """The mean over all samples of what a function gives for each.

    Attributes:
        function: Takes outputs and targets; returns shape (B,), a value for each sample (or token, or pixel); or a pair
            of values and weights of that shape.
    """

    function: Callable[[Any, Any], Any]

    num_sums = 2
    reduction: ClassVar[Reduction] = "sum"

    def measure(self, outputs: Any, targets: Any) -> Tensor:
        """Return the sum of weighted values, and that of the weights."""
        values_B, weights_B = _call(self.function, outputs, targets, "Mean")
        if weights_B is None:
            return torch.stack([values_B.sum(), values_B.new_tensor(values_B.numel())])
        return torch.stack([(values_B * weights_B).sum(), weights_B.sum()])

    def conclude(self, sums: Tensor) -> float:
        """Return the mean; NaN if all weights are 0."""
        return float(sums[0] / sums[1])


@final
@dataclass(frozen=True, slots=True)
class Sum:
    """The sum over all samples of what a function gives for each.

    Attributes:
        function: As for ``Mean``.
    """

    function: Callable[[Any, Any], Any]

    num_sums = 1
    reduction: ClassVar[Reduction] = "sum"

    def measure(self, outputs: Any, targets: Any) -> Tensor:
        """Return the sum of weighted values."""
        values_B, weights_B = _call(self.function, outputs, targets, "Sum")
        return (values_B if weights_B is None else values_B * weights_B).sum().reshape(1)

    def conclude(self, sums: Tensor) -> float:
        """Return the sum."""
        return float(sums[0])


@final
@dataclass(frozen=True, slots=True)
class Extreme:
    """The smallest or the largest of what a function gives for each sample.

    Attributes:
        function: Takes outputs and targets; returns shape (B,).
        reduction: ``"min"`` or ``"max"``.
    """

    function: Callable[[Any, Any], Any]
    reduction: Reduction

    num_sums = 1

    def __post_init__(self) -> None:
        if self.reduction not in {"min", "max"}:
            raise UsageError(f"Extreme: reduction={self.reduction!r}", hint="'min' or 'max'")

    def measure(self, outputs: Any, targets: Any) -> Tensor:
        """Return the batch's extreme; NaN if it holds NaN."""
        values_B, _ = _call(self.function, outputs, targets, "Extreme")
        return (values_B.amin() if self.reduction == "min" else values_B.amax()).reshape(1)

    def conclude(self, sums: Tensor) -> float:
        """Return the extreme."""
        return float(sums[0])


@final
@dataclass(frozen=True, slots=True)
class Accuracy:
    """The share of samples whose class is among the ``top_k`` that the model finds most likely.

    Outputs have shape (B, C) or (B, ..., C), a score for each class; targets (B) or (B, ...), the class.

    Attributes:
        top_k: How many guesses the model has.
        ignore_index: Targets with this value don't count.
    """

    top_k: int = 1
    ignore_index: int | None = None

    num_sums = 2
    reduction: ClassVar[Reduction] = "sum"

    def measure(self, outputs: Any, targets: Any) -> Tensor:
        """Return how many are right, and how many count."""
        scores_NC, targets_N = _read_classes(outputs, targets, "Accuracy")
        if not 1 <= self.top_k <= scores_NC.shape[1]:
            raise UsageError(
                f"Accuracy: top_k={self.top_k} of {scores_NC.shape[1]} classes",
                hint="use 1 up to the number of classes",
            )
        counts_N = _find_counting(targets_N, self.ignore_index)
        # argmax breaks ties as everybody's `outputs.argmax(-1)` does, which topk does not promise.
        best = scores_NC.argmax(1, keepdim=True) if self.top_k == 1 else scores_NC.topk(self.top_k).indices
        right_N = (best == targets_N.unsqueeze(1)).any(1) & counts_N
        return torch.stack([right_N.sum(), counts_N.sum()])

    def conclude(self, sums: Tensor) -> float:
        """Return the share; NaN if no target counts."""
        return float(sums[0] / sums[1])


@final
@dataclass(frozen=True, slots=True)
class Perplexity:
    """exp of the mean cross-entropy over all tokens; every token weighs the same, however long its text is.

    Outputs have shape (B, T, V), a logit for each word; targets (B, T), the next word.

    Attributes:
        ignore_index: Targets with this value don't count: padding.
    """

    ignore_index: int = -100

    num_sums = 2
    reduction: ClassVar[Reduction] = "sum"

    def measure(self, outputs: Any, targets: Any) -> Tensor:
        """Return the sum of the cross-entropies, and the number of tokens that count."""
        logits_NV, targets_N = _read_classes(outputs, targets, "Perplexity")
        logits_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
        losses_N = cross_entropy(logits_NV, targets_N.long(), reduction="none", ignore_index=self.ignore_index)
        return torch.stack([to_double(losses_N).sum(), to_double(targets_N != self.ignore_index).sum()])

    def conclude(self, sums: Tensor) -> float:
        """Return the perplexity; NaN if no token counts."""
        return float((sums[0] / sums[1]).exp())


@final
@dataclass(frozen=True, slots=True)
class MeanSquaredError:
    """The mean of the squared differences of outputs and targets, which have one shape.

    Attributes:
        root: Return its square root.
    """

    root: bool = False

    num_sums = 2
    reduction: ClassVar[Reduction] = "sum"

    def measure(self, outputs: Any, targets: Any) -> Tensor:
        """Return the sum of the squares, and their number."""
        are_tensors = isinstance(outputs, Tensor) and isinstance(targets, Tensor)
        if not are_tensors or outputs.shape != targets.shape:
            raise UsageError(
                f"MeanSquaredError: outputs are {_describe(outputs)} and targets {_describe(targets)}",
                hint="both must have one shape: with (B, 1) and (B,), torch would compare each with all others",
            )
        squares = (to_double(outputs) - to_double(targets)).square()
        return torch.stack([squares.sum(), squares.new_tensor(squares.numel())])

    def conclude(self, sums: Tensor) -> float:
        """Return the mean, or its root."""
        mean = sums[0] / sums[1]
        return float(mean.sqrt() if self.root else mean)


@final
@dataclass(frozen=True, slots=True)
class ConfusionMatrix:
    """Counts predictions by true class, and computes accuracy, precision, recall and F1 from it.

    Outputs and targets are as for ``Accuracy``. The averages are over classes, each weighing the same ("macro");
    classes that are neither in the targets nor ever guessed are left out, and a share of nothing is 0, as in
    scikit-learn.

    Attributes:
        num_classes: How many classes there are.
        per_class: Give precision, recall and F1 of each class too, as ``"f1/3"``.
        ignore_index: Targets with this value don't count.
    """

    num_classes: int
    per_class: bool = False
    ignore_index: int | None = None

    reduction: ClassVar[Reduction] = "sum"

    @property
    def num_sums(self) -> int:
        """The cells of the matrix."""
        return self.num_classes**2

    def measure(self, outputs: Any, targets: Any) -> Tensor:
        """Return the matrix, row by row: target i, guess j."""
        scores_NC, targets_N = _read_classes(outputs, targets, "ConfusionMatrix")
        targets_N, guesses_N = targets_N.long(), scores_NC.argmax(1)
        counts_N = _find_counting(targets_N, self.ignore_index)
        targets_N, guesses_N = targets_N[counts_N], guesses_N[counts_N]
        if scores_NC.shape[1] != self.num_classes or (
            targets_N.numel() and not 0 <= int(targets_N.min()) <= int(targets_N.max()) < self.num_classes
        ):
            seen = f"{int(targets_N.min())} to {int(targets_N.max())}" if targets_N.numel() else "none"
            raise UsageError(
                f"ConfusionMatrix({self.num_classes}): outputs have {scores_NC.shape[1]} classes, and targets are {seen}",
                hint="num_classes must be the size of the model's last dimension, and targets count from 0",
            )
        return torch.bincount(targets_N * self.num_classes + guesses_N, minlength=self.num_sums)

    def conclude(self, sums: Tensor) -> dict[str, float]:
        """Return the shares by name."""
        matrix = sums.reshape(self.num_classes, self.num_classes)
        right, wanted, guessed = matrix.diagonal(), matrix.sum(1), matrix.sum(0)
        shares = {
            "precision": right / guessed.clamp(min=1),
            "recall": right / wanted.clamp(min=1),
            "f1": 2 * right / (wanted + guessed).clamp(min=1),
        }
        seen = (wanted + guessed) > 0
        result = {"accuracy": float(right.sum() / matrix.sum())}
        for name, share in shares.items():
            result[name] = float(share[seen].mean())
            if self.per_class:
                result |= {f"{name}/{index}": float(value) for index, value in enumerate(share)}
        return result


def to_double(tensor: Tensor) -> Tensor:
    """Return float64: a sum of a million float32 would lose digits, and another order of the ranks other ones."""
    return tensor.cpu().double() if tensor.device.type == "mps" else tensor.double()


def _call(function: Callable[[Any, Any], Any], outputs: Any, targets: Any, name: str) -> tuple[Tensor, Tensor | None]:
    """Call a user's function and check that it gives a value for each sample."""
    given = function(outputs, targets)
    values, weights = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    wrong = None
    if not isinstance(values, Tensor) or values.dim() != 1:
        wrong = f"returned {_describe(values)}"
    elif weights is not None and (not isinstance(weights, Tensor) or weights.shape != values.shape):
        wrong = f"returned weights of {_describe(weights)} for values of {_describe(values)}"
    if wrong is not None:
        raise UsageError(
            f"{name}: the function {wrong}, and a value for each sample, shape (B,), is needed",
            hint="take reduction='none', and flatten the result or take its mean over all dimensions but the first",
        )
    return to_double(values), None if weights is None else to_double(weights)


def _read_classes(outputs: Any, targets: Any, name: str) -> tuple[Tensor, Tensor]:
    """Return scores as (N, C) and targets as (N,)."""
    are_tensors = isinstance(outputs, Tensor) and isinstance(targets, Tensor)
    fits = are_tensors and outputs.dim() >= 2 and outputs.shape[:-1] == targets.shape
    if not fits or targets.is_floating_point():
        raise UsageError(
            f"{name}: outputs are {_describe(outputs)} and targets {_describe(targets)}",
            hint="outputs must be (B, ..., classes) and targets (B, ...), whole numbers; `predict=` can bring them into that form",
        )
    return outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1)


def _find_counting(targets_N: Tensor, ignore_index: int | None) -> Tensor:
    return torch.ones_like(targets_N, dtype=torch.bool) if ignore_index is None else targets_N != ignore_index


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"a tensor of shape {tuple(value.shape)} and {str(value.dtype).removeprefix('torch.')}"
