"""When a model is evaluated in a training, by what, and whether it has become better."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from rankwise.base.errors import UsageError
from rankwise.data.evaluation import evaluate, predict_pair
from rankwise.data.metric_totals import check_metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from rankwise.runtime.context import RankContext
    from rankwise.train.config import TrainerConfig
    from rankwise.train.precision import Precision


@final
@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a Trainer evaluates: the arguments of ``rankwise.evaluate``.

    Attributes:
        dataset: As for ``DataLoader``.
        metrics: By name: those of ``rankwise.data.metrics``, one of your own, or of torchmetrics.
        batch_size: Samples of one forward pass of a rank.
        predict: Takes the model and a batch; returns outputs and targets. None: a batch is a pair of inputs and
            targets.
        collate_fn: Makes a batch of a list of samples.
        num_workers: Processes that load, for each rank.

    Raises:
        UsageError: Something is not a metric.
    """

    dataset: Any
    metrics: Mapping[str, Any]
    batch_size: int
    predict: Callable[[nn.Module, Any], tuple[Any, Any]] | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0

    def __post_init__(self) -> None:
        check_metrics(self.metrics)

    def run(self, model: nn.Module, precision: Precision, ctx: RankContext) -> dict[str, float]:
        """Evaluate a model.

        Args:
            model: Unwrapped, the same on all ranks.
            precision: Of its forward passes; the data set is read without.
            ctx: The job.

        Returns:
            The metrics, equal on all ranks.

        Collective: every rank.
        """
        predict = self.predict or predict_pair

        def predict_precisely(model: nn.Module, batch: Any) -> tuple[Any, Any]:
            with precision.autocast():
                return predict(model, batch)

        return evaluate(
            model,
            self.dataset,
            self.metrics,
            batch_size=self.batch_size,
            predict=predict_precisely,
            collate_fn=self.collate_fn,
            num_workers=self.num_workers,
            ctx=ctx,
        )


@final
class Best:
    """The best value of the monitored metric so far, and how long ago that was.

    All ranks hold the same metrics, so they come to the same judgement without a word.

    Args:
        config: Which metric, and what is better.
    """

    def __init__(self, config: TrainerConfig) -> None:
        self._name, self._patience, self._min_delta = config.monitor, config.patience, config.min_delta
        self._sign = 1.0 if config.mode == "min" else -1.0
        #: None until the first evaluation.
        self.value: float | None = None
        self.step: int | None = None
        self.num_worse = 0

    def judge(self, metrics: Mapping[str, float], step: int) -> bool:
        """Note an evaluation; return whether it is the best so far. NaN is never better.

        Raises:
            UsageError: The monitored metric is not among them.
        """
        if self._name is None:
            return False
        if self._name not in metrics:
            raise UsageError(
                f"monitor={self._name!r}, but the evaluation has {', '.join(map(repr, metrics)) or 'no metrics'}",
                hint="name one of these in TrainerConfig(monitor=...), or add it to the evaluation's metrics",
            )
        value = metrics[self._name]
        is_better = not math.isnan(value) and (
            self.value is None or self._sign * value < self._sign * self.value - self._min_delta
        )
        if is_better:
            self.value, self.step, self.num_worse = value, step, 0
        else:
            self.num_worse += 1
        return is_better

    @property
    def reason_to_stop(self) -> str | None:
        """Why training should stop; None if it should not."""
        if self._patience is None or self.num_worse < self._patience:
            return None
        return f"no better {self._name} in {self.num_worse} evaluations"

    def state_dict(self) -> dict[str, Any]:
        """Return what must outlive the process."""
        return {"value": self.value, "step": self.step, "num_worse": self.num_worse}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.value, self.step, self.num_worse = state["value"], state["step"], state["num_worse"]
