"""How a step runs on a model that is spread over the ranks: all that a Trainer and ``accumulate`` know of DDP, FSDP2 and tensor parallelism.

Pipelines have theirs in ``pipeline_strategy.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import repeat
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rankwise.base.errors import CollectiveError, UsageError
from rankwise.parallel.checked_ddp import CheckedDDP
from rankwise.parallel.dtensors import add_up, total_norm
from rankwise.runtime.context import RankContext, current, find_current
from rankwise.runtime.signature import locate, show_site

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


Micro = TypeVar("Micro")
_BROADCAST_BYTES = 250 << 20  # torch's
#: Models whose gradients stay whole until a step's last backward.
_deferring: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
#: Micro-batches of a step that was left while its gradients were not exchanged.
_left: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


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
    """A spread model, as a loop sees it: every rank runs the same program.

    What a class below does otherwise, it overrides.

    Args:
        model: What is called: ``model(inputs)``.
        ctx: The job; None: the one that ``init()`` joined, if one is needed.
        module: What is inside, if ``model`` is a wrapper.

    Attributes:
        needs_equal_numbers: Whether every forward is a collective, so that all ranks need equally many micro-batches.
        why_equal: By what, for the error.
        instead_of_loops: What to do instead, if a loop's body can't compute forward and backward by itself.
    """

    needs_equal_numbers = False
    why_equal = ""
    instead_of_loops: str | None = None

    def __init__(self, model: nn.Module, ctx: RankContext | None, module: nn.Module | None = None) -> None:
        self.model, self.ctx, self.module = model, ctx, model if module is None else module

    def forward_backward(self, group: Iterable[Any], loss: StepLoss, backward: Callable[[Tensor], None]) -> None:
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
        """Note that a step was left after so many micro-batches whose gradients were not exchanged."""

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


@final
class Replicated(Strategy):
    """A model in DistributedDataParallel, torch's own or one of those that ``apply_ddp`` returns."""

    why_equal = "synced BatchNorm"

    def __init__(self, ddp: DistributedDataParallel, ctx: RankContext | None) -> None:
        super().__init__(ddp, ctx, ddp.module)
        self._ddp = ddp
        self._watch = ddp.watch if isinstance(ddp, CheckedDDP) else None
        self.needs_equal_numbers = self._watch is not None and self._watch.has_synced_batchnorm

    def deferring(self) -> AbstractContextManager[Any]:
        """Return DDP's ``no_sync()``."""
        return self._ddp.no_sync()  # type: ignore[no-any-return]

    def note_left(self, number: int) -> None:
        """Let the next forward raise, unless the gradients were dropped."""
        if self._watch is not None:
            self._watch.num_left_unsynced = number

    def make_zero(self, outputs: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return a zero that depends on all parameters as well: DDP waits for the gradient of each."""
        unused = [one.reshape(-1)[:0] for one in self.module.parameters() if one.requires_grad]
        return super().make_zero([*outputs, *unused], device)

    def forget(self) -> None:
        """Forget a step that was left by an error."""
        if self._watch is not None:
            self._watch.num_left_unsynced = 0


def defer_reduction(model: nn.Module) -> None:
    """Let a model's gradients stay whole, on each rank, until the last backward of a step."""
    _deferring[model] = True


def is_sharded(model: nn.Module) -> bool:
    """Whether a model was given to ``fully_shard``, or has DTensors for parameters."""
    return isinstance(model, FSDPModule) or any(isinstance(one, DTensor) for one in model.parameters())


def list_innermost(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are gathered as one, with none inside that is gathered apart; none if FSDP2 has not sharded the model."""
    gathered = [one for one in model.modules() if isinstance(one, FSDPModule)]
    return [one for one in gathered if sum(isinstance(other, FSDPModule) for other in one.modules()) == 1]


@final
class Sharded(Strategy):
    """A model whose every forward is a collective; gradients are averaged, as shards."""

    needs_equal_numbers, why_equal = True, "sharded parameters"

    def note_left(self, number: int) -> None:
        """Let the next step raise, if FSDP2 holds gradients that are no shards yet: ``zero_grad()`` doesn't reach these."""
        first = next((one for one in self.model.parameters() if isinstance(one, DTensor)), None)
        has_copies = first is not None and any(one.is_replicate() for one in first.placements)
        if isinstance(self.model, FSDPModule) and (has_copies or self.model in _deferring):
            _left[self.model] = number

    def forget(self) -> None:
        """Drop what a step that was left by an error has added up, wherever FSDP2 holds it (torch 2.8 to 2.15)."""
        _left.pop(self.model, None)
        for module in self.model.modules():
            state: Any = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            for group in groups:
                if group is not None:
                    group._partial_reduce_output = None
                    getattr(group, "_partial_reduce_output_layout", {}).clear()
                    for one in group.fsdp_params:
                        if hasattr(one, "_unsharded_param"):
                            one._unsharded_param.grad = None  # where torch 2.15 adds up
                        with suppress(AttributeError):  # there it can only be read
                            one.unsharded_accumulated_grad = None

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Do not average copies of shards in this block; after ``defer_reduction``, nothing."""
        number = _left.pop(self.model, 0)
        if number:
            raise CollectiveError(
                f"the last accumulation was left after {number} micro-batch(es), and the sharded model still holds their gradients",
                rank=None if self.ctx is None else self.ctx.rank,
                hint="let `for micro in accumulate(...)` run to its end, on every rank",
            )
        self._set_exchange(False)  # noqa: FBT003 - as torch's
        try:
            yield
        finally:
            self._set_exchange(True)  # noqa: FBT003 - the same

    def _set_exchange(self, is_on: bool) -> None:  # noqa: FBT001 - as torch's
        if isinstance(self.model, FSDPModule) and self.model in _deferring:
            self.model.set_requires_gradient_sync(is_on)
        elif isinstance(self.model, FSDPModule):
            self.model.set_requires_all_reduce(is_on)

    def settle(self) -> None:
        """Add up what sequence parallelism leaves in parts.

        Collective: every rank.
        """
        for one in self.model.parameters():
            if isinstance(one.grad, DTensor):
                one.grad = add_up(one.grad)


def deal(strategy: Strategy, micro_batches: Iterable[Micro], ctx: RankContext | None) -> Iterator[Micro]:
    """Yield micro-batches; all but the last in the strategy's ``deferring()``.

    Raises:
        UsageError: There is no micro-batch.
        CollectiveError: Every forward is a collective, and the ranks have different numbers of micro-batches.
    """
    ctx = ctx or find_current()
    rank = None if ctx is None else ctx.rank
    length = len(micro_batches) if isinstance(micro_batches, Sized) else None
    # A loader's step has as many on every rank by its plan: no need to ask them at each step.
    is_planned = getattr(micro_batches, "as_many_on_every_rank", False)
    if strategy.needs_equal_numbers and length is not None and not is_planned:
        _compare_numbers(strategy, length, ctx or current())
    number, is_last = 0, False
    try:
        for micro, ends in (
            _mark_end(micro_batches) if length is None else zip(micro_batches, repeat(False))  # noqa: FBT003 - what is repeated
        ):
            number += 1
            is_last = ends or number == length
            if is_last:
                yield micro
                strategy.settle()
                return
            # Around forward and backward: DDP decides in the forward whether the backward will average.
            with strategy.deferring():
                yield micro
    except GeneratorExit:
        # The loop was left. What was accumulated is this rank's own, and would go into a step as if it were the
        # average.
        if not is_last:
            strategy.note_left(number)
        raise
    if number == 0:
        raise UsageError(
            "accumulate() got no micro-batch, and the other ranks would wait for this one",
            rank=rank,
            hint="a rank without samples passes one empty micro-batch: [(inputs[:0], targets[:0])]",
        )
    raise UsageError(
        f"accumulate() got {number} micro-batches of a container whose len() is {length}",
        rank=rank,
        hint="pass an iterator, whose length is not checked",
    )


def _mark_end(source: Iterable[Micro]) -> Iterator[tuple[Micro, bool]]:
    """Yield each with whether it is the last, which is known when the next one was asked for."""
    held: list[Micro] = []
    for micro in source:
        if held:
            yield held.pop(), False
        held.append(micro)
    if held:
        yield held.pop(), True


def _compare_numbers(strategy: Strategy, number: int, ctx: RankContext) -> None:
    answers = ctx.control.compare(
        f"micro-batches\t{number}", what=f"accumulate at {show_site(locate())} (how many micro-batches?)"
    )
    if answers is not None:
        held = ", ".join(
            f"rank {rank} {text.partition(chr(9))[2]}" for rank, text in zip(ctx.control.ranks, answers, strict=True)
        )
        raise CollectiveError(
            f"with {strategy.why_equal} every rank must run the same number of micro-batches: {held}",
            rank=ctx.rank,
            hint="pass empty ones on the ranks that have fewer: (inputs[:0], targets[:0])",
        )


def share_values(values: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Give all ranks of a group the values of its first.

    Collective: every rank of the group.
    """
    tensors = [one.detach() for one in values]
    if not tensors or dist.get_world_size(group) < 2:
        return
    # As bytes: so it goes with every dtype, and those of different dtypes go together.
    whole = [one.contiguous() for one in tensors]
    flat = [one.reshape(-1).view(torch.uint8) for one in whole]
    dist._broadcast_coalesced(group, flat, _BROADCAST_BYTES, 0)
    for one, shared in zip(tensors, whole, strict=True):
        if shared.data_ptr() != one.data_ptr():
            one.copy_(shared)


def move_tensors(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Move tensors in place, so that optimizers keep theirs; DTensors are where they belong."""
    for one in tensors:
        if not isinstance(one, DTensor) and one.device != device:
            one.data = one.data.to(device)
