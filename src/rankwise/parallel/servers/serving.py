"""A server: accepts connections of workers, answers each in a thread of its own, and ends when all workers have ended."""

from __future__ import annotations

import secrets
import sys
import threading
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.errors import CollectiveError, CollectiveTimeoutError, RankwiseError
from rankwise.base.log import get_logger
from rankwise.base.rank_names import name_ranks
from rankwise.base.roles import note_needed
from rankwise.parallel.servers.dense import DenseValues
from rankwise.parallel.servers.embedding import TableValues
from rankwise.parallel.servers.link import Kind, Link, LinkLostError, Message
from rankwise.parallel.servers.listener import RETURN_S, Listener
from rankwise.parallel.servers.shard import Gradient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch.distributed as dist

    from rankwise.parallel.servers.recovery import Recovery
    from rankwise.parallel.servers.shard import Shard

_LOGGER = get_logger(__name__)

_POLL_S = 0.02
#: How often to look in the store whether workers that we wait for have ended while this server was not running.
_CHECK_S = 0.5
#: Threads that pass messages on wait for the GIL at each of them; 5 ms, the default, is more than a small message
#: takes.
_SWITCH_S = 1e-4
_JOIN_S = 60.0


@final
class Server:
    """Serves shards to workers.

    A worker whose layouts have another digest is refused, one that says nothing for ``timeout_s`` is lost; with
    ``returns`` one that has died is started again alone, so that we wait for it.
    """

    def __init__(
        self,
        rank: int,
        shards: Mapping[int, Shard],
        *,
        layout_digest: str,
        workers: Iterable[int],
        store: dist.Store,
        listener: Listener,
        timeout_s: float,
        returns: bool = False,
    ) -> None:
        self.rank, self.shards = rank, dict(shards)
        self._digest = layout_digest
        self._store, self._listener, self._timeout_s = store, listener, timeout_s
        self._returns = returns
        self.recovery: Recovery | None = None
        self._is_stopping = False
        self._lock = threading.Lock()
        #: Workers that will connect, and until when we wait for each; the link of each that is connected.
        self._awaited = dict.fromkeys(workers, float("inf"))
        self._connected = dict[int, Link]()
        self.ended, self.lost = list[int](), dict[int, str]()
        self._fault: BaseException | None = None

    def resume(self, states: Mapping[str, Mapping[str, Any]], num_updates: int) -> None:
        """Continue a training, before anybody joins."""
        for shard in list(self.shards.values()):
            shard.begin(num_updates)
            if isinstance(shard.held, DenseValues):
                shard.held.resume(states, num_updates)

    def serve(self, should_stop: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """Answer the workers until all have ended; see ``ParameterServer.serve``.

        When ``should_stop`` says that the job is to stop, workers that are lost are not waited for any more.
        """
        switch_s, check_s = sys.getswitchinterval(), SYSTEM_CLOCK.monotonic()
        self._awaited = dict.fromkeys(self._awaited, check_s + (RETURN_S if self._returns else _JOIN_S))
        is_over = False
        sys.setswitchinterval(_SWITCH_S)
        try:
            while self._fault is None and not self._is_done():
                if (link := self._listener.accept(_POLL_S)) is not None:
                    name = "rankwise-worker-link"
                    threading.Thread(target=self._attend, args=(link,), name=name, daemon=True).start()
                if not self._is_stopping and should_stop():
                    self._begin_stop()
                if self._awaited and SYSTEM_CLOCK.monotonic() >= check_s:
                    check_s = SYSTEM_CLOCK.monotonic() + _CHECK_S
                    self._check_awaited()
            if self._fault is not None:
                raise self._fault
            if self.lost and not self.ended and not self._is_stopping:
                reasons = "; ".join(f"worker {worker}: {why}" for worker, why in sorted(self.lost.items()))
                raise CollectiveError(
                    f"all workers are gone, and none reported that it had ended: {reasons}",
                    rank=self.rank,
                    hint="look at the output of the first that ended",
                )
            if self.recovery is not None:
                self.recovery.finish(self.shards, is_stopped=self._is_stopping)
            is_over = True
        finally:
            sys.setswitchinterval(switch_s)
            self._listener.close(restarts=self._returns and not is_over)
        return self.report()

    def _begin_stop(self) -> None:
        """Wait for connected workers only: one that is lost from now on is not started again."""
        with self._lock:
            if self._is_stopping:
                return
            self._is_stopping = True
            self._awaited.clear()
        _LOGGER.info(f"[rank {self.rank}] server {self.rank} stops after its workers")

    def report(self) -> dict[str, Any]:
        """Return what the shards have counted, and who has ended or was lost."""
        shards = {
            shard.name: {
                "version": shard.version, "applied": shard.counts.applied, "dropped": shard.counts.dropped,
                "staleness": dict(sorted(shard.counts.staleness.items())), "expelled": list(shard.counts.expelled),
            }
            for _, shard in sorted(self.shards.items())
        }  # fmt: skip
        return {"shards": shards, "ended": sorted(self.ended), "lost": dict(sorted(self.lost.items()))}

    # -------------------------------------------------------- which workers take part

    def _is_done(self) -> bool:
        """Whether no worker is connected and none will connect; one that all shards have expelled is not waited for."""
        with self._lock:
            shards = list(self.shards.values())
            active = [one for one in self._connected if not shards or any(shard.has(one) for shard in shards)]
            return not self._awaited and not active

    def _check_awaited(self) -> None:
        """Remove workers that have ended while we did not run, or that did not connect in time."""
        now = SYSTEM_CLOCK.monotonic()
        for worker, until_s in list(self._awaited.items()):
            if self._store.check([f"ended/{worker}"]) and self._store.get(f"ended/{worker}"):
                self._remove(worker, None, None)
            elif now > until_s:
                _LOGGER.warning(
                    f"[rank {self.rank}] {name_ranks([worker])} did not reach the server in time; continuing without"
                )
                self._remove(worker, None, "never connected")

    def _remove(self, worker: int, link: Link | None, why: str | None) -> None:
        """Remove a worker, unless it has connected again over another link: one lock, so that shards and connections agree.

        With no ``why`` it has ended; with no ``link`` it never connected.
        """
        with self._lock:
            if self._connected.get(worker, link) is not link or worker in self.ended:
                return
            self._connected.pop(worker, None)
            self._awaited.pop(worker, None)
            if why is None:
                self.ended.append(worker)
                self.lost.pop(worker, None)
            elif link is None:
                self.lost.setdefault(worker, why)
            else:
                self.lost[worker] = why
                if self._returns and not self._is_stopping:
                    self._awaited[worker] = SYSTEM_CLOCK.monotonic() + RETURN_S
            for shard in self.shards.values():
                shard.leave(worker)

    # ------------------------------------------------------------- one worker

    def _attend(self, link: Link) -> None:
        """Answer one worker. Its errors end this link only; an error of the update rule is raised in serve()."""
        try:
            hello = _receive_hello(link)
            if hello is not None:
                worker, incarnation, digest = hello
                why: str | None = None
                link.peer = f"worker {worker}"
                try:
                    self._admit(link, worker, incarnation, digest)
                    if self._answer_all(link, worker, incarnation):
                        self._begin_stop()
                except RankwiseError as error:
                    why = error.message
                self._remove(worker, link, why)  # which may make an update
        except Exception as error:  # noqa: BLE001 - raised in serve()
            self._fault = self._fault or error
        finally:
            link.close()

    def _admit(self, link: Link, worker: int, incarnation: int, digest: str) -> None:
        try:
            if digest != self._digest:
                raise CollectiveError(  # noqa: TRY301 - sent to the worker
                    f"worker {worker} has another model than server {self.rank} (layouts {digest} and {self._digest})"
                )
            with self._lock:
                clocks = {str(one): shard.join(worker, incarnation) for one, shard in self.shards.items()}
                self._connected[worker] = link
                self._awaited.pop(worker, None)
                self.lost.pop(worker, None)
                if worker in self.ended:  # it failed after its end, and was started again
                    self.ended.remove(worker)
        except CollectiveError as error:
            link.send(Message(Kind.REFUSED, note={"error": error.message}), timeout_s=self._timeout_s)
            raise
        link.send(Message(Kind.HELLO, note={"clocks": clocks}), timeout_s=self._timeout_s)

    def _answer_all(self, link: Link, worker: int, incarnation: int) -> bool:
        """Answer until the worker has ended; return whether the job is to stop, which it may have learned earlier than this server."""
        refused: str | None = None
        while True:
            message = link.receive(timeout_s=self._timeout_s, place=self._find_place)
            if message.kind == Kind.BYE:
                return bool(message.note.get("stopped"))
            try:
                if self._fault is not None:
                    raise CollectiveError(f"the server has failed: {self._fault!r}")  # noqa: TRY301 - sent to the worker
                answer = self._answer(message, worker, incarnation) if refused is None else None
            except (LinkLostError, CollectiveTimeoutError):
                raise
            except CollectiveError as error:
                refused, answer = error.message, None
            except Exception as error:  # noqa: BLE001 - sent to the worker, and raised in serve()
                refused, answer = f"the update rule on server {self.rank} raised {error!r}", None
                if isinstance(error, RankwiseError):  # ours: a copy that can't be written
                    refused = f"server {self.rank} has failed: {error.message}"
                self._fault = error
            if refused is not None and message.kind != Kind.PUSH:
                answer = Message(Kind.REFUSED, note={"error": refused})
            if answer is not None:
                link.send(answer, timeout_s=self._timeout_s)

    def _find_place(self, message: Message, size: int) -> Tensor | None:
        """Return the buffer for a gradient that has the shard's own layout; None for any other."""
        shard = self.shards.get(message.shard)
        if message.kind != Kind.PUSH or shard is None or not isinstance(shard.held, DenseValues):
            return None
        if size != shard.held.layout.size_bytes:
            return None
        with shard.changed:
            return shard.held.take_buffer()

    def _answer(self, message: Message, worker: int, incarnation: int) -> Message | None:
        if message.kind == Kind.STATS:
            return Message(Kind.ANSWER, note=self.report())
        if (shard := self.shards.get(message.shard)) is None:
            raise CollectiveError(f"server {self.rank} does not hold shard {message.shard}")
        held = shard.held
        if message.kind == Kind.STATE:
            version, body = shard.read(message.number, shard.pack)
        elif message.kind == Kind.ROWS and isinstance(held, TableValues):
            wanted = torch.empty(0, dtype=torch.uint8) if message.body is None else message.body
            version, body = shard.read(message.number, lambda: held.read(wanted.view(torch.int64)))
        elif message.kind == Kind.PULL and isinstance(held, DenseValues):
            version, body = shard.read(message.number, held.read)
        else:
            shard.push(self._unpack(message, worker, incarnation, held))
            return None
        return Message(Kind.ANSWER, shard=message.shard, number=version, body=body)

    def open(self, workers: Sequence[int]) -> None:
        """Continue from the copies of the process whose place we take, or of the run before that was stopped; then listen.

        Raises:
            CollectiveError: A copy is missing, or can't be read.
            CheckpointError: No copy can be written.
        """
        if self.recovery is None:
            note_needed()  # what it holds is in its memory
        is_restarted = self._store.check([f"copied/{self.rank}"])
        run = self._store.compare_set("run", "", secrets.token_hex(8)).decode()
        if self.recovery is None and is_restarted:
            raise CollectiveError(
                f"server {self.rank} has died, and what it held is lost",
                rank=self.rank,
                hint="start the whole job again, from a checkpoint",
            )
        if self.recovery is not None:
            newest = max((shard.version for shard in self.shards.values()), default=0)
            self.recovery.begin(run, self._digest, is_restarted=is_restarted, num_updates=newest)
            for number in self.shards:
                if (shard := self.recovery.take_up(number, workers)) is None:
                    continue
                self.shards[number] = shard
                what = f"shard {number} at version {shard.version}"
                _LOGGER.info(f"[rank {self.rank}] server {self.rank} resumes {what}")
        for number, shard in self.shards.items():
            self.watch(number, shard)
        self._store.set(f"copied/{self.rank}", "1")
        self._listener.open()

    def watch(self, number: int, shard: Shard) -> None:
        """Have a shard copied after each so many updates, if that was asked for; the first time at once."""
        if (recovery := self.recovery) is None:
            return

        def save_if_due(shard: Shard) -> None:
            if shard.version % recovery.save_every == 0:
                recovery.save(number, shard)

        recovery.save(number, shard)
        shard.on_update = save_if_due

    def _unpack(self, message: Message, worker: int, incarnation: int, held: object) -> Gradient:
        rows, body = None, message.body
        if body is None:
            body = torch.empty(0, dtype=torch.uint8)
        if isinstance(held, TableValues):
            row = torch.int64.itemsize + held.weight.shape[1] * held.weight.element_size()
            size = len(body) // row * torch.int64.itemsize
            rows, body = body[:size].view(torch.int64), body[size:]
        missing = frozenset(message.note.get("missing", ()))
        return Gradient(worker, message.number, message.seen, message.weight, body, missing, rows, incarnation)


def _receive_hello(link: Link) -> tuple[int, int, str] | None:
    """Return a worker's rank, its incarnation and its layouts' digest; None if it has died since, or is none."""
    try:
        note = link.receive(timeout_s=_JOIN_S).note
        return int(note["worker"]), int(note["incarnation"]), str(note["digest"])
    except (RankwiseError, KeyError, TypeError, ValueError):
        return None
