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


def check_rules(  # noqa: PLR0913 - what parameter_server was given
    rules: Rules, staleness: Any, *, num_servers: int, num_workers: int, coordinator: bool, has_tables: bool, save_every: int,
    recovery_folder: Any, replicate: bool, rank: int,
) -> None:  # fmt: skip
    """Refuse what makes no sense together; ``staleness`` is as it was given."""
    mode, norm, backup = rules.mode, rules.clip_norm, rules.backup_workers
    clips_together = norm is not None and not rules.is_async
    is_lag = isinstance(staleness, int) and not isinstance(staleness, bool) and staleness >= 0
    cases = (
        (mode not in MODES, f"mode={mode!r} is not one of {', '.join(MODES)}", 'mode="sync" equals one process'),
        (mode != "stale" and staleness is not None, f"staleness={staleness} with mode={mode!r}", 'pass mode="stale", or no staleness'),
        (mode == "stale" and not is_lag, f"mode='stale' with staleness={staleness!r}",
         "pass by how many updates a worker may be ahead: staleness=2; 0 equals sync"),
        (backup and mode != "sync", f"backup_workers={backup} with mode={mode!r}", 'only mode="sync" waits for all workers'),
        (not 0 <= backup < num_workers, f"backup_workers={backup} of {num_workers} workers",
         "at least one worker must be waited for: 0 to workers - 1"),
        (norm is not None and not norm > 0, f"clip_norm={norm} is not a norm above 0", "None: gradients are not clipped"),
        (coordinator and not rules.is_async, f"coordinator=True with mode={mode!r}",
         'scheduled functions reach workers unevenly: mode="async"'),
        (not rules.timeout_s > 0, f"timeout_s={rules.timeout_s} is not a number of seconds above 0", "None: that of init()"),
        (clips_together and has_tables,
         f"clip_norm={norm} with mode={mode!r} and served embeddings: their servers do not know the norm of the whole gradient",
         'mode="async" clips on the workers; or leave out clip_norm'),
        (save_every < 1, f"save_every={save_every} is not a number of updates", "1 or more: a copy after each so many"),
        (clips_together and (replicate or recovery_folder is not None), f"recovery_folder or replicate with clip_norm={norm}, mode={mode!r}",
         "what was taken over is some updates behind, and the norm of one update is not known then: leave out one of them"),
        (replicate and (num_servers < 2 or recovery_folder is not None),
         f"replicate=True with {num_servers} servers and recovery_folder={recovery_folder!r}",
         "another server holds the replicas, so there must be two; and it replaces copies in a folder"),
    )  # fmt: skip
    for is_wrong, what, hint in cases:
        if is_wrong:
            raise UsageError(what, rank=rank, hint=hint)
