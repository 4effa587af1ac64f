"""What a training shall be like: the numbers that a Trainer is given, checked once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, final

from rankwise.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rankwise.checkpoint.retention import Keep

#: How often something is done: after so many steps, or at the end of each epoch; None: never.
Every = int | Literal["epoch"] | None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """How long a Trainer trains, how precisely, and what it does besides.

    A *step* is an optimizer step: one global batch, over all ranks and micro-batches.

    Attributes:
        epochs: Epochs of the whole training.
        steps: Steps of the whole training; with ``epochs`` too, what comes first.
        precision: "fp32"; "bf16" or "fp16" for mixed precision (autocast; fp16 with a gradient scaler).
        clip_norm: Largest L2 norm of the gradient, over all parameters; None: not clipped.
        sync_batchnorm: Let BatchNorm see the samples of all ranks; on the CPU too.
        compile: Compile the model by ``torch.compile``; or a dict of its options.
        fused: Let torch's optimizers run fused where they can and the user has left it open; on a CPU AdamW is much
            faster.
        seed: Seeds random numbers at the start, each rank's differently, so that no two ranks draw the same dropout;
            None: left alone.
        scheduler_every: Whether the learning rate schedule moves at each "step" or each "epoch".
        log_every: Steps between two reports; the loss stays on the device until then. "auto": as many as a quarter of a
            second has.
        evaluate_every: Steps between two evaluations, or "epoch".
        save_every: Steps between two checkpoints, or "epoch"; one is written at the end and before a requeue in any
            case.
        keep: Which checkpoints stay; None: the last two, and the best if there is a ``monitor``.
        monitor: The evaluation's metric that decides which checkpoint is the best, and when to stop early.
        mode: Whether a small ("min") or a great ("max") monitor is good; None: "min" for a name with "loss" in it, else
            it must be said.
        patience: Stop after so many evaluations in a row without a better monitor; None: don't.
        min_delta: What counts as better.
        non_finite: What to do when a loss or a gradient is NaN or infinite: "stop" with an error before anything is
            saved, "skip" the step on all ranks (ten in a row are an error; thirty with fp16, whose scaler skips by
            itself), or "keep" going.
        check_replicas_every: Steps between two comparisons of the parameters over all ranks, to the bit; None: never.
        norms_every: Steps between two records of each parameter's norm, for ``rankwise compare``; None: never.
        progress: Show a progress bar on a terminal, and lines elsewhere; on rank 0.
    """

    epochs: int | None = None
    steps: int | None = None
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    clip_norm: float | None = None
    sync_batchnorm: bool = False
    compile: bool | Mapping[str, Any] = False
    fused: bool = True
    seed: int | None = 0
    scheduler_every: Literal["step", "epoch"] = "step"
    log_every: int | Literal["auto"] = "auto"
    evaluate_every: Every = "epoch"
    save_every: Every = "epoch"
    keep: Keep | None = None
    monitor: str | None = None
    mode: Literal["min", "max"] | None = None
    patience: int | None = None
    min_delta: float = 0.0
    non_finite: Literal["stop", "skip", "keep"] = "stop"
    check_replicas_every: int | None = 1000
    norms_every: int | None = 100
    progress: bool = True

    def __post_init__(self) -> None:
        if self.epochs is None and self.steps is None:
            raise UsageError(
                "TrainerConfig() has neither epochs nor steps", hint="for example TrainerConfig(epochs=10)"
            )
        for name in ("epochs", "steps", "patience", "check_replicas_every", "norms_every"):
            _check_count(name, getattr(self, name))
        if self.log_every != "auto":
            _check_count("log_every", self.log_every, may_be_none=False, or_else=' or "auto"')
        for name in ("evaluate_every", "save_every"):
            if getattr(self, name) != "epoch":
                _check_count(name, getattr(self, name), or_else=' or "epoch"')
        _check_word("precision", self.precision, ("fp32", "bf16", "fp16"))
        _check_word("scheduler_every", self.scheduler_every, ("step", "epoch"))
        self._check_monitor()
        _check_word("non_finite", self.non_finite, ("stop", "skip", "keep"))
        _check_size("clip_norm", self.clip_norm, lambda norm: norm is None or norm > 0, "a length above 0, or None")
        _check_size("min_delta", self.min_delta, lambda delta: delta >= 0, "0 or more")

    def _check_monitor(self) -> None:
        if self.mode is None and self.monitor is not None:
            if "loss" not in self.monitor.lower():
                raise UsageError(
                    f"monitor={self.monitor!r} without a mode: is a smaller value better, or a larger one?",
                    hint='mode="max" for an accuracy, mode="min" for an error',
                )
            object.__setattr__(self, "mode", "min")
        if self.mode is not None:
            _check_word("mode", self.mode, ("min", "max"))
        if self.patience is not None and self.evaluate_every is None:
            raise UsageError(
                f"patience={self.patience} with evaluate_every=None: nothing is ever evaluated",
                hint='evaluate_every="epoch", or a number of steps',
            )
        if self.patience is not None and self.monitor is None:
            raise UsageError(
                f"patience={self.patience} without a monitor: it is not known what should improve",
                hint='name a metric of the evaluation: monitor="loss"',
            )

    def settings(self) -> dict[str, Any]:
        """Return the fields as plain values, for the run's journal."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}


def list_choices(config: TrainerConfig) -> dict[str, Any]:
    """Return what is not as by default and must be the same on all ranks.

    Rank 0 alone shows progress, seeds may differ, and what compiles may be named by an address.
    """
    own = {field.name for field in fields(config) if getattr(config, field.name) != field.default}
    return {name: _plain(getattr(config, name)) for name in sorted(own - {"compile", "progress", "seed"})}


def _check_count(name: str, value: Any, *, may_be_none: bool = True, or_else: str = "") -> None:
    if value is None and may_be_none:
        return
    if type(value) is not int or value < 1:
        none = ", or None" if may_be_none else ""
        raise UsageError(f"{name}={value!r}", hint=f"a whole number, 1 or more{or_else}{none}")


def _check_size(name: str, value: Any, is_right: Callable[[Any], bool], hint: str) -> None:
    if isinstance(value, str) or not is_right(value):
        raise UsageError(f"{name}={value!r}", hint=hint)


def _check_word(name: str, value: str, words: tuple[str, ...]) -> None:
    if value not in words:
        raise UsageError(f"{name}={value!r}", hint=f"one of {', '.join(map(repr, words))}")


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
