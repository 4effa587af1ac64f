"""Stop early, all ranks at one step: on a scheduler's notice (SIGTERM, SIGUSR1), or before a deadline.

A signal reaches some ranks, and each at another moment; ranks that acted on it at once would be at different steps, and wait
for each other. So a handler only leaves a note. A thread in each rank asks the job's store now and then whether another
rank has had a notice, and settles with the other threads at which call of ``should_stop()`` all stop (runtime/stop_vote.py).
A step costs a lock and a comparison, and no message.

What may go wrong, and what happens then:

- A rank has ended before: its thread has answered for it, when it left.
- A rank is dead or frozen, or never calls ``should_stop()``: the others' calls wait, as in a collective, and name it in the end.
- The store is gone: a rank without a notice works on; one with a notice says that it can't tell the others.
- Threads hear of another rank's notice within half a second; with thousands of ranks they ask less often.
- More signals after the first change nothing: what ends a job that takes too long is the SIGKILL of whoever asked.
"""

from __future__ import annotations

import atexit
import os
import queue
import signal
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, final

from rankwise.base.deadline import OverdueError, call_within
from rankwise.base.errors import CollectiveError, CollectiveTimeoutError, UsageError
from rankwise.base.log import get_logger
from rankwise.base.os_calls import listens_to
from rankwise.base.requeue import END_SIGNAL, note_interrupts
from rankwise.runtime.child_shield import close_shield, open_shield
from rankwise.runtime.stop_vote import StopVote

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType

    import torch.distributed as dist

    from rankwise.base.clock import Clock
    from rankwise.runtime.stop_deadline import Deadline

_LOGGER = get_logger(__name__)

#: What schedulers send before they end a job: Slurm and Kubernetes SIGTERM; SIGUSR1 by ``#SBATCH --signal=USR1@90``.
NOTICES = ("SIGTERM", "SIGUSR1")
#: How a reason begins if it is a rank's wish, and not a scheduler's.
WISH = "asked for: "
_GLANCE_S = 0.5
#: So many questions a second are nothing to the store.
_MOST_GLANCES_PER_S = 2000
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.1
_STORE_S, _GOODBYE_S = 5.0, 5.0


