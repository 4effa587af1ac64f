"""A launcher that stays: one job after the other on the same supervisor and warm server, for ``rankwise.launch``.

It is a child of the program that calls a function on many ranks, and no fork of it: that may be a notebook with threads
and a GPU. Orders come as JSON lines on standard input, answers go out on a pipe of its own. It ends when the caller's end
of standard input closes, however the caller died, or when nothing was ordered for some minutes.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, final

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.environ import environ, is_on
from rankwise.base.errors import RankwiseError, UsageError
from rankwise.base.events import EventLog
from rankwise.base.host import share_cores
from rankwise.base.os_calls import IS_WINDOWS, raise_file_limit
from rankwise.engine import STORE_PROCESS
from rankwise.launcher.agent import ask_host, ask_resident, open_workers
from rankwise.launcher.attempt_loop import open_rendezvous, run_attempts
from rankwise.launcher.console import Console
from rankwise.launcher.helper import Helper, InterruptedByUser
from rankwise.launcher.interpreter import find_own
from rankwise.launcher.job import Job, make_folder
from rankwise.launcher.publish import is_silent, publish
from rankwise.launcher.signals import Signals
from rankwise.launcher.spec import LaunchSpec, Logs, Program
from rankwise.launcher.warm_start import Host, WarmStart, plan_warm_start
from rankwise.launcher.workers import Cooled, SupervisorLost, Warmed
from rankwise.verdict.report import render

if TYPE_CHECKING:
    from typing import TextIO

    from rankwise.launcher.workers import Workers
    from rankwise.verdict.case import Verdict

CALL_PROCESS = STORE_PROCESS.with_name("call_process.py")
_LOOK_EVERY_S = 0.5
_SHUTDOWN_S = 5.0


class Opening(TypedDict):
    """The first order: what all calls of a pool have in common.

    Attributes:
        num_ranks: A number as text, or what to count.
        imports: What the warm server imports; ``preload``: what the user named beside that.
        first_path: The folder in front of the caller's sys.path.
        flags: What the ranks' Python is started with.
        mark: What ends a job's output, where the caller reads that from pipes; else empty.
        idle_s: Seconds without an order after which the pool ends.
    """

    num_ranks: str
    cold: bool
    imports: list[str]
    preload: list[str]
    first_path: str
    flags: list[str]
    mark: str
    idle_s: float


class Call(TypedDict):
    """A job, numbered by the caller from 0; or with ``signal`` the order to end it.

    The number -1 means that the caller goes, and removes its folder by itself.
    """

    job: int
    folder: str
    variables: dict[str, str | None]
    max_restarts: int
    signal: int


class Answer(TypedDict, total=False):
    """What the caller is told: how a job ended, that there can be no other here, or why there was none.

    Attributes:
        verdict: The verdict as JSON; ``told``: the facts beside the traceback as text; ``restarts``: how often all
            ranks were started again; ``first``: the rank whose error the verdict is about.
    """

    job: int
    num_ranks: int
    first: int | None
    verdict: dict[str, object]
    reported: str
    restarts: int
    lost: bool
    error: str
    hint: str
    is_usage: bool


@final
class _Orders:
    """Reads the orders in a thread, so that one to stop is heard while a job runs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._lock = stream, threading.Lock()
        self._current: int | None = None
        self._stopped: set[int] = set()
        self._is_orphan = False
        self._folder: str | None = None
        self.calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()

    def start(self) -> None:
        """Begin to listen; only after the fork of the supervisor."""
        threading.Thread(target=self._listen, name="rankwise-orders", daemon=True).start()

    def begin(self, job: int, folder: str, signals: Signals) -> bool:
        """Take note that a job begins; False if it has been stopped already."""
        with self._lock:
            self._folder = folder
            signals.take()  # meant for the last one
            self._current = job
            return job not in self._stopped

    def end(self) -> None:
        """Take note that it has ended: signals are no longer meant for it."""
        with self._lock:
            self._current = None

    def clear_up(self) -> None:
        """Remove the last job's folder if the caller was killed, and can't do so itself."""
        with self._lock:
            if self._is_orphan and self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _listen(self) -> None:
        said_goodbye = False
        for line in self._stream:
            order: Call = json.loads(line)
            if order["job"] < 0:
                said_goodbye = True
                continue
            if not order["signal"]:
                self.calls.put(order)
                continue
            with self._lock:
                self._stopped.add(order["job"])
                if self._current == order["job"]:
                    _send_self(order["signal"])
        with self._lock:
            self._is_orphan = not said_goodbye
        self.calls.put(None)
        with self._lock:
            if self._current is not None:
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

    opening: Opening
    spec: LaunchSpec
    host: Host
    workers: Workers
    warm: WarmStart
    signals: Signals

    def run(self, call: Call) -> Answer:
        """Run one job to its end."""
        answer = Answer(job=call["job"], num_ranks=self.host.num_ranks)
        # What happened while nobody looked; a look shows what is there already, and only the next one what is new.
        while changes := self.workers.wait_change(0):
            if any(isinstance(change, SupervisorLost) for change in changes):
                return Answer(job=call["job"], lost=True)
            for change in changes:
                if isinstance(change, (Warmed, Cooled)):
                    self.warm.note(change)
        folder = Path(call["folder"])
        spec = replace(
            self.spec,
            max_restarts=call["max_restarts"],
            logs=Logs(folder=folder),
            variables=(("RANKWISE_CALL", call["folder"]), *call["variables"].items()),
            watch=is_on("RANKWISE_WATCH", default=True, env=_join(environ(), call["variables"])),
        )
        console = Console()
        logs = make_folder(spec.logs, "logs")
        job = Job(
            spec=spec, python=self.host.interpreter.path, num_ranks=self.host.num_ranks, prefixes=self.host.prefixes,
            num_threads=self.host.num_threads, warm=self.warm, folder=logs,
            rendezvous=open_rendezvous(spec, self.host, None, console), workers=self.workers, signals=self.signals,
            console=console, clock=SYSTEM_CLOCK, events=EventLog(logs / "events.jsonl"), serial=call["job"],
        )  # fmt: skip

        def keep(job: Job, verdict: Verdict, *, attempt: int, reason: str = "", is_final: bool = True) -> None:
            if not is_final:
                publish(job, verdict, attempt=attempt, reason=reason, is_final=False)
                return
            answer["verdict"], answer["restarts"], answer["first"] = verdict.to_json(), attempt, verdict.first
            answer["reported"] = _tell(verdict, reason)
            if is_silent(verdict):
                console.say(render(verdict))  # the values go back all the same

        run_attempts(job, keep)
        if self.opening["mark"]:
            for fd in (1, 2):
                console.write(fd, self.opening["mark"].encode())
        return answer


