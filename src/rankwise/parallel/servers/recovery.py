"""Copies of the shards, from which another process continues with what a server that died has held: on a disk, in the host's memory, or on a peer.

As replicas, server N sends its shards to server N + 1, over a link of their own. A replica that was sent arrives although its sender dies right
afterwards; one that could not be sent, because that server is being started again, is made up for by the next.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from rankwise.base.errors import CheckpointError, CollectiveError, RankwiseError, RendezvousError, UsageError
from rankwise.base.files import write_atomic
from rankwise.base.host_memory import find_memory_folder
from rankwise.base.log import get_logger
from rankwise.base.roles import note_needed
from rankwise.parallel.servers.link import Kind, Link, Message
from rankwise.parallel.servers.listener import RETURN_S, connect
from rankwise.parallel.servers.shard import Shard, pack
from rankwise.runtime.nested import flatten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch.distributed as dist


_LOGGER = get_logger(__name__)

_NO_SPACE_HINT = "put recovery_folder on a larger file system; copies in the host's memory take twice what the servers hold (docker run --shm-size)"
#: How the folders begin from which a run continues after one that was stopped.
_STOPPED = "stopped-"
#: Whoever sends replicas is silent as long as it makes no updates.
_FOREVER_S = 1e6
#: Updates wait meanwhile: a server that takes longer to receive a replica gets the next one.
_BOUND_S = 30.0


@final
class Recovery:
    """Writes a shard into a folder that servers share, after each ``save_every`` updates, and reads one that another process of the run has written."""

    saves_first = True

    def __init__(
        self, folder: str | Path, save_every: int, make_shard: Callable[[int, Iterable[int]], Shard], num_shards: int = 1
    ) -> None:  # fmt: skip
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
            run: The same on all servers, also on one that is started again alone; another one after a restart of the whole job.
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
                raise CollectiveError(f"the copy of shard {number} in {path} is of another run", hint="two jobs that run at once need a recovery_folder each")  # fmt: skip
            shard = self._make_shard(number, workers)
            shard.restore(state if run is not None else {**state, "last": {}, "incarnations": {}})
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, KeyError, ValueError) as error:
            raise CollectiveError(
                f"shard {number} can't be taken over from {path}: {error}", hint="recovery_folder must be on a file system that all servers share"
            ) from None  # fmt: skip
        return shard


@final
class Replicas:
    """Sends shards to the next server after each ``save_every`` updates, and holds those of the one before; in place of ``Recovery``."""

    saves_first = False  # the next server may not be serving yet

    def __init__(
        self, server: int, num_servers: int, store: dist.Store, save_every: int, make_shard: Callable[[int, Iterable[int]], Shard]
    ) -> None:  # fmt: skip
        self._server, self._next, self._store = server, (server + 1) % num_servers, store
        self.save_every, self._make_shard = save_every, make_shard
        self._is_restarted = False
        self._held: dict[int, Tensor] = {}
        self._lock = threading.Lock()  # of the link to the next server
        self._link: Link | None = None

    def begin(self, run: str, digest: str = "", *, is_restarted: bool = False, num_updates: int = 0) -> None:  # noqa: ARG002 - as Recovery
        """Note whether this process takes the place of one that died."""
        self._is_restarted = is_restarted

    def take_up(self, number: int, workers: Iterable[int]) -> Shard | None:
        """Return a shard from the next server, if this process takes the place of one that died.

        Raises:
            CollectiveError: That server has none of it: all ranks have to start again.
        """
        if not self._is_restarted:
            return None
        try:
            with self._lock:
                link = self._connect(RETURN_S)
                link.send(Message(Kind.STATE, shard=number), timeout_s=_BOUND_S)
                body = link.receive(timeout_s=_BOUND_S).body
            if body is None:
                raise CollectiveError(f"server {self._next} has no replica of shard {number}")
        except RankwiseError as error:
            note_needed()
            raise CollectiveError(
                f"server {self._server} has died, and what it held can't be taken from server {self._next}: {error.message}", rank=self._server,
                hint="start the whole job again, from a checkpoint",
            ) from error  # fmt: skip
        return self._restore(number, body, workers)

    def load(self, number: int, workers: Iterable[int]) -> Shard:
        """Return a shard whose server has died, from the replica that this one holds."""
        if (body := self._held.get(number)) is None:
            raise CollectiveError(f"server {self._server} has no replica of shard {number}", rank=self._server,
                                  hint="its server died before it had sent one, or the server that held it has died too")  # fmt: skip
        return self._restore(number, body, workers)

    def _restore(self, number: int, body: Tensor, workers: Iterable[int]) -> Shard:
        shard = self._make_shard(number, workers)
        shard.restore(torch.load(io.BytesIO(body.numpy().tobytes()), weights_only=True))
        return shard

    # ------------------------------------------------------------------- sending

    def save(self, number: int, shard: Shard) -> None:
        """Send a shard, whose lock is held, to the next server, if that one is there."""
        body = pack(shard.state())
        with self._lock, suppress(RendezvousError):
            try:
                self._connect(0.0).send(Message(Kind.REPLICA, shard=number, body=body), timeout_s=_BOUND_S)
            except CollectiveError:
                self._drop_link()

    def finish(self, shards: Mapping[int, Shard], *, is_stopped: bool) -> None:  # noqa: ARG002 - as Recovery
        """Close the link: replicas end with the job."""
        with self._lock:
            self._drop_link()

    def _connect(self, timeout_s: float) -> Link:
        if self._link is None:
            peer = f"server {self._next}"
            link = connect(self._store, str(self._next), peer=peer, rank=self._server, timeout_s=timeout_s)
            try:
                link.send(Message(Kind.HELLO, note={"server": self._server}), timeout_s=_BOUND_S)
                link.receive(timeout_s=_BOUND_S)  # which proves that it is one of the job's
            except CollectiveError:
                link.close()
                raise
            self._link = link
        return self._link

    def _drop_link(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    # ------------------------------------------------------------------- holding

    def hold(self, link: Link) -> None:
        """Keep what another server sends, and give it back when it asks, until it closes the link."""
        with suppress(CollectiveError):
            link.send(Message(Kind.HELLO), timeout_s=_BOUND_S)
            while True:
                message = link.receive(timeout_s=_FOREVER_S)
                # Without the lock of what is sent: two servers that send to each other would each wait for the other to read.
                if message.kind == Kind.REPLICA and message.body is not None:
                    self._held[message.shard] = message.body
                elif message.kind == Kind.STATE:
                    body = self._held.get(message.shard)
                    link.send(Message(Kind.ANSWER, shard=message.shard, body=body), timeout_s=_BOUND_S)
