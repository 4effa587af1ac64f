"""Functions scheduled on workers by one rank that coordinates: what a worker's death leaves undone is done by another.

The words are those of TensorFlow's ClusterCoordinator (https://www.tensorflow.org/tutorials/distribute/parameter_server_training):
``schedule``, ``join``, ``fetch``, and data that each worker makes for itself.

A coordinator that dies may be started again alone (servers/journal.py): its workers connect to the new process, and bring the answer that the
former one may not have received.
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
from rankwise.base.log import get_logger
from rankwise.base.rank_names import name_ranks
from rankwise.parallel.servers.journal import Journal, describe_call
from rankwise.parallel.servers.link import Kind, Link, LinkLostError, Message
from rankwise.parallel.servers.listener import RETURN_S, ClosedError, Listener, connect

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist


_LOGGER = get_logger(__name__)

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
    _call: str = field(default="", repr=False)

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

    One function may take ``timeout_s``, then its worker is given up. With ``returns`` a worker that has died is started again, so that we wait for it
    when no other is left; the journal is that of a former process of this rank, if that has died.
    """

    def __init__(
        self, rank: int, workers: Sequence[int], *, listener: Listener, timeout_s: float, journal: Journal, returns: bool = False,
    ) -> None:  # fmt: skip
        self._rank, self._timeout_s, self._journal = rank, timeout_s, journal
        self._join_s, self._return_s = (RETURN_S, RETURN_S) if returns else (_JOIN_S, 0.0)
        self._lost_s = 0.0  # when the last one was lost
        self._changed = threading.Condition()
        self._waiting: deque[Handle] = deque()
        self._open, self._num_scheduled, self._is_closed, self._has_given_up = 0, 0, False, False
        self._failed: RankwiseError | None = None
        self._connected, self._lost = dict[int, Link](), dict[int, str]()
        self._answers = dict[int, tuple[int, Message]]()
        self._threads = set[threading.Thread]()
        self._listener = listener
        listener.open()
        threading.Thread(target=self._accept, name="rankwise-coordinator-listener", daemon=True).start()
        self._wait_for_workers(len(workers))
        if journal.is_resumed:
            _LOGGER.info(
                f"[rank {rank}] the coordinator resumes: {len(journal)} scheduled functions have returned already and are not called again"
            )

    def _wait_for_workers(self, num_workers: int) -> None:
        # Workers of a coordinator that died may be in a function of it, and connect when they have done it.
        bound_s = self._timeout_s if self._journal.is_resumed else self._join_s
        with self._changed:
            self._changed.wait_for(lambda: len(self._connected) + len(self._lost) >= num_workers, bound_s)
            connected = sorted(self._connected)
            if len(connected) + len(self._lost) >= num_workers or (self._journal.is_resumed and connected):
                return
            self._has_given_up = True
            self._changed.notify_all()
        self._listener.close(
            restarts=True
        )  # it is not marked as closed: workers would take that for the end of all work
        raise RendezvousError(
            f"{len(connected)} of {num_workers} workers connected to the coordinator within {bound_s:g} s: {name_ranks(connected)}",
            rank=self._rank, hint="the others must call ps.work()",
        )  # fmt: skip

    def _accept(self) -> None:
        """Accept workers, those too that are started again, or connect late."""
        while not (self._is_closed or self._has_given_up):
            if (link := self._listener.accept(_POLL_S)) is not None:
                threading.Thread(
                    target=self._attend, args=(link,), name="rankwise-coordinator", daemon=True
                ).start()

    def _attend(self, link: Link) -> None:
        """Learn which worker it is, and give it what there is to do."""
        try:
            hello = link.receive(timeout_s=_JOIN_S).note
            worker = int(hello["worker"])
            link.peer = f"rank {worker}"
            answer = link.receive(timeout_s=self._timeout_s) if hello.get("brings_answer") else None
        except (RankwiseError, KeyError, ValueError, TypeError):  # it has died since, or is no worker of ours
            link.close()
            return
        with self._changed:
            # One that has raised runs again: its error may have been what ended the former coordinator.
            if answer is not None and answer.kind == Kind.ANSWER and self._journal.is_resumed:
                self._answers[answer.number] = (worker, answer)
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
            handle = Handle(self._num_scheduled, _payload=payload, _call=describe_call(function, args))
            self._num_scheduled += 1
            self._open += 1
            if not self._replay(handle):
                self._waiting.append(handle)
            self._changed.notify_all()
            return handle

    def _replay(self, handle: Handle) -> bool:
        """Finish a function that was done before this process was started again; return whether it was."""
        number = handle.number
        if (done := self._journal.find(number, handle._call)) is not None:
            worker, value = done
            self._finish(
                handle, Message(Kind.ANSWER, number=number, body=_to_body(value)), worker, keeps=False
            )
            return True
        worker, answer = self._answers.pop(number, (0, None))
        if answer is None or answer.note.get("call") != handle._call:
            return False
        self._finish(handle, answer, worker)
        return True

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
                note, body = {"call": handle._call}, _to_body(handle._payload)
                link.send(
                    Message(Kind.PULL, number=handle.number, note=note, body=body), timeout_s=self._timeout_s
                )
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

    def _finish(self, handle: Handle, answer: Message, worker: int, *, keeps: bool = True) -> None:
        value, error, pickled = None, None, b""
        if answer.kind == Kind.REFUSED:
            # The cause is in the first line: a report shows no more of it.
            error = RankFailedError(
                f"scheduled function {handle.number} raised on rank {worker}: {answer.note.get('cause')}\n{answer.note.get('error')}",
                rank=worker,
            )
        elif answer.body is not None:
            try:
                pickled = answer.body.numpy().tobytes()
                value = pickle.loads(pickled)  # noqa: S301 - from a rank of our own job
            except Exception as problem:  # noqa: BLE001 - any class may have a pickle that fails in its own way
                error = RankFailedError(
                    f"what scheduled function {handle.number} returned on rank {worker} can't be read here: {problem!r}",
                    rank=worker,
                )
        with self._changed:
            if keeps and error is None and answer.body is not None:
                self._journal.add(handle.number, handle._call, worker, pickled)
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
        with self._changed:
            self._journal.close()


