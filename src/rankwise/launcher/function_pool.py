"""The caller's side of a launcher that stays: starts it, gives it jobs, shows their output, ends it."""

from __future__ import annotations

import codecs
import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING, TextIO, final

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.errors import LaunchError, RankwiseError
from rankwise.base.os_calls import IS_WINDOWS, wait_ready
from rankwise.launcher.pool_protocol import Answer, Call, Kind, Opening, lend
from rankwise.verdict.exit_codes import name_signal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rankwise.launcher.pool_protocol import CallersEnd, Order

#: Stopping takes the ranks' time to leave, and what the launcher itself needs; more than this means that it hangs.
_STOP_S = 40.0
#: Without an order for so long, the processes and the memory go.
_IDLE_S = 300.0
_CLOSE_S = 10.0
#: Windows can't wait for a pipe and an answer at once.
_LOOK_EVERY_S = 0.02
#: A process whose answers have ended, ends; else it is killed.
_END_S = 5.0
#: More than a pipe holds.
_CHUNK_BYTES = 1 << 20
_START = """
import sys
rest = [entry for entry in sys.path if entry]
sys.path[:] = rest if sys.argv[1] in rest else [sys.argv[1], *rest]
from rankwise.base.files import fill_standard_streams
fill_standard_streams()  # first, or a file of ours would get the number of a stream that is closed
from rankwise.launcher.pool import main
main(*map(int, sys.argv[2:]))
"""


def find_flags() -> tuple[str, ...]:
    """Return the flags of this Python that change what code does: -O, -B, -b, -W and -X.

    Not -I, -E and -S: a rank is told what it needs by PYTHONPATH, which they have it ignore.
    """
    find: Callable[[], list[str]] | None = getattr(subprocess, "_args_from_interpreter_flags", None)
    words = iter(find() if find is not None else [])
    found: list[str] = []
    for word in words:
        if word == "-X":
            found += [word, next(words, "")]
        elif word.startswith(("-O", "-B", "-b", "-W", "-X")):
            found.append(word)
    return tuple(found)


def find_outputs() -> tuple[tuple[int, int], ...]:
    """Return what standard output and error are; empty if sys.stdout or sys.stderr is something else (a notebook)."""
    found = []
    for fd, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            if stream is not None and stream.fileno() != fd:
                return ()
            status = os.fstat(fd)
        except (OSError, ValueError, AttributeError):
            # io.UnsupportedOperation is both of the first two: a stream without a descriptor.
            return ()
        found.append((status.st_dev, status.st_ino))
    return tuple(found)


