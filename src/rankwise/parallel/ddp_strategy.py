"""The strategy of DistributedDataParallel: each rank holds the whole model, and gradients are averaged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from rankwise.parallel.checked_ddp import CheckedDDP
from rankwise.parallel.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    import torch
    from torch import Tensor
    from torch.nn.parallel import DistributedDataParallel

    from rankwise.runtime.context import RankContext


@final
class Replicated(Strategy):
    """A model in DistributedDataParallel, torch's own or one of those that ``apply_ddp`` returns."""

    why_equal = "synced BatchNorm"

    def __init__(self, ddp: DistributedDataParallel, ctx: RankContext | None) -> None:
        super().__init__(ddp, ddp.module, ctx)
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
