"""How a model is spread over the ranks, and how a step runs on it: all that a Trainer and ``accumulate`` know of DDP and its likes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rankwise.parallel.dtensors import total_norm
from rankwise.parallel.micro_batches import deal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

    from rankwise.runtime.context import RankContext

_BROADCAST_BYTES = 250 << 20  # torch's


class StepLoss(Protocol):
    """The loss of one micro-batch; a strategy calls it, or where forward and backward are cut up, its parts."""

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Evaluate, note, and return the scalar to be differentiated, weighed."""
        ...

    def evaluate(self, model: nn.Module, batch: Any) -> Any:
        """Return what the user's loss function returns: a mean over the batch's samples, a sum and its count, or a dict of these."""
        ...

    def factor(self, returned: Any) -> Any:
        """Return what such a loss of the whole micro-batch must be multiplied with before it is differentiated."""
        ...

    def note(self, returned: Any) -> None:
        """Note it.

        Collective: every rank, after the same micro-batch.
        """
        ...


class Strategy:
    """A spread model, as a loop sees it: every rank runs the same program. What a class below does otherwise, it overrides.

    Args:
        model: What is called: ``model(inputs)``.
        module: The model itself, without a wrapper.
        ctx: The job; None: the one that ``init()`` joined, if one is needed.

    Attributes:
        model: As given.
        module: As given.
        ctx: As given.
        needs_equal_numbers: Whether every forward is a collective, so that all ranks need equally many micro-batches.
        why_equal: By what, for the error.
        instead_of_loops: What to do instead, if a loop's body can't compute forward and backward by itself.
    """

    needs_equal_numbers = False
    why_equal = ""
    instead_of_loops: str | None = None

    def __init__(self, model: nn.Module, module: nn.Module, ctx: RankContext | None) -> None:
        self.model, self.module, self.ctx = model, module, ctx

    def forward_backward(
        self, group: Iterable[Any], loss: StepLoss, backward: Callable[[Tensor], None]
    ) -> None:
        """Compute the gradients of one step, averaged over the ranks that share the data.

        Args:
            group: The step's micro-batches.
            loss: Takes the model and a micro-batch; returns the scalar to be differentiated, weighed.
            backward: Differentiates it.

        Collective: every rank.
        """
        for batch in deal(self, group, self.ctx):
            backward(loss(self.model, batch))

    def deferring(self) -> AbstractContextManager[Any]:
        """Return the context of a micro-batch that is not its step's last: its gradients stay on this rank."""
        return nullcontext()

    def settle(self) -> None:
        """Complete the gradients after a step's last backward.

        Collective: every rank, if they are sharded.
        """

    def note_left(self, number: int) -> None:
        """Hear that a step was left after so many micro-batches whose gradients were not exchanged."""

    def make_zero(self, outputs: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return a zero that depends on a forward's outputs: for a micro-batch of no samples, whose backward the others wait for."""
        zero = torch.zeros((), device=device)
        for one in outputs:
            zero = zero + one.sum().to(zero.dtype) * 0
        return zero

    def total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm of the whole model's gradients, or of as many other tensors: a scalar, the same on every rank.

        Collective: every rank, if they are sharded.
        """
        return total_norm(gradients)

    def share_buffers(self) -> None:
        """Give all copies of the model the buffers of the first.

        Collective: every rank.
        """
        if self.ctx is not None:
            share_values(self.module.buffers(), self.ctx.group)

    def forget(self) -> None:
        """Forget a step that was left by an error."""

    def state_of(self) -> nn.Module:
        """Return what a checkpoint takes for the model."""
        return self.model


def share_values(values: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Give all ranks of a group the values of its first.

    Collective: every rank of the group.
    """
    tensors = [one.detach() for one in values]
    if not tensors or dist.get_world_size(group) < 2:
        return
    # As bytes: so it goes with every dtype, and those of different dtypes go together.
    whole = [one.contiguous() for one in tensors]
    dist._broadcast_coalesced(
        group, [one.reshape(-1).view(torch.uint8) for one in whole], _BROADCAST_BYTES, 0
    )
    for one, shared in zip(tensors, whole, strict=True):
        if shared.data_ptr() != one.data_ptr():
            one.copy_(shared)


def move_tensors(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Move tensors in place, so that optimizers keep theirs; DTensors are where they belong."""
    for one in tensors:
        if not isinstance(one, DTensor) and one.device != device:
            one.data = one.data.to(device)
