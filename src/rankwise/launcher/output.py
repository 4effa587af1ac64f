"""Where each rank's streams go: straight through, to a file, to both; and what it said last.

Standard output is inherited as under torchrun. Standard error passes through us, so that the report can show
its end: through a pseudo-terminal where ours is a terminal, else through a pipe.
"""

from __future__ import annotations

import itertools
import os
import selectors
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from rankwise.base.files import read_tail
from rankwise.base.os_calls import IS_LINUX, IS_WINDOWS, copy_terminal_size, open_terminal
from rankwise.base.terminal import is_same_place
from rankwise.launcher.interrupt_traces import InterruptTraces
from rankwise.launcher.spec import Std
from rankwise.launcher.stderr_tail import END_MARK, TAIL_BYTES, StderrTail

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rankwise.evidence.reader.notes import Ending
    from rankwise.launcher.console import Console
    from rankwise.launcher.spec import Logs

_CHUNK_BYTES = 1 << 16
#: A rank's copied standard error takes at most twice this on disk, however much it prints.
_LOG_BYTES = 8 << 20
#: How long half a line is held back for its end.
_HALF_LINE_S = 0.05


@dataclass(slots=True, kw_only=True)
class RankStreams:
    """One rank's streams in one attempt.

    Attributes:
        stdio: The descriptors that the rank is started with.
        log: The file that holds its standard error, whole or its last megabytes.
        begin_bytes: Where in that file the words of the process begin that writes to it now.
        tell_passed: Tells the rank how many of its marks have been passed; None where nothing need be kept in order.
    """

    local_rank: int
    folder: Path
    stdio: tuple[int, int, int]
    to_close: list[int] = field(default_factory=list)
    source: int | None = None
    shown: bool = True
    is_redirected: bool = False
    begin_bytes: int = 0
    tell_passed: Callable[[int], None] | None = None

    def begin_again(self) -> None:
        """Forget how the process has ended that wrote until now: another one takes its place."""
        with suppress(OSError):
            self.error_file.unlink(missing_ok=True)
            if self.is_redirected:
                self.begin_bytes = self.log.stat().st_size

    def close_rank_end(self) -> None:
        """Let go of what the rank writes to, once nobody will be started with it any more."""
        for fd in self.to_close:
            os.close(fd)
        self.to_close.clear()

    @property
    def log(self) -> Path:
        """Path of the log of standard error."""
        return self.folder / "stderr.log"

    @property
    def error_file(self) -> Path:
        """Path of the file in which the rank writes down its exception."""
        return self.folder / "error.json"

    @property
    def end_mark(self) -> bytes | None:
        """What marks the end of the rank's own words; None where nobody would take it out again."""
        return END_MARK if self.source is not None or self.is_redirected else None

    @property
    def may_overtake(self) -> bool:
        """Whether standard output goes directly to where standard error comes later, through us."""
        return self.source is not None and self.shown and self.stdio[1] == 1 and is_same_place(1, 2)


