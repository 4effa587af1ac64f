"""A server: takes in workers as they come, one thread for each, and answers them until all have ended."""

from __future__ import annotations

import io
import secrets
import sys
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.errors import CollectiveError, CollectiveTimeoutError, RankwiseError
from rankwise.base.roles import note_needed
from rankwise.evidence.roll import name_ranks
from rankwise.parallel.servers.dense import DenseValues
from rankwise.parallel.servers.entrance import naming_store
from rankwise.parallel.servers.link import (
    ADOPT,
    ANSWER,
    BYE,
    HELLO,
    PULL,
    PUSH,
    REFUSED,
    ROWS,
    STATE,
    STATS,
    Link,
    LinkLostError,
    Message,
)
from rankwise.parallel.servers.shard import Gradient
from rankwise.parallel.servers.table import TableValues

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from rankwise.base.clock import Clock
    from rankwise.parallel.servers.compression import Compression
    from rankwise.parallel.servers.entrance import Door
    from rankwise.parallel.servers.recovery import Recovery
    from rankwise.parallel.servers.shard import Shard

_POLL_S = 0.02
#: So often those that are waited for are looked up among those that have ended, while no server was there to hear of it.
_LOOK_UP_S = 0.5
#: Threads that only pass messages on wait for Python's lock at each of them; 5 ms, the default, is more than a small message takes.
_SWITCH_S = 1e-4
_JOIN_S = 60.0
#: A process that is started again has to import torch, perhaps beside many others.
RETURN_S = 120.0


