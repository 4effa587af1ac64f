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
from rankwise.base.rank_names import name_ranks
from rankwise.base.roles import note_needed
from rankwise.parallel.servers.link import Kind, Link, LinkLostError, Message
from rankwise.parallel.servers.listener import RETURN_S, ClosedError, Listener, connect

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist


_BYE_S, _JOIN_S = 5.0, 60.0
_POLL_S = 0.2
#: The name under which the coordinator listens; servers have numbers.
COORDINATOR = "coordinator"


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
        """Whether it has ended, well or not."""
        return self.worker is not None


@final
class PerWorker:
    """Something that each worker makes for itself, once, such as an iterator over its data; made by ``ps.per_worker(fn)``."""

    _numbers = count()

    def __init__(self, make: Callable[[int, int], Any]) -> None:
        self.make, self.number = make, next(self._numbers)


@final
class Coordinator:
    """The side that schedules.

    One function may take ``timeout_s``, then its worker is given up. With ``returns`` a worker that has died is started
    again, so that we wait for it when no other is left.
    """

    def __init__(
        self,
        rank: int,
        workers: Sequence[int],
        *,
        listener: Listener,
        timeout_s: float,
        returns: bool = False,
    ) -> None:
        note_needed()  # what it has scheduled is in its memory
        self._rank, self._timeout_s = rank, timeout_s
        self._join_s, self._return_s = (RETURN_S, RETURN_S) if returns else (_JOIN_S, 0.0)
        self._lost_s = 0.0  # when the last one was lost
        self._changed = threading.Condition()
        self._waiting: deque[Handle] = deque()
        self._open, self._num_scheduled, self._is_closed, self._has_given_up = 0, 0, False, False
        self._failed: RankwiseError | None = None
        self._connected, self._lost = dict[int, Link](), dict[int, str]()
        self._threads = set[threading.Thread]()
        self._listener = listener
        listener.open()
        threading.Thread(target=self._accept, name="rankwise-coordinator-listener", daemon=True).start()
        self._wait_for_workers(len(workers))

    def _wait_for_workers(self, num_workers: int) -> None:
        with self._changed:
            if self._changed.wait_for(lambda: len(self._connected) + len(self._lost) >= num_workers, self._join_s):
                return
            connected = sorted(self._connected)
            self._has_given_up = True
            self._changed.notify_all()
        # It is not marked as closed: workers would take that for the end of all work.
        self._listener.close(restarts=True)
        raise RendezvousError(
            f"{len(connected)} of {num_workers} workers connected to the coordinator within {self._join_s:g} s: {name_ranks(connected)}",
            rank=self._rank, hint="the others must call ps.work()",
        )  # fmt: skip

    def _accept(self) -> None:
        """Accept workers, those too that are started again, or connect late."""
        while not (self._is_closed or self._has_given_up):
            if (link := self._listener.accept(_POLL_S)) is not None:
                threading.Thread(target=self._attend, args=(link,), name="rankwise-coordinator", daemon=True).start()

    def _attend(self, link: Link) -> None:
        """Learn which worker it is, and give it what there is to do."""
        try:
            worker = int(link.receive(timeout_s=_JOIN_S).note["worker"])
            link.peer = f"rank {worker}"
        except (RankwiseError, KeyError, ValueError, TypeError):  # it has died since, or is no worker of ours
            link.close()
            return
        with self._changed:
            self._connected[worker] = link
            self._lost.pop(worker, None)
            self._threads.add(threading.current_thread())
            self._changed.notify_all()
        try:
            self._drive(link, worker)
        finally:
            self._threads.discard(threading.current_thread())
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
        """Wait until all scheduled functions are done."""
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
        bound_s = self._timeout_s * (len(self._connected) + 2) if timeout_s is None else timeout_s
        end = SYSTEM_CLOCK.monotonic() + bound_s
        with self._changed:
            num_done = self._num_scheduled - self._open
            while not is_over() and self._failed is None:
                left_s = end - SYSTEM_CLOCK.monotonic()
                alone_s = self._lost_s + self._return_s - SYSTEM_CLOCK.monotonic()
                if not self._connected and alone_s <= 0:
                    reasons = "; ".join(f"rank {one}: {why}" for one, why in sorted(self._lost.items()))
                    raise CollectiveError(
                        f"no worker is left for {what()}: {reasons}",
                        rank=self._rank,
                        hint="look at the output of the first that ended",
                    )
                if left_s <= 0:
                    raise CollectiveTimeoutError(
                        f"waited {bound_s:g} s for {what()} on {name_ranks(sorted(self._connected))}",
                        rank=self._rank,
                        hint="raise timeout_s, or look at the workers' stacks",
                    )
                self._changed.wait(left_s if self._connected else min(left_s, alone_s))
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
                    while not (self._waiting or self._is_closed or self._has_given_up):
                        self._changed.wait()
                    if self._has_given_up:
                        return  # without the message that all is done: the worker sees that it has lost us
                    if not self._waiting:
                        break
                    handle = self._waiting.popleft()
                    handle.num_runs += 1
                task = Message(Kind.PULL, number=handle.number, body=_to_body(handle._payload))
                link.send(task, timeout_s=self._timeout_s)
                answer = link.receive(timeout_s=self._timeout_s)
                self._finish(handle, answer, worker)
                handle = None
            link.send(Message(Kind.BYE), timeout_s=_BYE_S)
        except RankwiseError as error:
            with self._changed:
                if self._connected.get(worker) is link:  # else it has connected again already
                    del self._connected[worker]
                    self._lost[worker], self._lost_s = error.message, SYSTEM_CLOCK.monotonic()
                if handle is not None:
                    self._waiting.appendleft(handle)  # another does it again, before what was scheduled later
                self._changed.notify_all()

    def _finish(self, handle: Handle, answer: Message, worker: int) -> None:
        value, error = None, None
        if answer.kind == Kind.REFUSED:
            # The cause is in the first line: a report shows no more of it.
            error = RankFailedError(
                f"scheduled function {handle.number} raised on rank {worker}: {answer.note.get('cause')}\n{answer.note.get('error')}",
                rank=worker,
            )
        elif answer.body is not None:
            try:
                value = pickle.loads(answer.body.numpy().tobytes())  # noqa: S301 - from a rank of our own job
            except Exception as problem:  # noqa: BLE001 - any class may have a pickle that fails in its own way
                error = RankFailedError(
                    f"what scheduled function {handle.number} returned on rank {worker} can't be read here: {problem!r}",
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
        """Let the workers go when they have done what is scheduled, and wait some seconds until each has the message."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        end = SYSTEM_CLOCK.monotonic() + _BYE_S
        for thread in list(self._threads):
            thread.join(max(0.0, end - SYSTEM_CLOCK.monotonic()))
        self._listener.close()


def _to_body(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def work(
    rank: int,
    index: int,
    num_workers: int,
    *,
    store: dist.Store,
    timeout_s: float,
    waits: Callable[[], bool] = lambda: False,
) -> int:
    """Do what the coordinator schedules, until it closes; return how many functions were called.

    It may give nothing to do for ``timeout_s``. Where the link to it is lost, it is sought again while ``waits`` says
    that ranks return: it may have given us up when we were frozen.
    """
    own: dict[int, Any] = {}
    num_called, bound_s = 0, _JOIN_S
    while True:
        try:
            link = connect(store, COORDINATOR, peer="the coordinator", rank=rank, timeout_s=bound_s)
        except ClosedError:
            # All is done: we were started again late, or did not get the message of the end.
            return num_called
        try:
            link.send(Message(Kind.HELLO, note={"worker": rank}), timeout_s=timeout_s)
            while True:
                message = link.receive(timeout_s=timeout_s)
                if message.kind == Kind.BYE or message.body is None:
                    return num_called
                num_called += 1
                link.send(_call(message, own, index, num_workers), timeout_s=timeout_s)
        except LinkLostError:
            if not waits():
                raise
            bound_s = RETURN_S
        finally:
            link.close()


def _call(message: Message, own: dict[int, Any], index: int, num_workers: int) -> Message:
    """Call what was scheduled, with what this worker has made for itself, and return the answer."""
    try:
        assert message.body is not None  # noqa: S101 - checked by the caller
        function, args = pickle.loads(message.body.numpy().tobytes())  # noqa: S301 - from a rank of our own job
        for one in args:
            if isinstance(one, PerWorker) and one.number not in own:
                own[one.number] = one.make(index, num_workers)
        value = function(*[own[one.number] if isinstance(one, PerWorker) else one for one in args])
        return Message(Kind.ANSWER, number=message.number, body=_to_body(pickle.dumps(value)))
    except Exception as error:  # noqa: BLE001 - the coordinator raises it
        cause = traceback.format_exception_only(error)[-1].partition("\n")[0]
        note = {"cause": cause, "error": "".join(traceback.format_exception(error))}
        return Message(Kind.REFUSED, number=message.number, note=note)
