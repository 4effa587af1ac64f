"""Replicas of shards in the memory of another server, from which another process goes on with what a server that died has held.

Server N sends its shards to server N + 1, over a link of their own. A replica that was sent arrives although its sender dies right
afterwards; one that could not be sent, because that server is being started again, is made up for by the next.
"""

from __future__ import annotations

import io
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, final

import torch

from rankwise.base.errors import CollectiveError, RankwiseError, RendezvousError
from rankwise.base.roles import note_needed
from rankwise.parallel.servers.link import ANSWER, HELLO, REPLICA, STATE, Link, Message
from rankwise.parallel.servers.listener import RETURN_S, connect
from rankwise.parallel.servers.shard import pack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch.distributed as dist
    from torch import Tensor

    from rankwise.parallel.servers.shard import Shard

#: Whoever sends replicas is silent as long as it makes no updates.
_FOREVER_S = 1e6
#: Updates wait meanwhile: a server that takes longer to receive a replica gets the next one.
_BOUND_S = 30.0


@final
class Replicas:
    """Sends shards to the next server, and holds those of the one before; in place of ``Recovery``.

    Args:
        server: Which server this is.
        num_servers: How many there are.
        store: The servers' part of the job's store.
        save_every: Updates between two replicas of a shard.
        make_shard: Given a shard's number and its workers, makes it with first values.
    """

    saves_first = False  # the next server may not be serving yet

    def __init__(
        self, server: int, num_servers: int, store: dist.Store, *, save_every: int, make_shard: Callable[[int, Iterable[int]], Shard]
    ) -> None:  # fmt: skip
        self._server, self._next, self._store = server, (server + 1) % num_servers, store
        self._save_every, self._make_shard = save_every, make_shard
        self._is_restarted = False
        self._held: dict[int, Tensor] = {}
        self._lock = threading.Lock()
        self._link: Link | None = None

    def begin(self, run: str, digest: str = "", *, is_restarted: bool = False, num_updates: int = 0) -> None:  # noqa: ARG002 - as Recovery
        """Learn whether this process takes the place of one that died."""
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
                link.send(Message(STATE, shard=number), timeout_s=_BOUND_S)
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
        with self._lock:
            body = self._held.get(number)
        if body is None:
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
                self._connect(0.0).send(Message(REPLICA, shard=number, body=body), timeout_s=_BOUND_S)
            except CollectiveError:
                self._drop_link()

    def save_if_due(self, number: int, shard: Shard) -> None:
        """Send a shard after each so many updates."""
        if shard.version % self._save_every == 0:
            self.save(number, shard)

    def finish(self, shards: Mapping[int, Shard], *, is_stopped: bool) -> None:  # noqa: ARG002 - as Recovery
        """Close the link: replicas end with the job."""
        with self._lock:
            self._drop_link()

    def _connect(self, timeout_s: float) -> Link:
        if self._link is None:
            link = connect(
                self._store,
                str(self._next),
                peer=f"server {self._next}",
                rank=self._server,
                timeout_s=timeout_s,
            )
            try:
                link.send(Message(HELLO, note={"server": self._server}), timeout_s=_BOUND_S)
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
            link.send(Message(HELLO), timeout_s=_BOUND_S)
            while True:
                message = link.receive(timeout_s=_FOREVER_S)
                if message.kind == REPLICA and message.body is not None:
                    with self._lock:
                        self._held[message.shard] = message.body
                elif message.kind == STATE:
                    with self._lock:
                        body = self._held.get(message.shard)
                    link.send(Message(ANSWER, shard=message.shard, body=body), timeout_s=_BOUND_S)
