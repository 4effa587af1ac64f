"""Copies of the shards on a disk, from which another server takes over what a server that died has held."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, final

import torch

from rankwise.base.errors import CollectiveError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rankwise.parallel.servers.shard import Shard


@final
class Recovery:
    """Writes a shard now and then, and reads one that another server has written.

    Args:
        folder: Shared by the servers' hosts; made as needed.
        save_every: Updates between two copies of a shard.
        make_shard: Given a shard's number and its workers, makes it with first values.

    Raises:
        UsageError: The folder can't be made.
    """

    def __init__(
        self, folder: str | Path, save_every: int, make_shard: Callable[[int, Iterable[int]], Shard]
    ) -> None:
        self._folder, self._save_every, self._make_shard = Path(folder), save_every, make_shard
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"recovery_folder={str(folder)!r} can't be made: {error.strerror}") from None

    def _find(self, number: int) -> Path:
        return self._folder / f"shard-{number}.pt"

    def save(self, number: int, shard: Shard) -> None:
        """Write a shard, whose lock is held; the copy before it stays until this one is whole."""
        path = self._find(number)
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            torch.save(shard.state(), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)

    def save_if_due(self, number: int, shard: Shard) -> None:
        """Write a shard after each so many updates."""
        if shard.version % self._save_every == 0:
            self.save(number, shard)

    def load(self, number: int, workers: Iterable[int]) -> Shard:
        """Return a shard as its server has saved it last.

        Raises:
            CollectiveError: There is no copy, or it can't be read.
        """
        path = self._find(number)
        try:
            state = torch.load(path, weights_only=True)
        except (OSError, RuntimeError, EOFError) as error:
            raise CollectiveError(
                f"shard {number} can't be taken over from {path}: {error}", hint="recovery_folder must be on a file system that all servers share"
            ) from None  # fmt: skip
        shard = self._make_shard(number, workers)
        shard.restore(state)
        return shard