@final
class _Shown:
    """Where output goes in this process; bytes may come with a letter cut in two.

    A letter that the stream can't show is shown as its number: the rest is not lost with it. A stream that is closed gets
    nothing more.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, data: bytes) -> None:
        text, stream = self._decoder.decode(data), self._stream
        if stream is None:
            return
        try:
            try:
                stream.write(text)
            except UnicodeEncodeError as error:
                stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
            stream.flush()
        except (OSError, ValueError) as error:
            if isinstance(error, BrokenPipeError) or getattr(stream, "closed", False):
                self._stream = None


@final
class Pool:
    """A launcher process of ours that runs one job after the other.

    Args:
        kind: What its jobs have in common.
        imports: What its warm server imports.
        env: The whole environment of its processes.

    Attributes:
        owner: The process that started it: a fork of that has no use for it.
    """

    def __init__(self, kind: Kind, imports: tuple[str, ...], env: Mapping[str, str]) -> None:
        self.kind, self.imports, self.env, self.owner = kind, imports, dict(env), os.getpid()
        self._is_closed, self._lock = False, threading.RLock()
        self._answer: Answer | None = None
        self._process, self._orders, self._answers = _start(env, is_piped=not kind.outputs)
        _pools.append(self)  # from here on Ctrl-C ends it
        streams = {1: self._process.stdout, 2: self._process.stderr}
        self._outputs = {number: stream for number, stream in streams.items() if stream is not None}
        for stream in self._outputs.values():
            if not IS_WINDOWS:
                os.set_blocking(stream.fileno(), False)
        self._send(Opening(kind=kind, imports=imports, idle_s=_IDLE_S))

    @property
    def is_alive(self) -> bool:
        """Whether it can take a job."""
        return not self._is_closed and self._process.poll() is None

    def run(self, call: Call, *, timeout_s: float | None) -> Answer:
        """Run a job to its end, and show its output meanwhile.

        Args:
            call: The job.
            timeout_s: Seconds until the job is stopped; None for never.

        Returns:
            What the pool answered.

        Raises:
            LaunchError: The pool ended, was closed by another thread, or does not answer.
            UsageError: It says that the job can't be as it was asked for.
            KeyboardInterrupt: Ctrl-C here; the job has been stopped.
        """
        writers = {1: _Shown(sys.stdout), 2: _Shown(sys.stderr)}
        is_sent = False
        with self._lock:
            self._answer = None
            try:
                self._send(call)
                is_sent = True
                answer = self._wait(writers, math.inf if timeout_s is None else timeout_s)
                if answer is not None:
                    if self._is_closed and answer.verdict is not None and answer.verdict.stopped_by:
                        raise _make_closed_error()  # its last answer came before its end
                    return answer
                self._send(int(signal.SIGTERM))
                answer = self._wait(writers, _STOP_S)
            except KeyboardInterrupt:
                if is_sent and self._answer is None:
                    self._interrupt(writers)
                elif not is_sent:
                    self.close()  # half an order may be on its way
                raise
        if answer is None:
            raise LaunchError(f"the launcher's own process did not stop the job within {_STOP_S:.0f} s")
        answer.is_late = True
        return answer

    def close(self) -> None:
        """End it and all that it runs."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(ValueError):  # another thread may close all at this moment
            _pools.remove(self)
        self._send(None)
        self._orders.close()
        end_s = SYSTEM_CLOCK.monotonic() + _CLOSE_S
        while self._process.poll() is None and SYSTEM_CLOCK.monotonic() < end_s:
            self._show_output({})  # what waits for room in a pipe does not end
            SYSTEM_CLOCK.sleep(0.005)
        if self._process.poll() is None:
            self._process.kill()  # upon which its supervisor ends all below it
            self._process.wait()
        if self._lock.acquire(timeout=_CLOSE_S):  # a thread that is at work with it sees its end
            self._close_all()
            self._lock.release()

    def forget(self) -> None:
        """In a fork of our process: let go of what would keep the pool alive when its owner is gone."""
        self._is_closed = True
        self._close_all()
        self._process.returncode = 0  # not a child of this process: nobody may wait for it

    def _close_all(self) -> None:
        for one in (self._orders, self._answers, self._process.stdout, self._process.stderr):
            if one is not None:
                one.close()

    def _send(self, order: Order) -> None:
        # A pool that has ended says why, or is found to have: by the answers.
        with contextlib.suppress(OSError):
            self._orders.send(order)

    def _interrupt(self, writers: dict[int, _Shown]) -> None:
        """Stop a job for Ctrl-C; a second one ends it at once."""
        try:
            self._send(int(signal.SIGINT))
            answer = self._wait(writers, _STOP_S)
        except (KeyboardInterrupt, RankwiseError):
            answer = None
        if answer is None:
            self.close()

    def _wait(self, writers: dict[int, _Shown], timeout_s: float) -> Answer | None:
        """Show output until the answer is there, which comes behind all output; None when time is up."""
        end_s = SYSTEM_CLOCK.monotonic() + timeout_s
        while (left_s := end_s - SYSTEM_CLOCK.monotonic()) > 0:
            try:
                if IS_WINDOWS:
                    self._answers.poll(min(left_s, _LOOK_EVERY_S))
                else:
                    pipes = [self._answers.fileno(), *(stream.fileno() for stream in self._outputs.values())]
                    wait_ready(pipes, None if left_s == math.inf else left_s)
                is_answered = self._answers.poll()
            except BrokenPipeError:  # Windows tells the end so, and `recv` does below
                is_answered = True
            self._show_output(writers)
            if is_answered:
                try:
                    answer = self._answers.recv()
                except (EOFError, OSError):
                    return self._note_end()
                if isinstance(answer, RankwiseError):
                    raise answer
                self._answer = answer
                return answer
        return None

    def _show_output(self, writers: dict[int, _Shown]) -> None:
        for number, stream in list(self._outputs.items()):
            data = _read_pipe(stream)
            if data:
                if number in writers:
                    writers[number].write(data)
            elif data is not None:
                self._outputs.pop(number, None)

    def _note_end(self) -> Answer:
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if self._is_closed:
            raise _make_closed_error()
        if code == 0:
            return Answer()  # it had been idle for too long just as the order came
        how = f"ended with exit code {code}" if code >= 0 else f"was killed by {name_signal(-code)}"
        raise LaunchError(
            f"the launcher's own process {how}, and the ranks with it",
            hint="if it printed why, that is above on standard error; the next launch starts another one",
        )


