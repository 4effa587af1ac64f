"""The caller's side of a launcher that stays: starts it, gives it jobs, shows their output, ends it."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, TextIO, final

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.errors import LaunchError, UsageError
from rankwise.base.os_calls import IS_WINDOWS
from rankwise.launcher.output import read_or_end
from rankwise.verdict.exit_codes import name_signal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rankwise.launcher.pool import Answer, Opening

#: Stopping takes the ranks' time to leave, and what the launcher itself needs; more than this means that it hangs.
_STOP_S = 40.0
#: Without an order for so long, the processes and the memory go.
_IDLE_S = 300.0
_CLOSE_S = 10.0
_LOOK_EVERY_S = 0.5
#: A process whose answers have ended, ends; else it is killed.
_END_S = 5.0
#: So much output waits for a caller that is slow to show it; then the ranks wait.
_MOST_CHUNKS = 256
_START = """
import sys
rest = [entry for entry in sys.path if entry]
sys.path[:] = rest if sys.argv[1] in rest else [sys.argv[1], *rest]
from rankwise.base.files import fill_standard_streams
fill_standard_streams()  # first, or the orders would get the number of a stream that is closed
from rankwise.launcher.pool import main
main(int(sys.argv[2]))
"""
_ANSWERS, _OUT, _ERR = "answers", "out", "err"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What two calls must have in common for the same pool.

    Attributes:
        num_ranks: A number as text, or what to count.
        first_path: The folder in front of sys.path.
        flags: What the ranks' Python is started with, beside its name.
        outputs: Which files or terminals the ranks' output goes to; empty where it passes through this process.
    """

    num_ranks: str
    cold: bool
    preload: tuple[str, ...]
    first_path: str
    python: str
    flags: tuple[str, ...]
    outputs: tuple[tuple[int, int], ...]


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

    A letter that the stream can't show is shown as its number: the rest is not lost with it.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def is_closed(self) -> bool:
        return bool(getattr(self._stream, "closed", False))

    def write(self, data: bytes) -> None:
        text = self._decoder.decode(data)
        try:
            self._stream.write(text)
        except UnicodeEncodeError as error:
            self._stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        self._stream.flush()


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
        self._num_jobs, self._is_opened, self._is_closed = 0, False, False
        self._readers: list[threading.Thread] = []
        self._chunks: queue.Queue[tuple[str, bytes | None]] = queue.Queue(_MOST_CHUNKS)
        self._mark = "" if kind.outputs else f"\0rankwise-{uuid.uuid4().hex}\n"
        self._answers_fd, self._process = _open(env, is_piped=bool(self._mark))
        _pools.append(self)  # from here on Ctrl-C ends it
        read_end = self._answers_fd
        self._fds = [read_end, *(stream.fileno() for stream in self._streams())]
        sources = {_ANSWERS: read_end}
        if self._process.stdout is not None and self._process.stderr is not None:
            sources |= {_OUT: self._process.stdout.fileno(), _ERR: self._process.stderr.fileno()}
        self._readers += [
            threading.Thread(target=self._read, args=source, name="rankwise-output", daemon=True)
            for source in sources.items()
        ]
        for reader in self._readers:
            reader.start()
        opening: Opening = {
            "num_ranks": kind.num_ranks, "cold": kind.cold, "imports": list(imports), "preload": list(kind.preload),
            "first_path": kind.first_path, "flags": list(kind.flags), "mark": self._mark, "idle_s": _IDLE_S,
        }  # fmt: skip
        self._send(opening)
        self._is_opened = True

    @property
    def is_alive(self) -> bool:
        """Whether it can take a job."""
        return not self._is_closed and self._process.poll() is None

    def run(
        self,
        folder: Path,
        variables: Mapping[str, str | None],
        *,
        max_restarts: int,
        timeout_s: float | None,
    ) -> tuple[Answer, bool]:
        """Run a job to its end, and show its output meanwhile.

        Args:
            folder: Where the payload is, and where the ranks leave what comes of it.
            variables: How their environment differs from ours.
            max_restarts: How often all ranks may be started again.
            timeout_s: Seconds until the job is stopped; None for never.

        Returns:
            What the pool answered, and whether the job was stopped for its time.

        Raises:
            LaunchError: The pool ended, was closed by another thread, or does not answer.
            UsageError: It says that the job can't be as it was asked for.
            KeyboardInterrupt: Ctrl-C here; the job has been stopped.
        """
        job, self._num_jobs = self._num_jobs, self._num_jobs + 1
        call = {"job": job, "folder": str(folder), "variables": dict(variables), "max_restarts": max_restarts}
        writers = {
            source: _Shown(stream) for source, stream in ((_OUT, sys.stdout), (_ERR, sys.stderr)) if stream is not None
        }
        limit_s = None if timeout_s is None else SYSTEM_CLOCK.monotonic() + timeout_s
        is_sent = False
        try:
            self._send({**call, "signal": 0})
            is_sent = True
            answer = self._wait(job, writers, limit_s)
            if answer is not None:
                if self._is_closed and (answer.get("verdict") or {}).get("stopped_by"):
                    raise _make_closed_error()  # its last answer came before its end
                return answer, False
            self._send({"job": job, "signal": int(signal.SIGTERM)})
            answer = self._wait(job, writers, SYSTEM_CLOCK.monotonic() + _STOP_S)
        except KeyboardInterrupt:
            if is_sent:
                self._interrupt(job, writers)
            else:
                self.close()  # half an order may be on its way
            raise
        if answer is None:
            raise LaunchError(f"the launcher's own process did not stop the job within {_STOP_S:.0f} s")
        return answer, True

    def close(self) -> None:
        """End it and all that it runs."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(ValueError):  # another thread may close all at this moment
            _pools.remove(self)
        if self._process.poll() is None and self._is_opened:
            self._send({"job": -1, "signal": 0})
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        end_s = SYSTEM_CLOCK.monotonic() + _CLOSE_S
        while self._process.poll() is None and SYSTEM_CLOCK.monotonic() < end_s:
            # The readers must not wait for room, or the ranks would wait for them.
            with contextlib.suppress(queue.Empty):
                self._chunks.get(timeout=0.01)
        if self._process.poll() is None:
            self._process.kill()  # upon which its supervisor ends all below it
            self._process.wait()
        for reader in self._readers:
            while reader.is_alive() and SYSTEM_CLOCK.monotonic() < end_s:
                with contextlib.suppress(queue.Empty):
                    self._chunks.get_nowait()
                reader.join(0.01)
        if not any(reader.is_alive() for reader in self._readers):
            os.close(self._answers_fd)
            for stream in self._streams():
                stream.close()

    def forget(self) -> None:
        """In a fork of our process: let go of what would keep the pool alive when its owner is gone."""
        self._is_closed = True
        for fd in self._fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._process.returncode = 0  # not a child of this process: nobody may wait for it
        # Their numbers may be somebody's by the time they are collected.
        _forgotten.extend(self._streams())

    def _streams(self) -> list[IO[bytes]]:
        streams = (self._process.stdin, self._process.stdout, self._process.stderr)
        return [stream for stream in streams if stream is not None]

    def _send(self, order: Mapping[str, object]) -> None:
        stream = self._process.stdin
        # A pool that has ended says why, or is found to have: by the answers.
        with contextlib.suppress(OSError, ValueError):
            if stream is not None:
                stream.write(json.dumps(order).encode() + b"\n")
                stream.flush()

    def _interrupt(self, job: int, writers: dict[str, _Shown]) -> None:
        """Stop a job for Ctrl-C; a second one ends it at once."""
        try:
            self._send({"job": job, "signal": int(signal.SIGINT)})
            answer = self._wait(job, writers, SYSTEM_CLOCK.monotonic() + _STOP_S)
        except (KeyboardInterrupt, LaunchError, UsageError):
            answer = None
        if answer is None:
            self.close()

    def _wait(self, job: int, writers: dict[str, _Shown], limit_s: float | None) -> Answer | None:
        """Show output until the answer and all that was written before it are there; None when time is up."""
        answer: Answer | None = None
        num_marks = 2 if self._mark else 0
        while answer is None or num_marks:
            left_s = _LOOK_EVERY_S if limit_s is None else min(_LOOK_EVERY_S, limit_s - SYSTEM_CLOCK.monotonic())
            if left_s <= 0:
                return None
            try:
                source, data = self._chunks.get(timeout=left_s)
            except queue.Empty:
                if self._is_closed:
                    # The end of the answers may have been taken by whoever closed it.
                    raise _make_closed_error() from None
                continue
            if source != _ANSWERS and data is not None:
                _show(writers, source, data)
            elif source != _ANSWERS:
                num_marks -= 1
            elif data is None:
                return self._note_end(job)
            else:
                reply: Answer = json.loads(data)
                if "error" in reply:
                    raise _to_error(reply)
                if reply["job"] == job:
                    answer = reply
                    num_marks = 0 if reply.get("lost") else num_marks
        return answer

    def _read(self, source: str, fd: int) -> None:
        """In a thread: pass on what comes; None for an end mark, and for the end of the answers."""
        held, mark = b"", self._mark.encode() if source != _ANSWERS else b"\n"
        while data := read_or_end(fd):
            held += data
            while (at := held.find(mark)) >= 0:
                if at or source == _ANSWERS:
                    self._chunks.put((source, held[:at]))
                if source != _ANSWERS:
                    self._chunks.put((source, None))
                held = held[at + len(mark) :]
            if source != _ANSWERS and held:
                begin = held.rfind(mark[:1])
                cut = begin if begin >= 0 and mark.startswith(held[begin:]) else len(held)
                if cut:
                    self._chunks.put((source, held[:cut]))
                held = held[cut:]
        if source == _ANSWERS:
            self._chunks.put((source, None))

    def _note_end(self, job: int) -> Answer:
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if self._is_closed:
            raise _make_closed_error()
        if code == 0:
            return {"job": job, "lost": True}  # it had been idle for too long just as the order came
        how = f"ended with exit code {code}" if code >= 0 else f"was killed by {name_signal(-code)}"
        raise LaunchError(
            f"the launcher's own process {how}, and the ranks with it",
            hint="if it printed why, that is above on standard error; the next launch starts another one",
        )


_pools: list[Pool] = []
_forgotten: list[IO[bytes]] = []


def close_all() -> None:
    """End all pools of this process, at work or not."""
    while _pools:
        _pools[0].close()


def _make_closed_error() -> LaunchError:
    return LaunchError("the job was stopped: shutdown() was called while it ran")


def _to_error(body: Answer) -> LaunchError | UsageError:
    kind = UsageError if body.get("is_usage") else LaunchError
    return kind(body["error"], hint=body.get("hint") or None)


def _show(writers: dict[str, _Shown], source: str, data: bytes) -> None:
    """Write a piece of output where the caller's own goes; a stream that is closed gets nothing more."""
    if source not in writers:
        return
    try:
        writers[source].write(data)
    except BrokenPipeError:
        del writers[source]
    except (OSError, ValueError):
        if writers[source].is_closed:
            del writers[source]