@final
class StopWatch:
    """One rank's ear for notices, and its part in the agreement.

    Args:
        rank: Ours.
        world_size: How many ranks must agree.
        store: The job's, in a corner of this watch's own.
        timeout_s: Seconds that a call may wait for the others' answers.
        deadline: When to stop without a signal; None for never.
        signals: Numbers of the signals that are notices.
        clock: Where time comes from.
        agrees: Whether all ranks stop at one agreed call; else each stops at its next one after it has heard of the
            notice.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        store: dist.Store,
        timeout_s: float,
        deadline: Deadline | None,
        signals: tuple[int, ...],
        clock: Clock,
        agrees: bool = True,
    ) -> None:
        self.agrees = agrees
        self._rank, self._world_size, self._timeout_s = rank, world_size, timeout_s
        self._store, self._deadline, self._clock = store, deadline, clock
        #: Why should_stop() has returned True; None before.
        self.reason: str | None = None
        self._vote = StopVote()
        # Unlike an Event's, its put() may be interrupted by a handler that calls it too.
        self._came: queue.SimpleQueue[int | str | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._has_notice = self._was_asked = False
        self._request, self._trouble = "", ""
        self._before: dict[int, signal._HANDLER] = {}
        self._listen(signals)
        self._thread: threading.Thread | None = None
        if world_size > 1:
            self._thread = threading.Thread(target=self._settle_or_tell, name="rankwise-stop", daemon=True)
            self._thread.start()

    # ------------------------------------------------------------ in the rank

    def should_stop(self) -> bool:
        """Count a call, and tell whether this is the agreed one, or a later one.

        Raises:
            CollectiveError: There is a notice, and the others can't be told.
            CollectiveTimeoutError: Some rank did not answer.
        """
        if self.reason is not None:
            return True
        if self._thread is None:
            self.reason = self._find_reason()
            return self.reason is not None
        if not self.agrees:
            # Where the store is gone, nobody else can be told, and this rank still has to stop.
            self.reason = self._request or (self._find_reason() if self._trouble else None) or None
            return self.reason is not None
        decision = self._vote.begin_call()
        if self._trouble and (self._has_notice or self._is_late()):
            raise self._tell_trouble()
        if decision is None:
            decision = self._vote.wait_settled(self._timeout_s)
        if decision is None:
            raise self._tell_trouble() if self._trouble else self._name_silent()
        if decision:
            self.reason = self._request
        return decision

    def request(self, reason: str) -> None:
        """Stop at this rank's own wish, as after a notice."""
        self._was_asked = True
        self._came.put(reason)

    @property
    def was_asked(self) -> bool:
        """Whether a rank has wished to stop, as far as this one knows."""
        return self._was_asked or (self.reason or "").startswith(WISH)

    @property
    def has_notice(self) -> bool:
        """Whether a scheduler's notice has come here, or has been agreed on."""
        return self._has_notice or (self.reason is not None and not self.reason.startswith(WISH))

    def forget(self) -> None:
        """Stop listening, as if there had been no wish."""
        self.reason = None
        self.close()

    def close(self) -> None:
        """Stop listening.

        After a notice the handlers stay: the rank is leaving, and a second signal must not end it.
        """
        self._closing.set()
        self._came.put(None)
        if self._thread is not None:
            self._thread.join(_GOODBYE_S)
        if self.reason is not None or self._has_notice:
            _leaving.append(self)
            return
        close_shield()
        if not _is_main_thread():
            return
        for number, handler in self._before.items():
            if getattr(signal.getsignal(number), "__self__", None) is self:
                signal.signal(number, handler)
        if signal.SIGINT in self._before:
            note_interrupts(listens=False)

    def ignore_notices(self) -> None:
        """Ignore whatever is still ours: the interpreter goes down, and no handler will run any more."""
        for number in self._before:
            if getattr(signal.getsignal(number), "__self__", None) is self:
                signal.signal(number, signal.SIG_IGN)

    # --------------------------------------------------------------- signals

    def _listen(self, numbers: tuple[int, ...]) -> None:
        if not _is_main_thread():
            _LOGGER.warning(
                f"[rank {self._rank}] only the main thread can handle signals, and this is another one: "
                "call ctx.listen_for_stop() there, before the first should_stop()"
            )
            return
        taken = [one for one in numbers if one != signal.SIGTERM and is_caught_by_native_code(one)]
        for number in taken:
            _LOGGER.warning(
                f"[rank {self._rank}] {signal.Signals(number).name} has a handler in native code "
                "(faulthandler.register?), so it is not a notice to stop here"
            )
        numbers = tuple(number for number in numbers if number not in taken)
        open_shield(numbers)
        for number in numbers:
            before = signal.getsignal(number)
            if isinstance(earlier := getattr(before, "__self__", None), StopWatch):
                before = earlier._before[number]  # of a job before this one, which ended after a notice
            # None: set by native code before Python came, and not to be had back.
            self._before[number] = signal.SIG_DFL if before is None else before
            signal.signal(number, self._note)
        if signal.SIGINT in self._before:
            note_interrupts(listens=True)
        # Who has a handler of his own for SIGTERM wants to hear it from a launcher whose job has failed, too.
        if END_SIGNAL is not None and self._before.get(signal.SIGTERM) == signal.SIG_DFL:
            self._before[END_SIGNAL] = signal.SIG_DFL
            signal.signal(END_SIGNAL, self._end)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Leave a note; runs between any two instructions of the main thread, in the middle of a backward too."""
        self._has_notice = True
        self._came.put(number)
        before = self._before[number]
        # Python's own for SIGINT is no handler of the script's: it would raise KeyboardInterrupt, and nothing would be
        # saved.
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def _end(self, _number: int, _frame: FrameType | None) -> None:
        """The job has failed, says the launcher, and nothing is left to save: end as SIGTERM ends whoever does not listen."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _find_reason(self, wait_s: float = 0.0) -> str | None:
        """Return why this rank itself wants to stop, waiting a little for a reason."""
        with suppress(queue.Empty):
            came = self._came.get(block=wait_s > 0, timeout=wait_s or None)
            if isinstance(came, str):
                return f"{WISH}{came}, on rank {self._rank}"
            if came is not None:
                return f"{signal.Signals(came).name} on rank {self._rank}"
        is_late = self._deadline is not None and self._is_late()
        return f"{self._deadline.reason}, on rank {self._rank}" if self._deadline and is_late else None

    def _is_late(self) -> bool:
        return self._deadline is not None and self._clock.monotonic() >= self._deadline.at_s

    # ------------------------------------------------------------ in the thread

    def _settle_or_tell(self) -> None:
        # A connection of its own: the main thread may be waiting for an answer in the other.
        with suppress(RuntimeError, AttributeError):
            self._store = self._store.clone()
        try:
            self._settle()
        except RuntimeError as error:
            self._trouble = (str(error).strip() or type(error).__name__).splitlines()[0]
            self._vote.give_up()

    def _settle(self) -> None:
        self._store.set(f"here/{self._rank}", "1")
        if not self._wait_request():
            self._post(0)  # we leave: whatever the others agree on later, don't wait for us
            return
        self._post(self._vote.answer())
        pause_s = _FIRST_PAUSE_S
        while not self._store.check(["agreed"]):
            if self._closing.wait(pause_s):
                return
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        self._vote.settle(int(self._store.get("agreed")))

    def _wait_request(self) -> bool:
        """Wait for a notice of ours or of another rank; False when we leave before there is one."""
        glance_s = max(_GLANCE_S, self._world_size / _MOST_GLANCES_PER_S)
        while not self._closing.is_set():
            left_s = glance_s if self._deadline is None else self._deadline.at_s - self._clock.monotonic()
            reason = self._find_reason(max(0.001, min(glance_s, left_s)))
            if reason is not None:
                self._request = reason
                # Of several notices the first one is told on all ranks.
                self._request = self._store.compare_set("request", "", reason).decode()
                return True
            if not self._closing.is_set() and self._store.check(["request"]):
                self._request = self._store.get("request").decode()
                return True
        return False

    def _post(self, answer: int) -> None:
        """Give our answer; the last one to do so works out the greatest."""
        self._store.set(f"answer/{self._rank}", str(answer))
        if self._store.add("num_answers", 1) == self._world_size:
            answers = [int(self._store.get(f"answer/{rank}")) for rank in range(self._world_size)]
            self._store.set("agreed", str(max(answers)))

    # ------------------------------------------------------------------ errors

    def _tell_trouble(self) -> CollectiveError:
        return CollectiveError(
            f"should_stop: there is a notice to stop, but the job's store is gone ({self._trouble})",
            rank=self._rank,
            hint="the process that serves it (rank 0, or the launcher) has ended: look at its output",
        )

    def _name_silent(self) -> CollectiveTimeoutError:
        def find_silent() -> tuple[list[int], list[int]]:
            silent = [rank for rank in range(self._world_size) if not self._store.check([f"answer/{rank}"])]
            return silent, [rank for rank in silent if not self._store.check([f"here/{rank}"])]

        text = f"should_stop: {self._request}, and after {self._timeout_s:g} s"
        try:
            silent, absent = call_within(_STORE_S, find_silent)
        except (OverdueError, RuntimeError):
            silent, absent = [], []
        if not silent:
            return CollectiveTimeoutError(
                f"{text} there was no agreement, and the store does not show who is missing",
                rank=self._rank,
                hint="check whether the process that serves it (rank 0, or the launcher) still runs",
            )
        never = f"; ranks {absent} have never called it" if absent else ""
        return CollectiveTimeoutError(
            f"{text} ranks {silent} had not answered{never}",
            rank=self._rank,
            hint="every rank must call should_stop() once a step; a rank that has called it is dead, stopped or frozen",
        )


