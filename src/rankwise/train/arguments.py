"""What a Trainer is given, looked at before anything starts: mistakes that would show after the first epoch only."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from torch.nn.modules.loss import _Loss
from torch.optim.lr_scheduler import ReduceLROnPlateau

from rankwise.base.errors import UsageError
from rankwise.data.loader import DataLoader
from rankwise.train.config import TrainerConfig
from rankwise.train.evaluating import Evaluation

if TYPE_CHECKING:
    from rankwise.runtime.context import RankContext
    from rankwise.train.events import Logger

_EVALUATION = "Trainer(..., evaluation=rankwise.train.Evaluation(dataset, metrics, batch_size))"


def check_arguments(  # noqa: PLR0913 - one for each argument of the Trainer
    loader: Any,
    loss: Any,
    config: Any,
    *,
    optimizer: Any,
    scheduler: Any,
    evaluation: Any,
    callback_type: type,
    callbacks: tuple[Any, ...],
    loggers: tuple[Logger, ...],
    ctx: RankContext,
) -> None:
    """Refuse what can't be meant.

    Args:
        loader: The training data.
        loss: The loss function.
        config: The configuration.
        optimizer: What moves the weights.
        scheduler: Of the learning rate, or None.
        evaluation: What is evaluated, or None.
        callback_type: What callbacks are derived from.
        callbacks: Of the user.
        loggers: Of the user.
        ctx: The job.

    Raises:
        UsageError: Says what was given, and what to give.
    """
    try:
        _check_loader(loader, ctx)
        _check_kinds(loss, config, evaluation)
        _check_scheduler(scheduler, optimizer, config)
        _check_monitor(evaluation, config)
        for callback in callbacks:
            _check_callback(callback, callback_type)
        for logger in loggers:
            _check_logger(logger, callback_type)
    except UsageError as error:
        error.rank = ctx.rank
        raise


def _check_loader(loader: Any, ctx: RankContext) -> None:
    if isinstance(loader, DataLoader):
        return
    size = getattr(loader, "batch_size", None)
    example = f"global_batch={size * ctx.data_size}" if isinstance(size, int) else "global_batch=..."
    raise UsageError(
        f"the loader is a {type(loader).__module__}.{type(loader).__name__}, and it is not known which samples of a step it gives to which rank",
        hint=f"pass the data set to rankwise.DataLoader(dataset, {example}): no sampler is needed",
    )


def _check_kinds(loss: Any, config: Any, evaluation: Any) -> None:
    if isinstance(loss, _Loss) or not callable(loss):
        raise UsageError(
            f"loss is a {type(loss).__name__}, which does not know the model",
            hint="pass a function of the model and a batch: lambda model, batch: criterion(model(batch[0]), batch[1])",
        )
    if not isinstance(config, TrainerConfig):
        raise UsageError(f"config is a {type(config).__name__}", hint="config=rankwise.TrainerConfig(epochs=10, ...)")
    if evaluation is not None and not isinstance(evaluation, Evaluation):
        raise UsageError(f"evaluation is a {type(evaluation).__name__}", hint=_EVALUATION)


def _check_scheduler(scheduler: Any, optimizer: Any, config: TrainerConfig) -> None:
    if isinstance(optimizer, type) or not hasattr(optimizer, "param_groups"):
        raise UsageError(
            f"the optimizer is {_name(optimizer)}", hint="torch.optim.AdamW(model.parameters(), lr=...), say"
        )
    if scheduler is None:
        return
    if isinstance(scheduler, type) or not callable(getattr(scheduler, "step", None)):
        raise UsageError(
            f"the scheduler is {_name(scheduler)}", hint="pass the schedule itself, made from the optimizer"
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise UsageError(
            "the scheduler moves the learning rate of another optimizer",
            hint="make it from the one that the Trainer is given",
        )
    if not isinstance(scheduler, ReduceLROnPlateau):
        return
    if config.monitor is None:
        raise UsageError(
            "ReduceLROnPlateau waits for a metric, and none is named",
            hint='TrainerConfig(monitor="loss"), with an evaluation that has this metric',
        )
    if scheduler.mode != config.mode:
        raise UsageError(
            f"ReduceLROnPlateau(mode={scheduler.mode!r}) and TrainerConfig(mode={config.mode!r}) judge {config.monitor!r} in opposite ways",
            hint="use the same mode in both",
        )


def _check_monitor(evaluation: Evaluation | None, config: TrainerConfig) -> None:
    if config.monitor is None:
        return
    if evaluation is None:
        raise UsageError(f"monitor={config.monitor!r}, but there is nothing to evaluate", hint=_EVALUATION)
    # Of a metric with several results one is named "name/result".
    if config.monitor not in evaluation.metrics and config.monitor.partition("/")[0] not in evaluation.metrics:
        raise UsageError(
            f"monitor={config.monitor!r}, but the evaluation has {', '.join(map(repr, evaluation.metrics)) or 'no metrics'}",
            hint="name one of these in TrainerConfig(monitor=...), or add it to the evaluation's metrics",
        )


def _check_callback(callback: Any, callback_type: type) -> None:
    if not isinstance(callback, callback_type):
        raise UsageError(
            f"callbacks: {_name(callback)} is not a rankwise.train.Callback",
            hint="pass instances of classes derived from it; what only records belongs in loggers",
        )
    known = {name for name in vars(callback_type) if name.startswith("on_")}
    for name in dir(callback):
        if name.startswith("on_") and name not in known and callable(getattr(callback, name)):
            near = difflib.get_close_matches(name, known, n=1)
            raise UsageError(
                f"callbacks: {type(callback).__name__}.{name} would never be called",
                hint=(f"did you mean {near[0]}? " if near else "") + f"There are {', '.join(sorted(known))}",
            )


def _check_logger(logger: Any, callback_type: type) -> None:
    if isinstance(logger, (type, callback_type)) or not hasattr(logger, "on_report"):
        raise UsageError(
            f"loggers: {_name(logger)} is not a logger",
            hint="pass instances with the methods of rankwise.train.Logger; a Callback belongs in callbacks",
        )


def _name(given: Any) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"
