"""Keeps the losses of some steps on the device, and adds them up over the ranks in one exchange that nobody waits for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist

from rankwise.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from rankwise.runtime.context import RankContext

#: What a loss function may return: a mean, or a sum with the number of what was summed.
Measured = Any


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The sums of some steps over all ranks.

    Attributes:
        losses: The loss of each step.
        weights: Samples or tokens of each step; empty if the losses were weighed already.
        metrics: The mean of each metric over all these steps.
        grad_norms: The gradient's norm at each step, or empty.
        extras: Other numbers of this rank that were on the device.
        proposal: What rank 0 has proposed.
        own_losses: This rank's part in the losses.
    """

    losses: list[float]
    weights: list[float]
    metrics: dict[str, float]
    grad_norms: list[float]
    extras: list[float]
    proposal: int
    own_losses: list[float]


@final
class LossAccumulator:
    """What a rank has measured since the last exchange.

    Args:
        ctx: The job.
    """

    def __init__(self, ctx: RankContext) -> None:
        self._ctx = ctx
        self._names: tuple[str, ...] | None = None
        self._clear()

    def _clear(self) -> None:
        self._values: list[Tensor] = []
        self._weights: list[Any] = []
        self._of_steps: list[Any] = []
        self._weights_of_steps: list[Any] = []
        self._grad_norms: list[Tensor] = []
        self._metrics: dict[str, list[tuple[Any, Any]]] = {}

    @property
    def num_steps(self) -> int:
        """Steps since the last exchange."""
        return len(self._of_steps)

    def forget(self) -> None:
        """Forget what was not sent: it did not happen."""
        self._clear()

    def add(self, value: Tensor, weight: Any = None) -> None:
        """Note the loss of a micro-batch.

        Args:
            value: A scalar. With a weight: a sum; without: scaled so that the mean over the ranks is the mean over the
                samples.
            weight: The number of what was summed.
        """
        self._values.append(value.detach())
        if weight is not None:
            self._weights.append(weight.detach() if isinstance(weight, torch.Tensor) else weight)

    def add_metric(self, name: str, total: Any, count: Any) -> None:
        """Note a sum and the number of what was summed."""
        self._metrics.setdefault(name, []).append(
            (
                total.detach() if isinstance(total, torch.Tensor) else total,
                count.detach() if isinstance(count, torch.Tensor) else count,
            )
        )

    def end_step(self, grad_norm: Any = None) -> None:
        """Note that an optimizer step is over."""
        if not self._values:
            raise UsageError(
                "track.step() without a loss: nothing was added since the last step",
                rank=self._ctx.rank,
                hint="call track.add(loss) for each micro-batch, with what backward was called on",
            )
        self._of_steps.append(_add_up(self._values))
        if self._weights:
            self._weights_of_steps.append(_add_up(self._weights))
        self._values, self._weights = [], []
        if grad_norm is not None:
            self._grad_norms.append(grad_norm.detach())

    def send(self, extras: list[Tensor] | None = None, *, proposal: int = 0) -> Exchange:
        """Begin to add up over the ranks, and forget.

        Args:
            extras: Scalars of this rank, to be read along.
            proposal: A number that rank 0 tells all.

        Returns:
            The exchange, to be read later.

        Collective: every rank, after the same step.
        """
        names = tuple(sorted(self._metrics))
        self._check_names(names)
        device, number = self._ctx.device, len(self._of_steps)
        parts = [_gather(self._of_steps, device).reshape(-1)]
        if self._weights_of_steps:
            parts.append(_gather(self._weights_of_steps, device).reshape(-1))
        for name in names:
            totals, counts = zip(*self._metrics[name], strict=True)
            parts += [_gather(totals, device).sum()[None], _gather(counts, device).sum()[None]]
        # Not from a tensor on the host: a GPU would be waited for.
        parts.append(torch.full((1,), proposal if self._ctx.is_main else 0, dtype=parts[0].dtype, device=device))
        exchange = Exchange(
            ctx=self._ctx,
            sums=torch.cat(parts),
            own=parts[0],
            beside=_gather([*self._grad_norms, *(extras or [])], device),
            num_steps=number,
            has_weights=bool(self._weights_of_steps),
            names=names,
            num_norms=len(self._grad_norms),
        )
        self._clear()
        exchange.begin()
        return exchange

    def _check_names(self, names: tuple[str, ...]) -> None:
        if self._names is None:
            self._ctx.agree(names, "the names of what the loss function returns")
            self._names = names
        elif names != self._names:
            raise UsageError(
                f"numbers named {list(self._names)} were noted until the last report, and {list(names)} since then",
                rank=self._ctx.rank,
                hint="note the same names in every step, by the loss function's dict or by add_metric: (0, 0) where there is nothing to count",
            )


