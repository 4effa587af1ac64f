"""How updates are made: what the caller of ``parameter_server`` chooses, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from rankwise.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

MODES = ("sync", "async", "stale")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How a shard makes its updates, as given to ``parameter_server``; ``staleness`` is 0 in modes that have none."""

    mode: str
    staleness: int
    backup_workers: int
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    table_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    scheduler: Callable[[torch.optim.Optimizer], Any] | None
    clip_norm: float | None
    timeout_s: float

    @property
    def is_async(self) -> bool:
        """Whether each gradient is applied when it arrives."""
        return self.mode == "async"

    @property
    def reads_in_place(self) -> bool:
        """Whether no update can come between a worker's pull and its push, so that the buffer itself may be sent."""
        return self.mode == "sync" and self.backup_workers == 0


def check_rules(
    mode: str, staleness: Any, backup_workers: int, num_workers: int, clip_norm: float | None
) -> int:
    """Refuse what makes no sense together; return the staleness."""
    if mode not in MODES:
        raise UsageError(
            f"mode={mode!r} is not one of {', '.join(MODES)}", hint='mode="sync" equals one process'
        )
    if mode != "stale" and staleness is not None:
        raise UsageError(
            f"staleness={staleness} with mode={mode!r}", hint='pass mode="stale", or no staleness'
        )
    if mode == "stale" and (
        staleness is None or isinstance(staleness, bool) or not isinstance(staleness, int) or staleness < 0
    ):
        raise UsageError(
            f"mode='stale' with staleness={staleness!r}",
            hint="pass by how many updates a worker may be ahead: staleness=2; 0 equals sync",
        )
    if backup_workers and mode != "sync":
        raise UsageError(
            f"backup_workers={backup_workers} with mode={mode!r}",
            hint='only mode="sync" waits for all workers',
        )
    if not 0 <= backup_workers < num_workers:
        raise UsageError(
            f"backup_workers={backup_workers} of {num_workers} workers",
            hint="at least one worker must be waited for: 0 to workers - 1",
        )
    if clip_norm is not None and not clip_norm > 0:
        raise UsageError(
            f"clip_norm={clip_norm} is not a norm above 0", hint="None: gradients are not clipped"
        )
    return staleness or 0