@final
class Pump:
    """A thread that moves standard error from the ranks to the console and keeps the end of each."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._tails: dict[int, StderrTail] = {}
        self._held: dict[int, tuple[float, bytes]] = {}
        self._logs: dict[int, _RollingLog] = {}
        self._open: dict[int, RankStreams] = {}
        self._stop_by: float | None = None
        self._traces: dict[int, InterruptTraces] | None = None
        self._thread = threading.Thread(target=self._run, name="rankwise-pump", daemon=True)

    def add(self, streams: RankStreams) -> None:
        """Take over the read end of a rank's standard error; only before ``start``."""
        if streams.source is not None:
            self._open[streams.source] = streams
            self._tails[streams.local_rank] = StderrTail()
            self._logs[streams.local_rank] = _RollingLog(streams.log)
            self._selector.register(streams.source, selectors.EVENT_READ)

    def start(self) -> None:
        """Begin to move bytes."""
        if self._open:
            self._selector.register(self._wake_read, selectors.EVENT_READ)
            self._thread.start()

    def resize(self) -> None:
        """Tell the ranks' terminals that ours has another size."""
        for source in list(self._open):
            copy_terminal_size(2, source)

    def hide_interrupts(self) -> None:
        """From now on show no traceback of KeyboardInterrupt: the user has asked for it."""
        self._traces = {streams.local_rank: InterruptTraces() for streams in list(self._open.values())}

    def tail(self, local_rank: int) -> StderrTail:
        """Return the last bytes that a rank wrote."""
        return self._tails.get(local_rank) or StderrTail()

    def begin_again(self, local_rank: int) -> None:
        """Forget what a rank wrote: another process takes its place."""
        if local_rank in self._tails:
            self._tails[local_rank] = StderrTail()

    def finish(self, timeout_s: float = 2.0) -> list[int]:
        """Move what is still there, then stop.

        Returns:
            Read ends that somebody still writes to: processes that the script left running.
        """
        if self._thread.is_alive():
            self._stop_by = time.monotonic() + timeout_s / 2
            os.write(self._wake_write, b"!")
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                self._console.hurry()
                self._thread.join(timeout_s)
            if self._thread.is_alive():
                return []  # the console takes nothing: we can't wait for it for ever
        for log in self._logs.values():
            log.close()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        return list(self._open)

    def _run(self) -> None:
        while self._open:
            # What is overdue by now is passed on only if nothing more has come: this thread may get to run late.
            looked_s = time.monotonic()
            ready = self._selector.select(self._due_in_s(looked_s))
            sources = [key.fd for key, _ in ready if key.fd != self._wake_read]
            for source in sources:
                self._move(source)
            # What a process left on purpose goes on printing is not ours to wait for.
            stopping = self._stop_by is not None and (not sources or time.monotonic() > self._stop_by)
            for streams in self._open.values():
                tail = self._tails[streams.local_rank]
                if tail.waiting_s is not None and (stopping or looked_s - tail.waiting_s >= _HALF_LINE_S):
                    self._pass_on(streams, tail.give_up_waiting())
                since, _ = self._held.get(streams.local_rank, (0.0, b""))
                if stopping or looked_s - since >= _HALF_LINE_S:
                    self._show_held(streams)
            if stopping:
                return

    def _move(self, source: int) -> None:
        streams = self._open[source]
        try:
            data = os.read(source, _CHUNK_BYTES)
        except OSError:
            data = b""  # a terminal whose last user is gone
        tail = self._tails[streams.local_rank]
        if not data:
            self._pass_on(streams, tail.give_up_waiting())
            self._show_held(streams)
            if self._traces is not None and (traces := self._traces.pop(streams.local_rank, None)):
                self._show(streams, traces.flush())
            self._selector.unregister(source)
            del self._open[source]
            os.close(source)
            return
        num_before = tail.num_order_marks
        self._pass_on(streams, tail.write(data))
        if tail.num_order_marks != num_before and streams.tell_passed is not None:
            self._show_held(streams)
            streams.tell_passed(tail.num_order_marks)

    def _due_in_s(self, now_s: float) -> float | None:
        """Return after how long something that is held back is to be passed on; None if nothing is."""
        since = [since for since, _ in self._held.values()]
        since += [tail.waiting_s for tail in self._tails.values() if tail.waiting_s is not None]
        return max(0.0, min(since) + _HALF_LINE_S - now_s) if since else None

    def _pass_on(self, streams: RankStreams, data: bytes) -> None:
        rank = streams.local_rank
        if data:
            self._logs[rank].write(data)
        _, held = self._held.pop(rank, (0.0, b""))
        whole, newline, rest = (held + data).rpartition(b"\n")
        # With one rank nobody can come in between: half lines pass at once.
        if len(self._tails) == 1 or len(rest) > _CHUNK_BYTES:
            whole, newline, rest = whole + newline + rest, b"", b""
        self._show(streams, whole + newline)
        if rest:
            self._held[rank] = (time.monotonic(), rest)

    def _show_held(self, streams: RankStreams) -> None:
        _, held = self._held.pop(streams.local_rank, (0.0, b""))
        self._show(streams, held)

    def _show(self, streams: RankStreams, data: bytes) -> None:
        if self._traces is not None and streams.local_rank in self._traces:
            data = self._traces[streams.local_rank].filter(data)
        if data and streams.shown:
            self._console.write(2, data)


