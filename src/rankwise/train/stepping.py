"""One optimizer step: forward and backward of its micro-batches, then gradients made right, then the weights moved."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, final

import torch

from rankwise.base.errors import NumericsError, UsageError
from rankwise.base.log import get_logger
from rankwise.data.sample_position import find_place
from rankwise.parallel.ddp import apply_ddp
from rankwise.parallel.dtensors import scale_to, to_local, total_norm
from rankwise.parallel.strategy_lookup import differs_by_rank, find_strategy, strategy_of
from rankwise.runtime.nested import flatten
from rankwise.train.compiling import Compilation
from rankwise.train.loss_weighting import LossWeighting
from rankwise.train.optimizers import choose_fused
from rankwise.train.precision import Precision

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from rankwise.data.steps import Step
    from rankwise.runtime.context import RankContext
    from rankwise.train.config import TrainerConfig
    from rankwise.train.tracking import Track

_LOGGER = get_logger(__name__)

#: A step may go wrong by a bad sample; so many in a row are a training that has gone wrong.
_MOST_SKIPPED, _MOST_SKIPPED_BY_SCALER = 10, 30


@final
class Stepping:
    """Computes steps.

    Args:
        model: Wrapped already, or not.
        optimizer: Over its parameters.
        loss: The user's loss function.
        config: Of the training.
        ctx: The job.

    Attributes:
        strategy: How the model is spread.
        model: The model itself.
        precision: In how many bits it computes.

    Collective: every rank.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Callable[[nn.Module, Any], Any],
        config: TrainerConfig,
        ctx: RankContext,
    ) -> None:
        self.strategy = find_strategy(model, ctx) or strategy_of(
            apply_ddp(model, ctx=ctx, sync_batchnorm=config.sync_batchnorm), ctx
        )
        self.model = self.strategy.module
        _check_optimizer(optimizer, self.model, ctx)
        self.precision = Precision(config.precision, ctx.device, self.model, ctx.group)
        self._compilation = Compilation(self.model, config.compile, ctx) if config.compile else None
        self._loss, self._optimizer, self._ctx = loss, optimizer, ctx
        self._clip_norm, self._skips = config.clip_norm, config.non_finite == "skip"
        self._weighting = LossWeighting(ctx)
        self._num_skipped = 0
        self._kept_buffers: list[tuple[Tensor, Tensor]] = []
        # A sparse gradient shows only when it is there.
        if config.fused and not any(getattr(module, "sparse", False) for module in self.model.modules()):
            choose_fused(optimizer)

    def run(self, step: Step, track: Track) -> None:
        """Compute the gradients of a step, and note its losses.

        Args:
            step: The step.
            track: What is told of the losses.

        Collective: every rank.
        """
        if self._skips:
            self._kept_buffers = [(one, one.clone()) for one in self.model.buffers() if one.is_floating_point()]
        self.strategy.forward_backward(step, _Loss(self, step, track), self._backward)

    def evaluate_loss(self, model: nn.Module, batch: Any) -> Any:
        """Return what the user's loss function does."""
        with self.precision.autocast():
            return self._loss(model, batch)

    def compute_loss(self, model: nn.Module, batch: Any, step: Step, track: Track) -> Tensor:
        """Return what backward is called on, and note it."""
        num_samples = _count_samples(step)
        outputs: list[Any] = []
        watch = (
            None if num_samples else model.register_forward_hook(lambda _module, _inputs, given: outputs.append(given))
        )
        with self.precision.autocast():
            returned = self._loss(model, batch)
            weighed = self._weighting.weigh(
                returned, step, num_samples, track, stand_in=lambda: self._make_zero(outputs)
            )
        if watch is not None:
            watch.remove()
        return weighed

    def find_factor(self, returned: Any, step: Step) -> Any:
        """Return what a loss is multiplied with before it is differentiated; with a scaler, the scale too."""
        factor = self._weighting.find_factor(returned, step, _count_samples(step))
        return factor if self.precision.scaler is None else self.precision.scale(factor)

    def note_loss(self, returned: Any, step: Step, track: Track) -> None:
        """Note what the loss function has returned for a micro-batch whose backward is done."""
        if self.precision.scaler is not None:
            self.precision.scale(1.0)  # it begins with the first loss, which only the last stage has
        self._weighting.note(returned, step, _count_samples(step), track)
        self._check_compilation()

    def _backward(self, loss: Tensor) -> None:
        self.precision.backward(loss)
        self._check_compilation()

    def _check_compilation(self) -> None:
        if self._compilation is not None:
            self._compilation.check()
            self._compilation = None

    def _make_zero(self, outputs: list[Any]) -> Tensor:
        """Return a zero that depends on what the model has returned: the other ranks wait for a backward through it."""
        tensors = [leaf for _, leaf in flatten(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        return self.strategy.make_zero(tensors, self._ctx.device)

    def forget(self) -> None:
        """Forget a step that was left by an error: its gradients are this rank's own."""
        self._optimizer.zero_grad()
        self._weighting.forget()
        self._kept_buffers = []
        self._num_skipped = 0
        self.strategy.forget()

    def share_buffers(self) -> None:
        """Give all ranks rank 0's buffers, as the next forward would: an evaluation before it must be that of one model.

        Collective: every rank.
        """
        if self._ctx.world_size > 1:
            self.strategy.share_buffers()

    def move_weights(self, step: Step, track: Track, before: Callable[[], object] | None = None) -> None:
        """Make the optimizer's step; note that it is done.

        Args:
            step: The step whose gradients are there.
            track: What is told.
            before: Called when the gradients are complete, before they are clipped.

        Raises:
            NumericsError: Too many steps in a row had gradients that are not finite.
        """
        self.precision.unscale(self._optimizer)
        is_needed = self._weighting.has_counts or self._clip_norm is not None or self._skips
        gradients = self._list_gradients() if is_needed else []
        self._weighting.correct(gradients, step)
        if before is not None:
            before()
            gradients = self._list_gradients()  # other tensors may stand there now
        norm = self._clip(gradients)
        is_skipped = self._skips and norm is not None and not math.isfinite(norm)
        if is_skipped:
            self._skip(float(norm or 0.0), track.steps_done + 1)
            for buffer, kept in self._kept_buffers:
                buffer.copy_(kept)  # running statistics, of a batch that is none
        else:
            self._num_skipped = 0
        if not is_skipped or self.precision.scaler is not None:  # a scaler skips by itself, and takes a smaller scale
            self.precision.step(self._optimizer)
        self._optimizer.zero_grad()
        self._kept_buffers = []
        track.step(step, grad_norm=norm)

    def _list_gradients(self) -> list[Tensor]:
        return [
            parameter.grad
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]

    def _clip(self, gradients: list[Tensor]) -> Tensor | None:
        if self._clip_norm is None and not self._skips:
            return None
        norm = self.strategy.total_norm(gradients)
        if self._clip_norm is not None:
            scale_to(gradients, self._clip_norm, norm)
        return norm

    def _skip(self, norm: float, number: int) -> None:
        """Leave the weights as they are: on all ranks alike, as the gradients have been averaged."""
        self._num_skipped += 1
        # A scaler begins with a scale that is too great for most models.
        most = _MOST_SKIPPED if self.precision.scaler is None else _MOST_SKIPPED_BY_SCALER
        if self._num_skipped >= most:
            raise NumericsError(
                f"the gradient's norm was {norm} at step {number}, and not finite at the {self._num_skipped - 1} steps before it",
                rank=self._ctx.rank,
                hint="one bad batch can be skipped, this can't: look at the data, the learning rate and the precision",
            )
        if self._ctx.is_main:
            _LOGGER.info(f"step {number} was skipped on all ranks: the gradient's norm is {norm}")


@final
class _Loss:
    """The loss of the step at hand, as a strategy asks for it.

    Args:
        stepping: Computes it.
        step: The step.
        track: What is told.
    """

    def __init__(self, stepping: Stepping, step: Step, track: Track) -> None:
        self._stepping, self._step, self._track = stepping, step, track

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return self._stepping.compute_loss(model, batch, self._step, self._track)

    def evaluate(self, model: nn.Module, batch: Any) -> Any:
        return self._stepping.evaluate_loss(model, batch)

    def factor(self, returned: Any) -> Any:
        return self._stepping.find_factor(returned, self._step)

    def note(self, returned: Any) -> None:
        self._stepping.note_loss(returned, self._step, self._track)


def _count_samples(step: Step) -> int:
    """Return how many samples the micro-batch at hand has."""
    place = find_place()
    return step.num_samples if place is None else len(place.positions)


def check_finite(model: nn.Module, step: int, ctx: RankContext) -> None:
    """Make sure that no weight is NaN or infinite.

    Args:
        model: The same on all ranks.
        step: Optimizer steps done, for the error.
        ctx: The job.

    Raises:
        NumericsError: Some are; names the parameters.

    Collective: every rank, if the model is sharded.
    """
    named = [
        (name, one.detach())
        for name, one in [*model.named_parameters(), *model.named_buffers()]
        if one.is_floating_point()
    ]
    is_fine = not named or math.isfinite(total_norm([one for _, one in named]))
    own = [] if is_fine else zip(named, to_local([one for _, one in named]), strict=True)
    spoilt = [name for (name, _), part in own if not bool(torch.isfinite(part).all())]
    if differs_by_rank(model):  # the others' parts may be fine
        answers = ctx.control.exchange(spoilt, what="naming the weights that are not finite")
        spoilt = list(dict.fromkeys(name for names in answers for name in names))
    if spoilt:  # else the sum of squares has overflown
        more = f" and {len(spoilt) - 3} more" if len(spoilt) > 3 else ""
        raise NumericsError(
            f"after step {step} weights are NaN or infinite: {', '.join(map(repr, spoilt[:3]))}{more}; they are not saved",
            rank=ctx.rank,
            hint="the losses were finite, a gradient was not (a square root of 0, a division?): non_finite='skip' leaves such steps out",
        )


def _check_optimizer(optimizer: Optimizer, model: nn.Module, ctx: RankContext) -> None:
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    known = {id(parameter) for parameter in model.parameters()}
    foreign = [tuple(one.shape) for one in held if one.requires_grad and id(one) not in known]
    if foreign:
        raise UsageError(
            f"the optimizer holds {len(held)} parameters, and {len(foreign)} of them are not the model's (shapes {str(foreign[:3])[1:-1]}):"
            " nothing would average their gradients over the ranks",
            rank=ctx.rank,
            hint="build it from this model, optimizer(model.parameters(), ...), after anything that replaces them; a loss with weights of its own is a part of the model",
        )