@final
class Server:
    """Serves shards to workers.

    Args:
        number: Which server this is.
        rank: Its rank.
        shards: What it holds, by number.
        layout_digest: Of all shards' layouts; a worker's must be the same.
        compression: How gradients come.
        workers: Ranks that will join.
        store: The servers' corner of the store.
        door: Where they come to.
        timeout_s: Seconds that a worker may say nothing.
        returns: Whether a worker that has died is started again, so that we wait for it.
        clock: Where time comes from.
    """

    def __init__(  # noqa: PLR0913 - what makes a server
        self, number: int, rank: int, shards: Mapping[int, Shard], *, layout_digest: str, compression: Compression | None,
        workers: Iterable[int], store: dist.Store, door: Door, timeout_s: float, returns: bool = False, clock: Clock = SYSTEM_CLOCK,
    ) -> None:  # fmt: skip
        self.number, self.rank, self.shards = number, rank, dict(shards)
        self._digest, self._compression = layout_digest, compression
        self._store, self._door, self._timeout_s, self._returns, self._clock = (
            store,
            door,
            timeout_s,
            returns,
            clock,
        )
        self.recovery: Recovery | None = None
        self._lock = threading.Lock()
        #: Workers that are to come, and until when; those that are here, and the link that each has now.
        self._awaited = dict.fromkeys(workers, float("inf"))
        self._here = dict[int, Link]()
        self.ended, self.lost = list[int](), dict[int, str]()
        self._fault: BaseException | None = None

    def resume(self, states: Mapping[str, Mapping[str, Any]], num_updates: int) -> None:
        """Go on where a training was, before anybody joins.

        Args:
            states: What an optimizer keeps for each parameter, by name.
            num_updates: How many updates were made.
        """
        for shard in list(self.shards.values()):
            shard.begin(num_updates)
            if isinstance(shard.held, DenseValues):
                shard.held.resume(states, num_updates)

    def serve(self) -> dict[str, Any]:
        """Answer the workers until all have ended.

        Returns:
            What each shard counted, and who ended or was lost.

        Raises:
            CollectiveError: No worker ended well, or the update rule raised.
        """
        switch_s, look_up_s = sys.getswitchinterval(), self._clock.monotonic()
        self._awaited = dict.fromkeys(self._awaited, look_up_s + (RETURN_S if self._returns else _JOIN_S))
        comes_back = self._returns
        sys.setswitchinterval(_SWITCH_S)
        try:
            while self._fault is None and not self._is_done():
                if (link := self._door.accept(_POLL_S)) is not None:
                    threading.Thread(
                        target=self._attend, args=(link,), name="rankwise-worker-link", daemon=True
                    ).start()
                if self._awaited and self._clock.monotonic() >= look_up_s:
                    look_up_s = self._clock.monotonic() + _LOOK_UP_S
                    self._look_up_awaited()
            if self._fault is not None:
                raise self._fault
            if self.lost and not self.ended:
                told = "; ".join(f"worker {worker}: {why}" for worker, why in sorted(self.lost.items()))
                raise CollectiveError(
                    f"all workers are gone, and none said that it had ended: {told}",
                    rank=self.rank,
                    hint="look at the output of the first that went",
                )
            comes_back = False
        finally:
            sys.setswitchinterval(switch_s)
            self._door.close(comes_back=comes_back)
        return self.report()

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

    # ------------------------------------------------------------ who is here

    def _is_done(self) -> bool:
        """Whether nobody is here and nobody will come; who was left out by all shards is not waited for."""
        with self._lock:
            active = [
                one
                for one in self._here
                if not self.shards or any(shard.has(one) for shard in list(self.shards.values()))
            ]
            return not self._awaited and not active

    @naming_store()
    def _look_up_awaited(self) -> None:
        """Count those out that have ended without us, or do not come."""
        now = self._clock.monotonic()
        for worker, until_s in list(self._awaited.items()):
            if self._store.check([f"ended/{worker}"]) and self._store.get(f"ended/{worker}"):
                self._part(worker, None, None)
            elif now > until_s:
                sys.stderr.write(
                    f"rankwise: [rank {self.rank}] {name_ranks([worker])} did not reach the server in time; going on without\n"
                )
                self._give_up(worker)

    def _give_up(self, worker: int) -> None:
        with self._lock:
            self._awaited.pop(worker, None)
            if worker in self._here:
                return  # just now
            self.lost.setdefault(worker, "never came")
            for shard in self.shards.values():
                shard.leave(worker)

    def _part(self, worker: int, link: Link | None, why: str | None) -> None:
        """Count a worker out, unless it has come back over another link: both under one lock, with what the shards know."""
        with self._lock:
            if self._here.get(worker, link) is not link or worker in self.ended:
                return
            self._here.pop(worker, None)
            self._awaited.pop(worker, None)
            if why is None:
                self.ended.append(worker)
                self.lost.pop(worker, None)
            else:
                self.lost[worker] = why
                if self._returns:
                    self._awaited[worker] = self._clock.monotonic() + RETURN_S
                with suppress(RuntimeError):  # so that it does not take us for dead
                    self._store.set(f"left/{self.number}/{worker}", why)
            for shard in self.shards.values():
                shard.leave(worker)

    # ------------------------------------------------------------- one worker

    def _attend(self, link: Link) -> None:
        """Answer one worker: what goes wrong with it is its end here and not ours, but for the update rule, which serve() raises."""
        try:
            if (hello := _hear(link)) is not None:
                worker, life, digest = hello
                why: str | None = None
                link.peer = f"worker {worker}"
                try:
                    self._greet(link, worker, life, digest)
                    self._answer_all(link, worker, life)
                except RankwiseError as error:
                    why = error.message
                self._part(worker, link, why)  # which may make an update
        except Exception as error:  # noqa: BLE001 - raised in serve()
            self._fault = self._fault or error
        finally:
            link.close()

    def _greet(self, link: Link, worker: int, life: int, digest: str) -> None:
        try:
            if digest != self._digest:
                raise CollectiveError(  # noqa: TRY301 - told to the worker
                    f"worker {worker} has another model than server {self.number} (layouts {digest} and {self._digest})"
                )
            with self._lock:
                clocks = {str(number): shard.join(worker, life) for number, shard in self.shards.items()}
                self._here[worker] = link
                self._awaited.pop(worker, None)
                self.lost.pop(worker, None)
                if worker in self.ended:  # it failed after its end, and begins again
                    self.ended.remove(worker)
        except CollectiveError as error:
            link.send(Message(REFUSED, note={"error": error.message}), timeout_s=self._timeout_s)
            raise
        link.send(Message(HELLO, note={"clocks": clocks}), timeout_s=self._timeout_s)

    def _answer_all(self, link: Link, worker: int, life: int) -> None:
        refused: str | None = None
        while True:
            message = link.receive(timeout_s=self._timeout_s, place=self._find_place)
            if message.kind == BYE:
                return
            try:
                if self._fault is not None:
                    raise CollectiveError(f"the server has failed: {self._fault!r}")  # noqa: TRY301 - told to the worker
                answer = self._answer(message, worker, life) if refused is None else None
            except (LinkLostError, CollectiveTimeoutError):
                raise
            except CollectiveError as error:
                refused, answer = error.message, None
            except Exception as error:  # noqa: BLE001 - the worker hears of it, and serve() raises it
                refused, answer = f"the update rule on server {self.number} raised {error!r}", None
                if isinstance(error, RankwiseError):  # ours: a copy that can't be written
                    refused = f"server {self.number} has failed: {error.message}"
                self._fault = error
            if refused is not None and message.kind != PUSH:
                answer = Message(REFUSED, note={"error": refused})
            if answer is not None:
                link.send(answer, timeout_s=self._timeout_s)

    def _find_place(self, message: Message, size: int) -> Tensor | None:
        """Return where a gradient goes that comes as the shard's layout has it."""
        shard = self.shards.get(message.shard)
        if message.kind != PUSH or shard is None or not isinstance(shard.held, DenseValues):
            return None
        if size != shard.held.layout.size_bytes or (message.note or {}).get("form"):
            return None
        with shard.changed:
            return shard.held.take_buffer()

    def _answer(self, message: Message, worker: int, life: int) -> Message | None:
        if message.kind == STATS:
            return Message(ANSWER, note=self.report())
        if message.kind == ADOPT:
            return self._adopt((message.note or {})["shards"], worker, life)
        if (shard := self.shards.get(message.shard)) is None:
            raise CollectiveError(f"server {self.number} does not hold shard {message.shard}")
        held = shard.held
        if message.kind == STATE:
            version, body = shard.read(message.number, lambda: _pack(shard))
        elif message.kind == ROWS and isinstance(held, TableValues):
            places = (
                torch.empty(0, dtype=torch.int64) if message.body is None else message.body.view(torch.int64)
            )
            version, body = shard.read(message.number, lambda: held.read(places))
        elif message.kind == PULL and isinstance(held, DenseValues):
            version, body = shard.read(message.number, held.read)
        else:
            shard.push(self._unpack(message, worker, life, held))
            return None
        return Message(ANSWER, shard=message.shard, number=version, body=body)

    def _adopt(self, numbers: Sequence[int], worker: int, life: int) -> Message:
        """Take over what a server that died has held, unless another worker has asked for it before."""
        with self._lock:
            for number in numbers:
                if number not in self.shards and self.recovery is not None:
                    shard = self.recovery.load(number, self._here)
                    self.watch(number, shard)
                    self.shards[number] = shard
                    sys.stderr.write(
                        f"rankwise: [rank {self.rank}] took over shard {number} at version {shard.version}: its server is gone\n"
                    )
            clocks = {str(number): self.shards[number].join(worker, life) for number in numbers}
            return Message(ANSWER, note={"clocks": clocks})

    def open(self, workers: Sequence[int]) -> None:
        """Take up what a process has held that has died, if we take its place; then let workers in.

        Raises:
            CollectiveError: There is no copy of it, or it can't be read.
            CheckpointError: No copy can be written.
            RendezvousError: The store is gone.
        """
        if self.recovery is None:
            note_needed()  # what it holds is in its memory
        with naming_store(self.rank):
            goes_on = self._store.check([f"copied/{self.number}"])
            run = self._store.compare_set("run", "", secrets.token_hex(8)).decode()
        if self.recovery is None and goes_on:
            raise CollectiveError(f"server {self.number} has died, and with it what it held", rank=self.rank,
                                  hint="start the whole job again, from a checkpoint")  # fmt: skip
        if self.recovery is not None:
            self.recovery.begin(run)
            for number in self.shards:
                if not goes_on:
                    self.recovery.set_aside(number)
                    continue
                shard = self.shards[number] = self.recovery.load(number, workers)
                sys.stderr.write(
                    f"rankwise: [rank {self.rank}] server {self.number} goes on with shard {number} at version {shard.version}\n"
                )
        for number, shard in self.shards.items():
            self.watch(number, shard)
        with naming_store(self.rank):
            self._store.set(f"copied/{self.number}", "1")
            self._door.open()

    def watch(self, number: int, shard: Shard) -> None:
        """Have a shard copied to the disk now and then, if that was asked for; the first time at once."""
        if self.recovery is not None:
            self.recovery.save(number, shard)
            shard.on_update = partial(self.recovery.save_if_due, number)

    def _unpack(self, message: Message, worker: int, life: int, held: object) -> Gradient:
        note, body = message.note or {}, message.body
        rows: Tensor | None = None
        if body is None:
            body = torch.empty(0, dtype=torch.uint8)
        if isinstance(held, TableValues):
            row = torch.int64.itemsize + held.weight.shape[1] * held.weight.element_size()
            size = len(body) // row * torch.int64.itemsize
            rows, body = body[:size].view(torch.int64), body[size:]
        elif note.get("form") and self._compression is not None and isinstance(held, DenseValues):
            body = self._compression.decode(body, note, held.layout, held.layout.allocate())
        missing = frozenset(note.get("missing", ()))
        return Gradient(worker, message.number, message.seen, message.weight, body, missing, rows, life)


