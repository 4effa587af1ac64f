"""The strategy of models whose parameters are DTensors: by FSDP2, tensor parallelism, or both."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, final
from weakref import WeakKeyDictionary

from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rankwise.base.errors import CollectiveError
from rankwise.parallel.dtensors import add_up
from rankwise.parallel.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from torch import nn

    from rankwise.runtime.context import RankContext

#: Models whose gradients stay whole until a step's last backward.
_deferring: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
#: Micro-batches of a step that was left while its gradients were not exchanged.
_left: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def defer_reduction(model: nn.Module) -> None:
    """Let a model's gradients stay whole, on each rank, until the last backward of a step."""
    _deferring[model] = True


def is_sharded(model: nn.Module) -> bool:
    """Whether a model was given to ``fully_shard``, or has DTensors for parameters."""
    return isinstance(model, FSDPModule) or any(isinstance(one, DTensor) for one in model.parameters())


def list_innermost(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are gathered as one, with none inside that is gathered apart; none if FSDP2 has not sharded the model."""
    gathered = [one for one in model.modules() if isinstance(one, FSDPModule)]
    return [
        one
        for one in gathered
        if not any(isinstance(other, FSDPModule) for other in one.modules() if other is not one)
    ]


@final
class Sharded(Strategy):
    """A model whose every forward is a collective; gradients come averaged, as shards."""

    needs_equal_numbers, why_equal = True, "sharded parameters"

    def __init__(self, model: nn.Module, ctx: RankContext | None) -> None:
        super().__init__(model, model, ctx)

    def deferring(self) -> AbstractContextManager[Any]:
        """Return a context in which copies of shards are not averaged; after ``defer_reduction``, nothing is."""
        return self._deferred()

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
    def _deferred(self) -> Iterator[None]:
        number = _left.pop(self.model, 0)
        if number:
            raise CollectiveError(
                f"the last accumulation was left after {number} micro-batch(es), and the sharded model still holds their gradients",
                rank=None if self.ctx is None else self.ctx.rank,
                hint="let `for micro in accumulate(...)` run to its end, on every rank",
            )
        roots = [self.model] if isinstance(self.model, FSDPModule) else []
        setters = [
            one.set_requires_gradient_sync if self.model in _deferring else one.set_requires_all_reduce
            for one in roots
        ]
        for one in setters:
            one(False)  # noqa: FBT003 - torch's signature
        try:
            yield
        finally:
            for one in setters:
                one(True)  # noqa: FBT003 - the same

    def settle(self) -> None:
        """Add up what sequence parallelism leaves in parts.

        Collective: every rank.
        """
        for one in self.model.parameters():
            if isinstance(one.grad, DTensor):
                one.grad = add_up(one.grad)
