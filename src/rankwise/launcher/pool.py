"""A launcher that stays: one job after the other on the same supervisor and warm server, for ``rankwise.launch``.

It is a child of the program that calls a function on many ranks, and no fork of it: that may be a notebook with threads
and a GPU. It ends when the caller's end of the pipe for orders closes, however the caller died, or when nothing was ordered
for some minutes.
"""

from __future__ import annotations

import os
import queue
import shutil
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, final

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.environ import environ, is_on
from rankwise.base.errors import RankwiseError
from rankwise.base.events import EventLog
from rankwise.base.os_calls import raise_file_limit
from rankwise.engine import STORE_PROCESS
from rankwise.launcher.agent import ask_resident, find_host, open_workers
from rankwise.launcher.attempt_loop import open_rendezvous, run_attempts
from rankwise.launcher.console import Console
from rankwise.launcher.helper import InterruptedByUser
from rankwise.launcher.interpreter import find_own
from rankwise.launcher.job import Job, make_folder
from rankwise.launcher.pool_protocol import Answer, Call, Opening, take_over
from rankwise.launcher.publish import is_silent, publish
from rankwise.launcher.signals import Signals
from rankwise.launcher.spec import LaunchSpec, Logs, Program
from rankwise.launcher.warm_start import WarmStart, plan_warm_start
from rankwise.launcher.workers import Cooled, SupervisorLost, Warmed
from rankwise.verdict.report import render

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.launcher.pool_protocol import PoolsEnd
    from rankwise.launcher.warm_start import Host
    from rankwise.launcher.workers import Workers
    from rankwise.verdict.case import Verdict

CALL_PROCESS = STORE_PROCESS.with_name("call_process.py")
_LOOK_EVERY_S = 0.5
_SHUTDOWN_S = 5.0


@final
class _Orders:
    """Reads the orders in a thread, so that one to stop is heard while a job runs.

    Attributes:
        calls: The jobs that were ordered; None behind the last one.
        is_orphan: Whether the caller has ended without a word: then it has removed nothing.
    """

    def __init__(self, pipe: PoolsEnd, signals: Signals) -> None:
        self._pipe, self._signals, self._lock = pipe, signals, threading.Lock()
        self._is_busy = self.is_orphan = False
        self.calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()

    def start(self) -> None:
        """Begin to listen; only after the fork of the supervisor."""
        threading.Thread(target=self._listen, name="rankwise-orders", daemon=True).start()

    def end(self) -> None:
        """Take note that the job has ended: signals are no longer meant for it."""
        with self._lock:
            self._is_busy = False
            self._signals.take()

    def _listen(self) -> None:
        try:
            while (order := self._pipe.recv()) is not None:
                with self._lock:
                    if isinstance(order, Call):
                        self._is_busy = True  # what comes next is meant for it, whether it has begun or not
                        self.calls.put(order)
                    elif isinstance(order, int) and self._is_busy:
                        _send_self(order)
        except (EOFError, OSError):
            self.is_orphan = True
        self.calls.put(None)
        with self._lock:
            if self._is_busy:
                # Nobody waits for the outcome any more: the second signal means at once.
                _send_self(signal.SIGTERM)
                _send_self(signal.SIGINT)


def _send_self(number: int) -> None:
    if hasattr(signal, "pthread_kill"):
        # To the thread that sleeps: Linux gives what a process sends itself to the thread that sends it.
        signal.pthread_kill(threading.main_thread().ident or 0, number)
    else:
        signal.raise_signal(number)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Pool:
    """What the jobs share."""

    spec: LaunchSpec
    host: Host
    workers: Workers
    warm: WarmStart
    signals: Signals

    def run(self, call: Call, number: int) -> Answer:
        """Run one job, of a number of its own, to its end."""
        answer = Answer(num_ranks=self.host.num_ranks)
        # What happened while nobody looked; a look shows what is there already, and only the next one what is new.
        while changes := self.workers.wait_change(0):
            if any(isinstance(change, SupervisorLost) for change in changes):
                return answer
            for change in changes:
                if isinstance(change, (Warmed, Cooled)):
                    self.warm.note(change)
        spec = replace(
            self.spec,
            max_restarts=call.max_restarts,
            logs=Logs(folder=call.folder),
            variables=(("RANKWISE_CALL", str(call.folder)), *call.variables.items()),
            watch=is_on("RANKWISE_WATCH", default=True, env=_join(environ(), call.variables)),
        )
        console = Console()
        logs = make_folder(spec.logs, "logs")
        job = Job(
            spec=spec, host=self.host, warm=self.warm, folder=logs, rendezvous=open_rendezvous(spec, self.host, None, console),
            workers=self.workers, signals=self.signals, console=console, clock=SYSTEM_CLOCK,
            events=EventLog(logs / "events.jsonl"), serial=number,
        )  # fmt: skip

        def keep(job: Job, verdict: Verdict, *, attempt: int, reason: str = "", is_final: bool = True) -> None:
            if not is_final:
                publish(job, verdict, attempt=attempt, reason=reason, is_final=False)
                return
            answer.verdict, answer.restarts = verdict, attempt
            answer.reported = _tell(verdict, reason)
            if is_silent(verdict):
                console.say(render(verdict))  # the values go back all the same

        run_attempts(job, keep)
        return answer


