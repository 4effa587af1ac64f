"""Copies of the shards, on a disk or in the host's memory, from which another process continues with what a server that died has held."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from rankwise.base.errors import CheckpointError, CollectiveError, UsageError
from rankwise.base.files import write_atomic
from rankwise.base.host_memory import find_memory_folder
from rankwise.base.log import get_logger
from rankwise.runtime.nested import flatten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from rankwise.parallel.servers.shard import Shard


_LOGGER = get_logger(__name__)

_NO_SPACE_HINT = "put recovery_folder on a larger file system; copies in the host's memory take twice what the servers hold (docker run --shm-size)"
#: How the folders begin from which a run continues after one that was stopped.
_STOPPED = "stopped-"


@final
class Recovery:
    """Writes a shard into a folder that the server's host sees, after each ``save_every`` updates, and reads one that another process of the run has written."""

    def __init__(
        self,
        folder: str | Path,
        save_every: int,
        make_shard: Callable[[int, Iterable[int]], Shard],
        num_shards: int = 1,
    ) -> None:
        self._folder, self.save_every, self._make_shard = Path(folder), save_every, make_shard
        self._run = self._digest = ""
        self._is_restarted, self._num_shards = False, num_shards
        self._stopped: Path | None = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"recovery_folder={str(folder)!r} can't be made: {error.strerror}") from None

    def begin(self, run: str, digest: str = "", *, is_restarted: bool = False, num_updates: int = 0) -> None:
        """Choose what shards continue from: copies of this run, of a run that was stopped, or none.

        Args:
            run: The same on all servers, also on one that is started again alone; another one after a restart of the
                whole job.
            digest: Of the layouts of all shards.
            is_restarted: Whether this process takes the place of one that died.
            num_updates: How many updates are in what the caller resumes from: older copies are not taken in its place.
        """
        self._run, self._digest, self._is_restarted = run, digest, is_restarted
        if not is_restarted:
            self._stopped = self._find_stopped(num_updates)

    def take_up(self, number: int, workers: Iterable[int]) -> Shard | None:
        """Return a shard with the state that it continues from; None if it begins with what the caller gives it."""
        if self._is_restarted:
            return self.load(number, workers)
        self.set_aside(number)
        if self._stopped is None:
            return None
        return self._read(self._stopped / f"shard-{number}.pt", number, workers, None)

    # ----------------------------------------------------- runs that were stopped

    def _find_stopped(self, num_updates: int) -> Path | None:
        """Return the folder of the newest copies that all servers of a run have written when it was stopped."""
        whole = list[tuple[int, Path]]()
        for folder in self._folder.glob(f"{_STOPPED}*"):
            facts = [self._read_facts(folder, number) for number in range(self._num_shards)]
            if all(one.get("digest") == self._digest for one in facts):
                whole.append((max(int(one["version"]) for one in facts), folder))
            else:
                _LOGGER.warning(f"{folder} is incomplete, or of another model or number of servers: not used")
        version, newest = max(whole, default=(-1, None))
        return newest if version >= num_updates else None

    @staticmethod
    def _read_facts(folder: Path, number: int) -> dict[str, Any]:
        try:
            found = json.loads((folder / f"shard-{number}.json").read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def finish(self, shards: Mapping[int, Shard], *, is_stopped: bool) -> None:
        """Keep what the next run resumes from, if this one was stopped; delete such copies if the training is through."""
        if self._is_in_memory:
            return  # deleted with the job
        if is_stopped:
            self._keep(shards)
            return
        for folder in self._folder.glob(f"{_STOPPED}*"):
            for path in [path for number in shards for path in folder.glob(f"shard-{number}.*")]:
                path.unlink(missing_ok=True)
            with suppress(OSError):  # not empty: another server still has to delete its own
                folder.rmdir()

    def _keep(self, shards: Mapping[int, Shard]) -> None:
        folder = self._folder / f"{_STOPPED}{self._run}"
        try:
            folder.mkdir(exist_ok=True)
            for number, shard in shards.items():
                with shard.changed:
                    self._write(folder / f"shard-{number}.pt", shard.state(), number)
                facts = {"digest": self._digest, "version": shard.version}
                write_atomic(folder / f"shard-{number}.json", json.dumps(facts))
                at = f"shard {number} is saved at version {shard.version}"
                _LOGGER.info(f"{at}: the next run resumes from {folder}")
        except OSError as error:
            what = f"{folder} can't be written: {error.strerror}"
            raise CheckpointError(what, hint=_NO_SPACE_HINT) from error
        if all(self._read_facts(folder, number) for number in range(self._num_shards)):
            for former in self._folder.glob(f"{_STOPPED}*"):
                if former != folder:
                    shutil.rmtree(former, ignore_errors=True)

    @property
    def _is_in_memory(self) -> bool:
        memory = find_memory_folder("")
        return memory is not None and self._folder.is_relative_to(memory)

    def _find(self, number: int) -> Path:
        return self._folder / f"shard-{number}.pt"

    def set_aside(self, number: int) -> None:
        """Rename a copy that another run has left to ``shard-N.previous.pt``, before the first one of this run is written.

        In the host's memory, which goes with the job, it is deleted.
        """
        path = self._find(number)
        if self._is_in_memory:
            path.unlink(missing_ok=True)
        elif path.exists():
            path.replace(path.with_suffix(".previous.pt"))

    def save(self, number: int, shard: Shard) -> None:
        """Write a shard, whose lock is held; the copy before it stays until this one is whole.

        Raises:
            CheckpointError: It can't be written, or there is no space for it.
        """
        self._write(self._find(number), {**shard.state(), "run": self._run}, number)

    def _write(self, path: Path, state: dict[str, Any], number: int) -> None:
        temporary = path.with_suffix(".tmp")
        try:
            size = sum(one.nbytes for _, one in flatten(state) if isinstance(one, Tensor))
            free = shutil.disk_usage(self._folder).free
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

    def load(self, number: int, workers: Iterable[int]) -> Shard:
        """Return a shard as its server has saved it last.

        Raises:
            CollectiveError: There is no copy, it can't be read, or it is another run's.
        """
        return self._read(self._find(number), number, workers, self._run)

    def _read(self, path: Path, number: int, workers: Iterable[int], run: str | None) -> Shard:
        """Return the shard of a file; ``run`` is the one that it must be of, None: the one before, whose workers are not ours."""
        try:
            state = torch.load(path, weights_only=True)
            if run is not None and state.get("run") != run:
                raise CollectiveError(
                    f"the copy of shard {number} in {path} is of another run",
                    hint="two jobs that run at once need a recovery_folder each",
                )
            shard = self._make_shard(number, workers)
            shard.restore(state if run is not None else {**state, "last": {}, "incarnations": {}})
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, KeyError, ValueError) as error:
            raise CollectiveError(
                f"shard {number} can't be read from {path}: {error}", hint="recovery_folder must be on a file system that the server's host sees"
            ) from None  # fmt: skip
        return shard