def _hear(link: Link) -> tuple[int, int, str] | None:
    """Return which worker comes, which of its processes, and what layouts it has; None if it has died since, or is none."""
    try:
        note = link.receive(timeout_s=_JOIN_S).note or {}
        return int(note["worker"]), int(note["life"]), str(note["digest"])
    except (RankwiseError, KeyError, TypeError, ValueError):
        return None


def _pack(shard: Shard) -> Tensor:
    """Return a shard's state as bytes that ``torch.load`` reads with ``weights_only``."""
    held = io.BytesIO()
    torch.save({**shard.held.state(), "version": shard.version}, held)
    return torch.frombuffer(bytearray(held.getbuffer()), dtype=torch.uint8)


@final
class NormExchange:
    """The norm of the whole model's gradient, put together by the servers at the store: one request each way for an update.

    Args:
        store: The servers' corner of the store.
        shards: Numbers of all shards that have parameters.
        timeout_s: Seconds to wait for the others.
        clock: Where time comes from.
    """

    def __init__(
        self, store: dist.Store, shards: Iterable[int], *, timeout_s: float, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._store, self._shards = store, tuple(shards)
        self._timeout_s, self._clock, self._lock = timeout_s, clock, threading.Lock()

    def __call__(self, shard: int, version: int, square: float) -> float:
        """Tell one shard's squared norm of a version, and return the norm of all.

        Raises:
            CollectiveError: Some server did not tell its own in time; names the shards.
            RendezvousError: The store is gone.
        """
        keys = {one: f"norm/{version}/{one}" for one in self._shards}
        with self._lock, naming_store():
            self._store.set(keys[shard], repr(square))
        end = self._clock.monotonic() + self._timeout_s
        while True:
            with self._lock, naming_store():
                absent = [one for one, key in keys.items() if not self._store.check([key])]
                if not absent:
                    total = sum(float(self._store.get(key)) for key in keys.values())
                    with suppress(RuntimeError):  # a file store deletes nothing
                        self._store.delete_key(f"norm/{version - 2}/{shard}")
                    return float(total**0.5)
            if self._clock.monotonic() > end:
                raise CollectiveError(
                    f"shard {shard} waited {self._timeout_s:g} s for the gradient norm of version {version} of shards {absent}",
                    hint="their servers have stopped, or have other workers: look at their output",
                )
            self._clock.sleep(0.0005)
