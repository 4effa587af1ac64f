"""Adds up what metrics measure: over the batches of a rank, and then over the ranks."""

from __future__ import annotations

import copy
import sys
import warnings
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch import Tensor

from rankwise.base.errors import DataError, UsageError
from rankwise.data.metrics import Metric, Result, to_double
from rankwise.runtime.data_movement import all_gather
from rankwise.runtime.groups import group_of
from rankwise.runtime.nested import flatten, unflatten
from rankwise.runtime.reductions import all_reduce

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwise.runtime.context import RankContext

_START = {"sum": 0.0, "min": float("inf"), "max": float("-inf")}


@final
class MetricTotals:
    """What has been measured so far.

    Args:
        metrics: By name.
        device: Where outputs are.
        ctx: The job; None: there is none.

    Raises:
        UsageError: Something is not a metric.
    """

    def __init__(self, metrics: Mapping[str, Any], device: torch.device, ctx: RankContext | None) -> None:
        check_metrics(metrics)
        self._ctx, self._num_samples, self._names = ctx, 0, list(metrics)
        self._own: dict[str, Metric] = {}
        self._foreign: dict[str, Any] = {}
        for name, metric in metrics.items():
            if _is_torchmetrics(metric):
                self._foreign[name] = _borrow(metric, device, ctx)
            else:
                self._own[name] = metric
        place = "cpu" if device.type == "mps" else device
        self._sums = {
            name: torch.full((metric.num_sums,), _START[metric.reduction], dtype=torch.float64, device=place)
            for name, metric in self._own.items()
        }

    def add(self, outputs: Any, targets: Any, num_samples: int) -> None:
        """Measure a batch.

        Args:
            outputs: The model's.
            targets: What they should be.
            num_samples: Samples of the batch, at least one.
        """
        self._num_samples += num_samples
        for name, metric in self._own.items():
            given, sums = metric.measure(outputs, targets), self._sums[name]
            if not isinstance(given, Tensor) or given.shape != sums.shape:
                raise UsageError(
                    f"metric {name!r}: measure() returned {tuple(given.shape) if isinstance(given, Tensor) else given!r}, and num_sums is {metric.num_sums}",
                    hint="return a tensor of shape (num_sums,)",
                )
            combine = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum}[metric.reduction]
            self._sums[name] = combine(sums, to_double(given.detach()).to(sums.device))
        for metric in self._foreign.values():
            metric.update(outputs, targets)

    def conclude(self) -> dict[str, float]:
        """Add up over the ranks, and return the results by name.

        Raises:
            DataError: No rank has had a sample.

        Collective: every rank.
        """
        results: dict[str, Result] = {}
        total = self._num_samples
        for op in ("sum", "min", "max"):
            sums: Any = {name: self._sums[name] for name, metric in self._own.items() if metric.reduction == op}
            if op == "sum":
                sums = {"samples": total, "metrics": sums}
            if op == "sum" and self._ctx is not None and self._ctx.rank not in self._ctx.data_ranks:
                # Another rank counts the same samples.
                sums = unflatten(sums, [leaf * 0 for _, leaf in flatten(sums)])
            if sums and self._ctx is not None:
                sums = all_reduce(sums, op, group=group_of(self._ctx))
            if op == "sum":
                total, sums = sums["samples"], sums["metrics"]
                if total == 0:
                    raise DataError(
                        "evaluate: the data set has no sample, and a mean over none is no number",
                        hint="check the path or the filter of the data set",
                    )
            results |= {name: _read_result(name, self._own[name].conclude(value.cpu())) for name, value in sums.items()}
        for name, metric in self._foreign.items():
            with warnings.catch_warnings():
                # A rank that had no sample never called update(), and need not.
                warnings.filterwarnings("ignore", message=".*was called before the ``update`` method.*")
                results[name] = _read_result(name, metric.compute())
        return _flatten({name: results[name] for name in self._names})


def _is_torchmetrics(metric: Any) -> bool:
    found = sys.modules.get("torchmetrics")
    return found is not None and isinstance(metric, (found.Metric, found.MetricCollection))


def check_metrics(metrics: Mapping[str, Any]) -> None:
    """Refuse what can't be measured, before anything is computed for it.

    Args:
        metrics: By name.

    Raises:
        UsageError: There is none, or something is not a metric.
    """
    if not metrics:
        raise UsageError("no metrics", hint="metrics={'accuracy': Accuracy()}, say")
    for name, metric in metrics.items():
        if _is_torchmetrics(metric) or (isinstance(metric, Metric) and not isinstance(metric, type)):
            continue
        hint = "pass one of rankwise.data.metrics or torchmetrics, or an object with their four attributes"
        if isinstance(metric, type):
            hint = f"give an instance: {metric.__name__}()"
        elif callable(metric):
            hint = "wrap a function of outputs and targets that gives a value for each sample: rankwise.data.metrics.Mean(function)"
        raise UsageError(f"metrics[{name!r}] is a {type(metric).__name__}, not a metric", hint=hint)


def _borrow(metric: Any, device: torch.device, ctx: RankContext | None) -> Any:
    """Return a copy of a torchmetrics metric, empty, that gathers over the ranks of this job; the user's stays as it was."""
    own = copy.deepcopy(metric).to(device)
    own.reset()
    parts = own.values(copy_state=False) if hasattr(own, "values") else [own]
    for part in [inner for outer in parts for inner in outer.modules()]:
        if hasattr(part, "dist_sync_fn"):
            part.distributed_available_fn = lambda: ctx is not None and ctx.world_size > 1
            part.dist_sync_fn = _Gatherer(ctx) if ctx is not None else None
    return own


@final
class _Gatherer:
    """Stands where torchmetrics has its own gathering, which a rank without samples confuses: it has neither shape nor dtype."""

    def __init__(self, ctx: RankContext) -> None:
        self._ctx = ctx

    def __call__(self, state: Tensor, group: Any = None) -> list[Tensor]:  # noqa: ARG002 - the job's ranks
        answers = cast("list[Tensor]", all_gather(state, group=group_of(self._ctx)))
        rows = [answers[rank] for rank in self._ctx.data_ranks]
        filled = [row for row in rows if row.numel()]
        return [row.to(state.device) for row in (filled or rows)]

    def __deepcopy__(self, memo: Any) -> _Gatherer:
        return self


def _read_result(name: str, value: Any) -> Result:
    try:
        if isinstance(value, dict):
            return {str(inner): float(one) for inner, one in value.items()}
        if isinstance(value, Tensor) and value.numel() > 1:
            return {str(number): float(one) for number, one in enumerate(value.flatten())}
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # None, text, a tensor without an element
        raise UsageError(
            f"metric {name!r}: the result is {value!r}", hint="return a number, or numbers by name"
        ) from None


def _flatten(results: Mapping[str, Result]) -> dict[str, float]:
    flat: dict[str, float] = {}
    for name, result in results.items():
        if isinstance(result, dict):
            flat |= {f"{name}/{inner}": value for inner, value in result.items()}
        else:
            flat[name] = result
    return flat
