"""Functions scheduled on workers by one rank that coordinates: what a worker's death leaves undone is done by another.

The words are those of TensorFlow's ClusterCoordinator (https://www.tensorflow.org/tutorials/distribute/parameter_server_training):
``schedule``, ``join``, ``fetch``, and data that each worker makes for itself.
"""

from __future__ import annotations

import pickle
import threading
import traceback
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, final

import torch

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    RankFailedError,
    RankwiseError,
    RendezvousError,
    UsageError,
)
from rankwise.evidence.roll import name_ranks
from rankwise.parallel.servers.entrance import ClosedError, knock
from rankwise.parallel.servers.link import ANSWER, BYE, HELLO, PULL, REFUSED, Link, Message
from rankwise.parallel.servers.serving import RETURN_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist

    from rankwise.parallel.servers.entrance import Door

_BYE_S, _JOIN_S = 5.0, 60.0
_POLL_S = 0.2
#: Where workers join the coordinator; servers have numbers.
PLACE = "coordinator"


@final
@dataclass(slots=True, eq=False)
class Handle:
    """A function that was scheduled.

    Attributes:
        number: Counts them, from 0.
        worker: The rank that has done it; None before.
        num_runs: How often it was begun: above 1 where a worker was lost.
    """

    number: int
    worker: int | None = None
    num_runs: int = 0
    _payload: bytes = field(default=b"", repr=False)
    _value: Any = field(default=None, repr=False)
    _error: RankwiseError | None = field(default=None, repr=False)

    @property
    def is_done(self) -> bool:
        """Whether it has come to its end, well or not."""
        return self.worker is not None


@final
class PerWorker:
    """Something that each worker makes for itself, once, such as an iterator over its data; made by ``ps.per_worker(fn)``.

    Args:
        make: Called on a worker with its index and the number of workers.
    """

    _numbers = count()

    def __init__(self, make: Callable[[int, int], Any]) -> None:
        self.make, self.number = make, next(self._numbers)


