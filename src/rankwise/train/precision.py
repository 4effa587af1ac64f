"""Mixed precision: forward passes in fewer bits, weights in all of them (Micikevicius et al., arXiv:1710.03740)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, final

import torch

from rankwise.parallel.dtensors import ShardedScaler
from rankwise.parallel.strategy_lookup import differs_by_rank

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch.distributed as dist
    from torch import Tensor, nn
    from torch.optim import Optimizer

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@final
class Precision:
    """How a step computes: autocast around the forward pass, and for fp16 a scaler around the gradients.

    Args:
        name: "fp32", "bf16" or "fp16".
        device: Where.
        model: What computes.
        group: The ranks, some of whose gradients may overflow where others' don't: if the model is sharded.
    """

    def __init__(
        self,
        name: Literal["fp32", "bf16", "fp16"],
        device: torch.device,
        model: nn.Module,
        group: dist.ProcessGroup,
    ) -> None:
        self._dtype, self._kind = _DTYPES.get(name), device.type
        #: Keeps small fp16 gradients from vanishing; a part of the checkpoint. None where none is needed.
        self.scaler: torch.amp.GradScaler | None = None
        if name == "fp16":
            self.scaler = (
                ShardedScaler(device.type, group) if differs_by_rank(model) else torch.amp.GradScaler(device.type)
            )

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        return nullcontext() if self._dtype is None else torch.autocast(self._kind, dtype=self._dtype)

    def backward(self, loss: Tensor) -> None:
        """Compute gradients; with a scaler they are too great until ``unscale``."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def scale(self, factor: float) -> float | Tensor:
        """Return a factor of a loss, times the scaler's scale."""
        if self.scaler is None:
            return factor
        return self.scaler.scale(torch.tensor(factor, device=self._kind))

    def unscale(self, optimizer: Optimizer) -> None:
        """Make the gradients what they are."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """Move the weights; with a scaler not where a gradient has overflown: on no rank, as gradients are averaged before."""
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()
