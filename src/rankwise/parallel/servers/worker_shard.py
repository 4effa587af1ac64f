"""What a worker has of one shard: its buffers for values and gradients, and how far it has come with its server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch

from rankwise.parallel.servers.layout import take_part

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from rankwise.parallel.servers.layout import ShardLayout
    from rankwise.parallel.servers.link import Link, Message


@final
@dataclass(slots=True)
class Position:
    """Where a worker stands with one shard.

    Attributes:
        shard: Its number.
        link: To its server.
        clock: Of the next gradient.
        version: What was pulled last.
        last: The gradient that was pushed last: its body is as it was until the next one is made.
        num_lost: How many gradients a server took with it when it died.
    """

    shard: int
    link: Link
    clock: int = 0
    version: int = 0
    last: Message | None = None
    num_lost: int = 0


@final
class Part:
    """What a worker has of one shard: a buffer that it pulls into, and one that it pushes from."""

    def __init__(self, layout: ShardLayout, parameters: Mapping[str, nn.Parameter]) -> None:
        self.layout = layout
        self.values, self.gradients = layout.allocate(), layout.allocate()
        self._pairs = [(parameters[one.name], one) for one in layout.pieces]
        self._value_views, self._gradient_views = layout.view(self.values), layout.view(self.gradients)

    def write_back(self) -> None:
        """Copy what was pulled into the model."""
        with torch.no_grad():
            for (parameter, piece), view in zip(self._pairs, self._value_views, strict=True):
                target = parameter.data
                if target.is_contiguous():
                    take_part(target, piece).copy_(view, non_blocking=True)
                else:  # channels_last, say
                    whole = target.contiguous()
                    take_part(whole, piece).copy_(view)
                    target.copy_(whole)

    def collect(self, factor: float) -> list[int]:
        """Copy the gradients into the buffer, times a factor; return the pieces that have none."""
        missing: list[int] = []
        for place, ((parameter, piece), view) in enumerate(
            zip(self._pairs, self._gradient_views, strict=True)
        ):
            if parameter.grad is None:
                view.zero_()
                missing.append(place)
                continue
            gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            view.copy_(take_part(gradient.contiguous(), piece))
        if factor != 1:
            for part in self.layout.view_segments(self.gradients):
                part.mul_(factor)
        return missing