def _to_body(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def work(
    rank: int, index: int, num_workers: int, *, store: dist.Store, timeout_s: float, waits: Callable[[], bool] = lambda: False,
) -> int:  # fmt: skip
    """Do what the coordinator schedules, until it closes; return how many functions were called.

    It may give nothing to do for ``timeout_s``; one that has died is waited for while ``waits`` says that it is started again.
    """
    own: dict[int, Any] = {}
    answer: Message | None = None
    num_called, bound_s = 0, _JOIN_S
    while True:
        try:
            link = connect(store, COORDINATOR, peer="the coordinator", rank=rank, timeout_s=bound_s)
        except ClosedError:
            # All is done: we were started again late, or did not get the message of the end.
            return num_called
        try:
            hello = {"worker": rank, "brings_answer": answer is not None}
            link.send(Message(Kind.HELLO, note=hello), timeout_s=timeout_s)
            if answer is not None:
                link.send(answer, timeout_s=timeout_s)
            while True:
                message = link.receive(timeout_s=timeout_s)
                if message.kind == Kind.BYE or message.body is None:
                    return num_called
                num_called += 1
                answer = _call(message, own, index, num_workers)
                link.send(answer, timeout_s=timeout_s)
        except LinkLostError:
            if not waits():
                raise
            bound_s = RETURN_S
        finally:
            link.close()


def _call(message: Message, own: dict[int, Any], index: int, num_workers: int) -> Message:
    """Call what was scheduled, with what this worker has made for itself, and return the answer."""
    note = {"call": message.note.get("call")}
    try:
        assert message.body is not None  # noqa: S101 - checked by the caller
        function, args = pickle.loads(message.body.numpy().tobytes())  # noqa: S301 - from a rank of our own job
        for one in args:
            if isinstance(one, PerWorker) and one.number not in own:
                own[one.number] = one.make(index, num_workers)
        value = function(*[own[one.number] if isinstance(one, PerWorker) else one for one in args])
        return Message(Kind.ANSWER, number=message.number, note=note, body=_to_body(pickle.dumps(value)))
    except Exception as error:  # noqa: BLE001 - the coordinator raises it
        note["cause"] = traceback.format_exception_only(error)[-1].partition("\n")[0]
        note["error"] = "".join(traceback.format_exception(error))
        return Message(Kind.REFUSED, number=message.number, note=note)
