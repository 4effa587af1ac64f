"""Where a training is saved, when, and whether its last step is on the disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from rankwise import checkpoint
from rankwise.checkpoint.agreeing import claim
from rankwise.checkpoint.ranks import find_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from rankwise.runtime.context import RankContext
    from rankwise.train.config import TrainerConfig


@final
class Checkpoints:
    """The checkpoints of a training.

    Args:
        folder: Where they lie; None: nothing is saved.
        config: How many are kept.

    Attributes:
        folder: As given.
        is_due: Whether the next occasion is to be taken.
    """

    def __init__(self, folder: str | Path | None, config: TrainerConfig) -> None:
        self.folder, self.is_due = None if folder is None else Path(folder), False
        self._config, self._step, self._is_loaded = config, -1, False
        self._last: checkpoint.Saving | None = None

    def begin(self, ctx: RankContext) -> None:
        """Take the folder for this job.

        Raises:
            CheckpointError: Another job trains there.

        Collective: every rank.
        """
        self._is_loaded = False
        if self.folder is not None:
            claim(self.folder, find_ranks(ctx))

    def load_once(self, state: MutableMapping[str, Any]) -> None:
        """Continue from the last checkpoint, if there is one and that was not done yet.

        Collective: every rank.
        """
        if self.folder is not None and not self._is_loaded:
            self._is_loaded = True
            checkpoint.load(self.folder, state)

    def note(self, step: int) -> None:
        """Take a step for saved; -1: none is, as what was saved lacks something."""
        self._step = step

    def needs(self, step: int) -> bool:
        """Return whether a step is still to be saved."""
        return self.folder is not None and self._step != step

    def write(
        self, state: MutableMapping[str, Any], *, step: int, metrics: Mapping[str, float], background: bool
    ) -> None:
        """Save a step.

        Collective: every rank.
        """
        assert self.folder is not None  # noqa: S101 - `needs` has said so
        config = self._config
        keep = config.keep or checkpoint.Keep(
            last=2, best=1 if config.monitor else 0, metric=config.monitor or "", mode=config.mode or "min"
        )
        self._last = checkpoint.save(self.folder, state, step=step, keep=keep, metrics=metrics, background=background)
        self._step = step

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk.

        Collective: every rank.
        """
        if self._last is not None:
            self._last.wait()