def _join(env: dict[str, str], changes: dict[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in {**env, **changes}.items() if value is not None}


def _tell(verdict: Verdict, reason: str) -> str:
    """Return the rows of the report that are neither its head, nor the error, nor the traceback, nor a log that goes."""
    rest = replace(verdict, message="", fix="", traceback="", logs={})
    return "\n".join([*render(rest).splitlines()[1:], *([f"  {reason}"] if reason else [])])


def main(answers_fd: int) -> None:
    """Serve until the caller is gone; orders come on standard input.

    Args:
        answers_fd: Where the answers go; on Windows a handle.
    """
    if IS_WINDOWS:
        import msvcrt  # noqa: PLC0415 - Windows only

        answers_fd = msvcrt.open_osfhandle(answers_fd, os.O_WRONLY)  # type: ignore[attr-defined]
    orders_fd = os.dup(0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    os.set_inheritable(answers_fd, False)  # noqa: FBT003 - its only form
    with os.fdopen(orders_fd, encoding="utf-8") as stream:
        line = stream.readline()
        if not line:
            return
        opening: Opening = json.loads(line)
        try:
            _serve(opening, _Orders(stream), answers_fd)
        except InterruptedByUser:
            os._exit(1)
        except RankwiseError as error:
            is_usage = isinstance(error, UsageError)
            message = error.message.replace("--nproc-per-node ", "nprocs=")
            _say(answers_fd, Answer(error=message, hint=error.hint or "", is_usage=is_usage))
        # The thread that reads holds the stream's lock, and would keep this process from ending.
        os._exit(0)


def _serve(opening: Opening, orders: _Orders, answers_fd: int) -> None:
    signals, clock, workers = Signals(("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")), SYSTEM_CLOCK, None
    helper: Helper | None = None
    try:
        program = Program(
            script=str(CALL_PROCESS),
            imports=tuple(opening["imports"]),
            first_path=_find_first(opening),
            flags=tuple(opening["flags"]),
        )
        spec = LaunchSpec(
            program=program, nproc_per_node=opening["num_ranks"], shutdown_timeout_s=_SHUTDOWN_S,
            cold=opening["cold"], preload=tuple(opening["preload"]),
        )  # fmt: skip
        interpreter = find_own()
        if spec.num_ranks is None:
            helper = Helper(interpreter.path, signals, clock)
        num_ranks, prefixes = ask_host(spec, helper)
        num_threads = share_cores(num_ranks)
        host = Host(interpreter=interpreter, num_ranks=num_ranks, prefixes=prefixes, num_threads=num_threads)
        plan = plan_warm_start(spec, host)
        supervisor = ask_resident(spec, host, plan, signals, Console())
        workers = open_workers(signals, clock, supervisor)
        orders.start()
        raise_file_limit()
        warm = WarmStart(spec, host, workers, Console(), plan=plan, is_forked=supervisor is not None, stays=True)
        pool = _Pool(opening=opening, spec=spec, host=host, workers=workers, warm=warm, signals=signals)
        while (call := _wait_call(orders, signals, opening["idle_s"])) is not None:
            if orders.begin(call["job"], call["folder"], signals):
                answer = pool.run(call)
            else:
                answer = Answer(job=call["job"], lost=True)
            orders.end()
            _say(answers_fd, answer)
    finally:
        if workers is not None:
            workers.close()
        if helper is not None:
            helper.close()
        orders.clear_up()


def _find_first(opening: Opening) -> Path:
    """Return the folder whose files come before installed modules in the ranks."""
    first = opening["first_path"]
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


def _say(fd: int, answer: Answer) -> None:
    data = json.dumps(answer).encode() + b"\n"
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        return  # the caller is gone: the end of its orders ends us
