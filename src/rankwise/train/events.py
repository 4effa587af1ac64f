"""What a training tells those that listen: how it began, each report, each evaluation, how it ended.

Facts only, standard library only: loggers and `rankwise compare` read them without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, final

if TYPE_CHECKING:
    from collections.abc import Mapping


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """How a training began, or resumed.

    Attributes:
        step: Optimizer steps that were done before; 0 for a new training.
        num_steps: Steps of the whole training; None if not known.
        epoch: The epoch that it begins with, from 0.
        num_epochs: Epochs of the whole training; None if it ends by steps only.
        world_size: How many ranks.
        global_batch: Samples of one optimizer step over all ranks.
        settings: What else identifies a run, plain values only: precision, optimizer, learning rate, seed, device,
            versions …
        digests: A digest of the bits of each parameter, by name.
    """

    step: int
    num_steps: int | None
    epoch: int
    num_epochs: int | None
    world_size: int
    global_batch: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What happened since the last report, over all ranks.

    Attributes:
        step: Optimizer steps done since the beginning of the training.
        epoch: The epoch of the last of them, from 0.
        loss: Mean over the samples (or tokens) of the steps since the last report.
        losses: The loss of each of these steps; the last one is that of ``step``.
        epochs: The epoch of each of these steps.
        lrs: The learning rate (of the first group) with which each of these steps was made.
        grad_norms: The gradient's norm before clipping, of each; empty if not requested.
        metrics: The means of what else the loss function has returned, by name.
        samples: Samples seen since the beginning of the training.
        samples_per_s: Of the steps since the last report.
        tokens_per_s: What was counted, where the loss comes as (sum, count); None elsewhere.
        elapsed_s: Since ``fit()`` began.
        eta_s: Seconds that the rest will take at this speed; None if it is not known how much is left.
        norms: The L2 norm of each parameter, by step and name: at steps 1, 2, 4, 8 and so on, and every
            ``norms_every``; of most steps there are none.
    """

    step: int
    epoch: int
    loss: float
    losses: tuple[float, ...]
    lrs: tuple[float, ...]
    epochs: tuple[int, ...] = ()
    grad_norms: tuple[float, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    samples: int
    samples_per_s: float
    elapsed_s: float
    eta_s: float | None
    tokens_per_s: float | None = None
    norms: Mapping[int, Mapping[str, float]] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The result of one evaluation, exact over all ranks.

    Attributes:
        step: Optimizer steps done.
        epoch: The epoch of the last of them, from 0.
        metrics: By name.
        seconds: How long it took.
        is_best: Whether the monitored metric is the best so far.
    """

    step: int
    epoch: int
    metrics: Mapping[str, float]
    seconds: float
    is_best: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a training ended, or why it stopped.

    Attributes:
        step: Optimizer steps done.
        epoch: The epoch of the last of them, from 0.
        reason: "done"; else why it ended early: a notice, an early stop, an error.
        is_over: Whether nothing is left to do; False where the job is to be started again.
        elapsed_s: Since ``fit()`` began.
    """

    step: int
    epoch: int
    reason: str
    is_over: bool
    elapsed_s: float


class Logger(Protocol):
    """Records the events of a training; on rank 0 only.

    The events come in this order: one ``Started``, any number of ``Report`` and ``Evaluated``, one ``Ended``. After a
        resume there is a
    new ``Started`` with the step that it continues from: what was recorded of later steps did not happen.
    """

    def on_start(self, started: Started) -> None:
        """Called when it begins.

        Args:
            started: The beginning, or where it continues.
        """

    def on_step(self, step: int) -> None:
        """Called after each step, so it must be quick.

        Args:
            step: Optimizer steps done.
        """

    def on_report(self, report: Report) -> None:
        """Called with the steps since the last report.

        Args:
            report: What happened in them.
        """

    def on_evaluation(self, evaluated: Evaluated) -> None:
        """Called after an evaluation.

        Args:
            evaluated: Its result.
        """

    def on_end(self, ended: Ended) -> None:
        """Called at the end, also after an error; close what is open.

        Args:
            ended: How, and why.
        """
