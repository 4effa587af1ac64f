"""Copies of the shards on a disk or in the host's memory, from which another process goes on with what a server that died has held."""

from __future__ import annotations

import os
import pickle
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch

from rankwise.base.errors import CheckpointError, CollectiveError, UsageError
from rankwise.base.host_memory import find_memory_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rankwise.parallel.servers.shard import Shard

_NO_SPACE_HINT = "give recovery_folder a larger file system; copies in the host's memory take twice what the servers hold (docker run --shm-size)"


@final
class Recovery:
    """Writes a shard now and then, and reads one that another process of the same run has written.

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
        self._run = ""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"recovery_folder={str(folder)!r} can't be made: {error.strerror}") from None

    def begin(self, run: str) -> None:
        """Say which run it is: copies of others are not gone on from.

        Args:
            run: The same on all servers, also on one that is started again alone; another one after a restart of the whole job.
        """
        self._run = run

    def _find(self, number: int) -> Path:
        return self._folder / f"shard-{number}.pt"

    def set_aside(self, number: int) -> None:
        """Rename a copy that another run has left to ``shard-N.previous.pt``, before the first one of this run is written.

        In the host's memory, which goes with the job, it is deleted.
        """
        path, memory = self._find(number), find_memory_folder("")
        if memory is not None and path.is_relative_to(memory):
            path.unlink(missing_ok=True)
        elif path.exists():
            path.replace(path.with_suffix(".previous.pt"))

    def save(self, number: int, shard: Shard) -> None:
        """Write a shard, whose lock is held; the copy before it stays until this one is whole.

        Raises:
            CheckpointError: It can't be written, or there is no space for it.
        """
        path, state = self._find(number), {**shard.state(), "run": self._run}
        temporary = path.with_suffix(".tmp")
        try:
            size, free = _measure(state), shutil.disk_usage(self._folder).free
            if size > free:  # a tmpfs that is filled up takes memory from all others
                raise CheckpointError(
                    f"the copy of shard {number} needs {size / 1e6:.1f} MB, and {self._folder} has {free / 1e6:.1f} MB free",
                    hint=_NO_SPACE_HINT,
                )
            with temporary.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except (OSError, RuntimeError) as error:  # torch's writer makes the latter of the former
            with suppress(OSError):
                temporary.unlink()
            raise CheckpointError(
                f"the copy of shard {number} can't be written to {path}: {error}", hint=_NO_SPACE_HINT
            ) from error

    def save_if_due(self, number: int, shard: Shard) -> None:
        """Write a shard after each so many updates."""
        if shard.version % self._save_every == 0:
            self.save(number, shard)

    def load(self, number: int, workers: Iterable[int]) -> Shard:
        """Return a shard as its server has saved it last.

        Raises:
            CollectiveError: There is no copy, it can't be read, or it is another run's.
        """
        path = self._find(number)
        try:
            state = torch.load(path, weights_only=True)
            if state.get("run") != self._run:
                raise CollectiveError(f"the copy of shard {number} in {path} is of another run", hint="two jobs that run at once need a recovery_folder each")  # fmt: skip
            shard = self._make_shard(number, workers)
            shard.restore(state)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, KeyError, ValueError) as error:
            raise CollectiveError(
                f"shard {number} can't be taken over from {path}: {error}", hint="recovery_folder must be on a file system that all servers share"
            ) from None  # fmt: skip
        return shard


def _measure(state: Any) -> int:
    """Return how many bytes the tensors of a nested state have."""
    if isinstance(state, torch.Tensor):
        return int(state.nbytes)
    if isinstance(state, dict):
        return sum(_measure(one) for one in state.values())
    return sum(_measure(one) for one in state) if isinstance(state, (list, tuple)) else 0
