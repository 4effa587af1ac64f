"""What a shard holds of a model's dense parameters: one flat buffer, and the optimizer over it."""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from rankwise.parallel.servers.shard import Gradient, Held

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwise.parallel.servers.layout import ShardLayout
    from rankwise.parallel.servers.shard import Rules


@final
class DenseValues(Held):
    """Parameters of one shard."""

    def __init__(self, layout: ShardLayout, rules: Rules) -> None:
        self.layout, self.buffer = layout, layout.allocate()
        super().__init__([nn.Parameter(view) for view in layout.view(self.buffer)], rules.optimizer, rules)
        self._snapshot: Tensor | None = None
        self._free: list[Tensor] = []

    def take_buffer(self) -> Tensor:
        """Return a buffer for a gradient; an update gives it back."""
        return self._free.pop() if self._free else self.layout.allocate()

    def release(self, gradient: Gradient) -> None:
        """Take a gradient's buffer back."""
        self._free.append(gradient.buffer)

    def read(self) -> Tensor:
        """Return the parameters' bytes, which stay as they are until they are sent."""
        if self.rules.reads_in_place:
            return self.buffer
        if self._snapshot is None:
            self._snapshot = self.buffer.clone()
        return self._snapshot

    def update(self, gradients: list[Gradient], total: float) -> None:
        """Make one step with the average of some gradients, whose weights sum up to ``total``."""
        if not self.parameters:
            return
        first = gradients[0].buffer
        average = self.layout.view_segments(first)
        if (share := gradients[0].weight / total) != 1:  # a pass over all of it
            for part in average:
                part.mul_(share)
        for other in gradients[1:]:
            for part, addend in zip(average, self.layout.view_segments(other.buffer), strict=True):
                part.add_(addend, alpha=other.weight / total)
        missing = frozenset.intersection(*(one.missing for one in gradients))
        for place, (parameter, view) in enumerate(zip(self.parameters, self.layout.view(first), strict=True)):
            parameter.grad = None if place in missing else view
        self._clip(average)
        self.step()
        self._snapshot = None

    def _clip(self, average: list[Tensor]) -> None:
        """Scale the average down, if its norm is above the bound; it is the whole model's: there is one server then."""
        bound = self.rules.clip_norm
        if bound is None or self.rules.is_async:
            return
        norm = sum(float(part.double().square().sum()) for part in average) ** 0.5
        # As torch's clip_grad_norm_.
        factor = bound / (norm + 1e-6)
        if factor < 1:
            torch._foreach_mul_(average, factor)

    def resume(self, states: Mapping[str, Mapping[str, Any]], num_updates: int) -> None:
        """Continue from an optimizer's state of whole parameters, by name, and from where the schedule was."""
        if self.optimizer is None:
            return
        for parameter, piece in zip(self.parameters, self.layout.pieces, strict=True):
            if piece.name in states:
                self.optimizer.state[parameter] = {
                    # What is no number for each element is kept whole.
                    key: piece.take(value.detach().cpu()).clone() if isinstance(value, Tensor) and value.dim() else deepcopy(value)
                    for key, value in states[piece.name].items()
                }  # fmt: skip
        if self.scheduler is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of steps without the optimizer's
                for _ in range(num_updates):
                    self.scheduler.step()

    def list_values(self) -> list[Tensor]:
        """Return clones of the values: ``torch.save`` takes no two dtypes of one buffer."""
        return [one.clone() for one in super().list_values()]