@final
class _RollingLog:
    """A log that keeps the last megabytes: the file and the one before it."""

    def __init__(self, path: Path) -> None:
        self._path, self._size = path, 0
        self._fd: int | None = None

    def write(self, data: bytes) -> None:
        with suppress(OSError):  # a full disk must not stop the pump
            if self._fd is None or self._size > _LOG_BYTES:
                self.close()
                if self._size:
                    self._path.replace(self._path.with_suffix(".log.1"))
                self._fd, self._size = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), 0
            self._size += os.write(self._fd, data)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def open_streams(logs: Logs, local_rank: int, folder: Path) -> RankStreams:
    """Decide and open the streams of one rank.

    Args:
        logs: What the user asked for.
        local_rank: The rank, counted on this node.
        folder: Its folder in this attempt; it exists.
    """
    tee = logs.tee.get(local_rank, logs.tee.get(None, Std.NONE))
    files = logs.redirects.get(local_rank, logs.redirects.get(None, Std.NONE)) | tee
    shown = logs.shown_ranks is None or local_rank in logs.shown_ranks
    opened: list[int] = []

    def open_file(name: str) -> int:
        fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        opened.append(fd)
        return fd

    if Std.OUT in files:
        out = open_file("stdout.log")
    elif shown:
        out = 1
    else:
        out = os.open(os.devnull, os.O_WRONLY)
        opened.append(out)
    source = None
    if Std.ERR in files:
        err = open_file("stderr.log")
    elif IS_WINDOWS:
        err = 2  # pipes can't be waited for there: the traceback comes by the recorder, the tail is lost
    else:
        pair = open_terminal(2) if shown and os.isatty(2) else None
        source, err = pair or os.pipe()
        opened.append(err)
    return RankStreams(
        local_rank=local_rank,
        folder=folder,
        stdio=(0, out, err),
        to_close=opened,
        source=source,
        shown=shown,
        is_redirected=Std.ERR in files,
    )


def read_last_words(streams: RankStreams, pump: Pump, ending: Ending | None = None) -> str:
    """Return the end of a rank's standard error as text, as a terminal would show it.

    Args:
        streams: The rank's.
        pump: What its standard error went through.
        ending: Where its own words end, if what was printed behind them is to be left out.
    """
    if ending is None:
        raws = [
            read_tail(streams.log, TAIL_BYTES, begin=streams.begin_bytes)
            if streams.is_redirected
            else pump.tail(streams.local_rank).read()
        ]
    elif streams.is_redirected:
        ends = [streams.begin_bytes, *(size or 0 for size in ending.stderr_bytes)]
        raws = [
            read_tail(streams.log, min(TAIL_BYTES, end - begin), end=end) for begin, end in itertools.pairwise(ends)
        ]
    else:
        raws = pump.tail(streams.local_rank).read_before_end()
    raw = next((one for one in raws if one.strip()), b"")
    lines = raw.decode("utf-8", "replace").replace("\r\n", "\n").split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2].rstrip() for line in lines).strip("\n")


def relay_in_background(sources: list[int]) -> None:
    """Leave a small process behind that goes on moving standard error for processes left on purpose.

    Without it an uploader that outlives a finished job would die of a broken pipe at its next message.
    """
    if not sources or not IS_LINUX:
        return
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return
    try:
        if os.fork():
            os._exit(0)
        os.setsid()
        # Nobody must wait for the end of our own standard output because of the relay.
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        with selectors.DefaultSelector() as selector:
            for source in sources:
                selector.register(source, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select():
                    if data := read_or_end(key.fd):
                        with suppress(OSError):
                            os.write(2, data)
                    else:
                        selector.unregister(key.fd)
    finally:
        os._exit(0)


def read_or_end(fd: int) -> bytes:
    """Return what a pipe or a terminal holds; nothing once its other end is gone."""
    try:
        return os.read(fd, _CHUNK_BYTES)
    except OSError:
        return b""