def read_signals(signals: Iterable[str | int], rank: int) -> tuple[int, ...]:
    """Return the numbers of signals that are given by name or number.

    Args:
        signals: As for ``listen_for_stop``.
        rank: Ours, for errors.

    Raises:
        UsageError: One of them is no signal that a process can take, or there is none.
    """
    hint = "for example signals=('SIGTERM', 'SIGUSR2')"
    if isinstance(signals, str) or not hasattr(signals, "__iter__"):
        raise UsageError(f"signals={signals!r} is not a tuple of signals", rank=rank, hint=hint)
    numbers = []
    for one in signals:
        try:
            known = signal.Signals[one] if isinstance(one, str) else signal.Signals(one)
        except (KeyError, ValueError):
            if one in NOTICES:
                continue  # not every system has SIGUSR1
            known = None
        if known is None or isinstance(one, bool):
            raise UsageError(f"signals: there is no signal {one!r}", rank=rank, hint=hint)
        if known.name in {"SIGKILL", "SIGSTOP"}:
            raise UsageError(f"signals: no process can handle {known.name}", rank=rank, hint=hint)
        numbers.append(int(known))
    if not numbers:
        raise UsageError(f"signals={signals!r} names none", rank=rank, hint=hint)
    return tuple(dict.fromkeys(numbers))


#: What has closed after a notice.
_leaving: list[StopWatch] = []


@atexit.register
def _ignore_repeated() -> None:
    """Let a notice that is repeated while the interpreter goes down kill nobody.

    Python gives back its handlers then, and leaves alone what is ignored. Not earlier: a program that the script starts
    on its way out would ignore the signals too.
    """
    if _is_main_thread():
        for watch in _leaving:
            watch.ignore_notices()


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def is_caught_by_native_code(number: int) -> bool:
    """Whether a signal that Python does not handle is caught all the same."""
    return signal.getsignal(number) in {signal.SIG_DFL, None} and listens_to(os.getpid(), number)