@final
class Coordinator:
    """The side that schedules.

    Args:
        rank: Our rank.
        workers: Ranks of the workers.
        door: Where workers come to, those too that are started again after their death.
        timeout_s: Seconds that one function may take; then its worker is given up.
        returns: Whether a worker that has died is started again, so that we wait for it when no other is left.
    """

    def __init__(
        self, rank: int, workers: Sequence[int], *, door: Door, timeout_s: float, returns: bool = False
    ) -> None:
        self._rank, self._timeout_s = rank, timeout_s
        self._join_s, self._return_s = (RETURN_S, RETURN_S) if returns else (_JOIN_S, 0.0)
        self._lost_s = 0.0  # when the last one was lost
        self._changed = threading.Condition()
        self._waiting: deque[Handle] = deque()
        self._open, self._num_scheduled, self._is_closed = 0, 0, False
        self._failed: RankwiseError | None = None
        self._here, self._lost = dict[int, Link](), dict[int, str]()
        self._threads = list[threading.Thread]()
        self._door = door
        door.open()
        self._accept_all(len(workers))
        threading.Thread(target=self._accept_late, name="rankwise-coordinator-door", daemon=True).start()

    def _accept_all(self, num_workers: int) -> None:
        end = SYSTEM_CLOCK.monotonic() + self._join_s
        while len(self._here) + len(self._lost) < num_workers:
            self._accept(_POLL_S)
            if SYSTEM_CLOCK.monotonic() > end:
                raise RendezvousError(
                    f"{len(self._here)} of {num_workers} workers came to the coordinator within {self._join_s:g} s: {name_ranks(sorted(self._here))}",
                    rank=self._rank, hint="the others must call ps.work()",
                )  # fmt: skip

    def _accept_late(self) -> None:
        """Take in workers that come back."""
        while not self._is_closed:
            self._accept(_POLL_S)

    def _accept(self, timeout_s: float) -> None:
        link = self._door.accept(timeout_s)
        if link is None:
            return
        threading.Thread(target=self._attend, args=(link,), name="rankwise-coordinator", daemon=True).start()

    def _attend(self, link: Link) -> None:
        """Hear who has come, and give it what there is to do."""
        try:
            worker = int((link.receive(timeout_s=_JOIN_S).note or {})["worker"])
            link.peer = f"worker {worker}"
            with self._changed:
                self._here[worker] = link
                self._lost.pop(worker, None)
                self._threads.append(threading.current_thread())
                self._changed.notify_all()
            self._drive(link, worker)
        except (RankwiseError, KeyError, ValueError, TypeError):
            pass  # it has died since, or is none of ours
        finally:
            link.close()

    def schedule(self, function: Callable[..., Any], args: Sequence[Any] = ()) -> Handle:
        """Have a function called on some worker; returns at once."""
        with self._changed:
            self._raise_failure()
            try:
                payload = pickle.dumps((function, tuple(args)))
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise UsageError(
                    f"{function!r} can't be sent to a worker: {error}", rank=self._rank,
                    hint="define it at the top of the script, and pass plain values, tensors or ps.per_worker(...)",
                ) from None  # fmt: skip
            handle = Handle(self._num_scheduled, _payload=payload)
            self._num_scheduled += 1
            self._open += 1
            self._waiting.append(handle)
            self._changed.notify_all()
            return handle

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until all that was scheduled is done."""
        self._wait(lambda: self._open == 0, timeout_s, lambda: f"{self._open} scheduled functions")
        with self._changed:
            self._raise_failure()

    def fetch(self, handle: Handle, timeout_s: float | None = None) -> Any:
        """Wait for one function, and return what it returned."""
        self._wait(lambda: handle.is_done, timeout_s, lambda: f"scheduled function {handle.number}")
        if handle._error is not None:
            raise handle._error
        return handle._value

    def _wait(self, is_over: Callable[[], bool], timeout_s: float | None, what: Callable[[], str]) -> None:
        # Each run has its bound, and each worker that is lost takes one run with it.
        bound_s = self._timeout_s * (len(self._here) + 2) if timeout_s is None else timeout_s
        end = SYSTEM_CLOCK.monotonic() + bound_s
        with self._changed:
            num_done = self._num_scheduled - self._open
            while not is_over() and self._failed is None:
                left_s = end - SYSTEM_CLOCK.monotonic()
                alone_s = self._lost_s + self._return_s - SYSTEM_CLOCK.monotonic()
                if not self._here and alone_s <= 0:
                    told = "; ".join(f"worker {one}: {why}" for one, why in sorted(self._lost.items()))
                    raise CollectiveError(
                        f"no worker is left for {what()}: {told}",
                        rank=self._rank,
                        hint="look at the output of the first that went",
                    )
                if left_s <= 0:
                    raise CollectiveTimeoutError(
                        f"waited {bound_s:g} s for {what()} on {name_ranks(sorted(self._here))}",
                        rank=self._rank,
                        hint="raise timeout_s, or look at the workers' stacks",
                    )
                self._changed.wait(left_s if self._here else min(left_s, alone_s))
                if timeout_s is None and self._num_scheduled - self._open > num_done:
                    num_done, end = self._num_scheduled - self._open, SYSTEM_CLOCK.monotonic() + bound_s

    def _raise_failure(self) -> None:
        if self._failed is not None:
            error, self._failed = self._failed, None
            raise error

    def _drive(self, link: Link, worker: int) -> None:
        """Give one worker a function after the other."""
        handle: Handle | None = None
        try:
            while True:
                with self._changed:
                    while not self._waiting and not self._is_closed:
                        self._changed.wait()
                    if not self._waiting:
                        break
                    handle = self._waiting.popleft()
                    handle.num_runs += 1
                body = torch.frombuffer(bytearray(handle._payload), dtype=torch.uint8)
                link.send(Message(PULL, number=handle.number, body=body), timeout_s=self._timeout_s)
                answer = link.receive(timeout_s=self._timeout_s)
                self._finish(handle, answer, worker)
                handle = None
            link.send(Message(BYE), timeout_s=_BYE_S)
        except RankwiseError as error:
            with self._changed:
                if self._here.get(worker) is link:  # else it has come back already
                    del self._here[worker]
                    self._lost[worker], self._lost_s = error.message, SYSTEM_CLOCK.monotonic()
                if handle is not None:
                    self._waiting.appendleft(handle)  # another does it again, before what came later
                self._changed.notify_all()

    def _finish(self, handle: Handle, answer: Message, worker: int) -> None:
        value, error = None, None
        if answer.kind == REFUSED:
            text = (answer.note or {}).get("error")
            error = RankFailedError(
                f"scheduled function {handle.number} raised on worker {worker}:\n{text}", rank=worker
            )
        elif answer.body is not None:
            try:
                value = pickle.loads(answer.body.numpy().tobytes())  # noqa: S301 - from a rank of our own job
            except Exception as problem:  # noqa: BLE001 - any class may have a pickle that fails in its own way
                error = RankFailedError(
                    f"what scheduled function {handle.number} returned on worker {worker} can't be read here: {problem!r}",
                    rank=worker,
                )
        with self._changed:
            handle._value, handle._error, handle.worker = value, error, worker
            handle._payload = b""
            self._open -= 1
            self._failed = self._failed or error
            if error is not None:  # as in tf: what has not begun is cancelled
                for other in self._waiting:
                    other._error, other.worker = (
                        RankFailedError(f"scheduled function {other.number} was cancelled: {error.message}"),
                        worker,
                    )
                self._open -= len(self._waiting)
                self._waiting.clear()
            self._changed.notify_all()

    def close(self) -> None:
        """Let the workers go when they have done what is scheduled, and wait some seconds for each to hear of it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_BYE_S)
        self._door.close()


def work(rank: int, index: int, num_workers: int, *, store: dist.Store, timeout_s: float) -> int:
    """Do what the coordinator schedules, until it closes; return how many functions were called.

    Args:
        rank: Our rank.
        index: Which worker we are.
        num_workers: Of how many.
        store: The servers' corner of the store.
        timeout_s: Seconds that the coordinator may give nothing to do.

    Raises:
        CollectiveError: The coordinator is gone.
    """
    try:
        link = knock(store, PLACE, peer="the coordinator", rank=rank, timeout_s=_JOIN_S)
    except ClosedError:
        return 0  # all is done: we were started again late
    link.send(Message(HELLO, note={"worker": rank}), timeout_s=timeout_s)
    own: dict[int, Any] = {}
    num_called = 0
    while True:
        message = link.receive(timeout_s=timeout_s)
        if message.kind == BYE or message.body is None:
            return num_called
        num_called += 1
        try:
            function, args = pickle.loads(message.body.numpy().tobytes())  # noqa: S301 - from a rank of our own job
            for one in args:
                if isinstance(one, PerWorker) and one.number not in own:
                    own[one.number] = one.make(index, num_workers)
            value = function(*[own[one.number] if isinstance(one, PerWorker) else one for one in args])
            answer = Message(ANSWER, body=torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8))
        except Exception as error:  # noqa: BLE001 - the coordinator raises it
            answer = Message(REFUSED, note={"error": "".join(traceback.format_exception(error))})
        link.send(answer, timeout_s=timeout_s)