def _open(env: Mapping[str, str], *, is_piped: bool) -> tuple[int, subprocess.Popen[bytes]]:
    """Start the process; return where its answers can be read, too."""
    with _filled_standard_streams():
        read_end, write_end = os.pipe()
        try:
            return read_end, _start(write_end, env, is_piped=is_piped)
        except (OSError, ValueError, TypeError) as error:
            os.close(read_end)
            raise LaunchError(f"{sys.executable} can't be started: {error}", hint="check sys.executable") from error
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)


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


def _start(answers_fd: int, env: Mapping[str, str], *, is_piped: bool) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).parents[2])
    number, inherited = answers_fd, [answers_fd]
    if IS_WINDOWS:
        import msvcrt  # noqa: PLC0415 - Windows only

        number = int(msvcrt.get_osfhandle(answers_fd))  # type: ignore[attr-defined]
        os.set_handle_inheritable(number, True)  # type: ignore[attr-defined] # noqa: FBT003 - its only form
        inherited = []
    output = subprocess.PIPE if is_piped else None
    # In a session of its own: Ctrl-C is the caller's to hear, and to pass on once.
    return subprocess.Popen(
        [sys.executable, "-c", _START, root, str(number)], env=dict(env), stdin=subprocess.PIPE, stdout=output,
        stderr=output, start_new_session=True, close_fds=not IS_WINDOWS, pass_fds=inherited,
        creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
    )  # fmt: skip


def _forget_all() -> None:
    for pool in _pools:
        pool.forget()
    _pools.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