@final
@dataclass(slots=True, kw_only=True)
class Exchange:
    """Sums on their way over the ranks and off the device.

    Attributes:
        ctx: The job.
        sums: What is added up.
        own: This rank's losses.
        beside: What is the same on all ranks, or this rank's own.
        num_steps: Steps in it.
        has_weights: Whether weights follow the losses.
        names: Of the metrics.
        num_norms: How many gradient norms stand beside.
    """

    ctx: RankContext
    sums: Tensor
    own: Tensor
    beside: Tensor
    num_steps: int
    has_weights: bool
    names: tuple[str, ...]
    num_norms: int
    _work: Any = field(default=None, init=False)
    _event: Any = field(default=None, init=False)

    def begin(self) -> None:
        """Send; the training goes on meanwhile, on the GPU too."""
        on_cuda = self.sums.device.type == "cuda"
        if self.ctx.world_size > 1:
            self.own = self.own.clone()
            # Gloo works in a thread of its own; NCCL on a stream, for which only other kernels wait.
            self._work = dist.all_reduce(self.sums, group=self.ctx.group, async_op=not on_cuda)
        if on_cuda:
            self.sums, self.own, self.beside = (
                torch.empty_like(one, device="cpu", pin_memory=True).copy_(one, non_blocking=True)
                for one in (self.sums, self.own, self.beside)
            )
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> Totals:
        """Wait for the sums, and return them."""
        if self._work is not None:
            self._work.wait()
        if self._event is not None:
            self._event.synchronize()
        sums, beside, number = self.sums.tolist(), self.beside.tolist(), self.num_steps
        losses, rest, proposal = sums[:number], sums[number:-1], int(sums[-1])
        weights: list[float] = []
        if self.has_weights:
            weights, rest = rest[:number], rest[number:]
            losses = [loss / weight if weight else 0.0 for loss, weight in zip(losses, weights, strict=True)]
        else:
            losses = [loss / self.ctx.world_size for loss in losses]
        pairs: Mapping[str, tuple[float, float]] = dict(
            zip(self.names, zip(rest[::2], rest[1::2], strict=True), strict=True)
        )
        return Totals(
            losses=losses,
            weights=weights,
            metrics={name: total / count if count else float("nan") for name, (total, count) in pairs.items()},
            grad_norms=beside[: self.num_norms],
            extras=beside[self.num_norms :],
            proposal=proposal,
            own_losses=self.own.tolist(),
        )


def _add_up(values: list[Any]) -> Any:
    """Return the sum of a step's micro-batches: on the device, if that is where they are."""
    if len(values) == 1:
        return values[0]
    try:
        return torch.stack(values).double().sum() if values[0].device.type != "mps" else torch.stack(values).sum()
    except (RuntimeError, TypeError, AttributeError):
        return sum(float(value) for value in values)


def _gather(values: Any, device: torch.device) -> Tensor:
    """Return scalars as one vector on the device; in float64, where the device has it."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    try:
        # All are scalars on the device, as a rule; looking at each would take longer than that.
        return torch.stack(values).to(device, dtype)
    except (RuntimeError, TypeError):  # numbers, shapes like (1,), several devices
        return torch.tensor([float(value) for value in values], dtype=dtype).to(device)