_pools: list[Pool] = []


def close_all() -> None:
    """End all pools of this process, at work or not."""
    while _pools:
        _pools[0].close()


def _make_closed_error() -> LaunchError:
    return LaunchError("the job was stopped: shutdown() was called while it ran")


def _read_pipe(stream: IO[bytes]) -> bytes | None:
    """Return what a pipe holds; None while that is nothing, and nothing at its end."""
    if IS_WINDOWS:
        import _winapi  # noqa: PLC0415 - Windows only
        import msvcrt  # noqa: PLC0415 - Windows only

        try:
            handle = msvcrt.get_osfhandle(stream.fileno())  # type: ignore[attr-defined]
            if not _winapi.PeekNamedPipe(handle, 0)[0]:  # type: ignore[attr-defined]
                return None
        except OSError:
            return b""
    return stream.read(_CHUNK_BYTES)


@contextlib.contextmanager
def _filled_standard_streams() -> Iterator[None]:
    """Keep the numbers 0 to 2 from our pipes where the caller was started with closed streams (``>&-``).

    In the new process a pipe of such a number would be closed, or be taken for its standard output.
    """
    fillers = []
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            fillers.append(os.open(os.devnull, os.O_RDWR))  # gets the lowest free number: this one
    try:
        yield
    finally:
        for fd in fillers:
            os.close(fd)


def _start(env: Mapping[str, str], *, is_piped: bool) -> tuple[subprocess.Popen[bytes], CallersEnd, CallersEnd]:
    """Start the process; return it with the pipes for orders to it, and for its answers."""
    from multiprocessing.connection import Pipe  # noqa: PLC0415 - only where it is needed

    root, output = str(Path(__file__).parents[2]), subprocess.PIPE if is_piped else None
    with _filled_standard_streams(), contextlib.ExitStack() as on_failure:
        pipes = Pipe(duplex=False), Pipe(duplex=False)
        (their_orders, orders), (answers, their_answers) = pipes
        on_failure.callback(orders.close)
        on_failure.callback(answers.close)
        with their_orders, their_answers:
            numbers = [lend(their_orders), lend(their_answers)]
            try:
                # In a session of its own: Ctrl-C is the caller's to hear, and to pass on once.
                process = subprocess.Popen(
                    [sys.executable, "-c", _START, root, *map(str, numbers)], env=dict(env), stdin=subprocess.DEVNULL,
                    stdout=output, stderr=output, bufsize=0, start_new_session=True, close_fds=not IS_WINDOWS,
                    pass_fds=() if IS_WINDOWS else numbers, creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
                )  # fmt: skip
            except (OSError, ValueError, TypeError) as error:
                raise LaunchError(f"{sys.executable} can't be started: {error}", hint="check sys.executable") from error
        on_failure.pop_all()
    return process, orders, answers


def _forget_all() -> None:
    for pool in _pools:
        pool.forget()
    _pools.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