def _join(env: dict[str, str], changes: dict[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in {**env, **changes}.items() if value is not None}


def _tell(verdict: Verdict, reason: str) -> str:
    """Return the rows of the report that are neither its head, nor the error, nor the traceback, nor a log that goes."""
    rest = replace(verdict, message="", fix="", traceback="", logs={})
    return "\n".join([*render(rest).splitlines()[1:], *([f"  {reason}"] if reason else [])])


def main(orders: int, answers: int) -> None:
    """Serve until the caller is gone.

    Args:
        orders: The number of the pipe on which orders come.
        answers: Of that on which answers go.
    """
    pipe, caller = take_over(orders, writable=False), take_over(answers, writable=True)
    try:
        opening = pipe.recv()
    except (EOFError, OSError):
        return  # the caller has changed its mind
    try:
        if isinstance(opening, Opening):
            _serve(opening, pipe, caller)
    except InterruptedByUser:
        os._exit(1)
    except RankwiseError as error:
        _say(caller, type(error)(error.message.replace("--nproc-per-node ", "nprocs="), hint=error.hint))
    os._exit(0)  # at once: a thread still reads


def _serve(opening: Opening, pipe: PoolsEnd, caller: PoolsEnd) -> None:
    signals, clock, workers = Signals(("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")), SYSTEM_CLOCK, None
    orders, kind = _Orders(pipe, signals), opening.kind
    closings: list[Callable[[], None]] = []
    call: Call | None = None
    try:
        program = Program(
            script=str(CALL_PROCESS), imports=opening.imports, first_path=_find_first(kind.first_path), flags=kind.flags
        )
        spec = LaunchSpec(
            program=program, nproc_per_node=kind.num_ranks, shutdown_timeout_s=_SHUTDOWN_S,
            cold=kind.cold, preload=kind.preload,
        )  # fmt: skip
        host, _ = find_host(spec, find_own(), signals, closings)
        plan = plan_warm_start(spec, host)
        supervisor = ask_resident(spec, host, plan, signals, Console())
        workers = open_workers(signals, clock, supervisor)
        orders.start()
        raise_file_limit()
        warm = WarmStart(spec, host, workers, Console(), plan=plan, is_forked=supervisor is not None, stays=True)
        pool = _Pool(spec=spec, host=host, workers=workers, warm=warm, signals=signals)
        for number, call in enumerate(iter(partial(_wait_call, orders, signals, opening.idle_s), None)):
            # One that is stopped already does not begin.
            answer = Answer() if signals.has_pending else pool.run(call, number)
            orders.end()
            _say(caller, answer)
    finally:
        if workers is not None:
            workers.close()
        for close in closings:
            close()
        if orders.is_orphan and call is not None:
            shutil.rmtree(call.folder, ignore_errors=True)


def _find_first(first: str) -> Path:
    """Return the folder whose files come before installed modules in the ranks."""
    # What stands in front of ours too has been in front of everything that the server imports.
    return CALL_PROCESS.parent if first in sys.path else Path(first)


def _wait_call(orders: _Orders, signals: Signals, idle_s: float) -> Call | None:
    """Return the next order; None when there will be none, or somebody wants this process to end."""
    end = SYSTEM_CLOCK.monotonic() + idle_s
    while (left_s := end - SYSTEM_CLOCK.monotonic()) > 0:
        try:
            return orders.calls.get(timeout=min(left_s, _LOOK_EVERY_S))
        except queue.Empty:
            if signals.has_pending:
                return None
    return None


def _say(caller: PoolsEnd, answer: Answer | RankwiseError) -> None:
    with suppress(OSError):  # it is gone: the end of its orders ends us
        caller.send(answer)
