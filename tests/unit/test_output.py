"""The pump between the ranks' standard error and the console, with real pipes."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast
from unittest import mock

import pytest
from hypothesis import given, settings, strategies as st

from rankwise.base import terminal
from rankwise.evidence.reader.notes import Ending
from rankwise.launcher import output, stderr_tail
from rankwise.launcher.console import Console
from rankwise.launcher.output import Pump, RankStreams, open_streams, read_last_words
from rankwise.launcher.spec import Logs, Std
from support import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


class FakeConsole:
    """Remembers what it was given, write by write."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self._came = threading.Condition()

    def write(self, _fd: int, data: bytes) -> None:
        """Take bytes."""
        with self._came:
            self.writes.append(data)
            self._came.notify_all()

    def wait_for(self, data: bytes) -> bool:
        """Wait until ``data`` has been written."""
        with self._came:
            return self._came.wait_for(lambda: data in b"".join(self.writes), timeout=10)


class Ranks:
    """Some ranks' pipes and the pump behind them."""

    def __init__(self, folder: Path, count: int, *, shown: bool = True) -> None:
        self.console, self.ends, self.streams = FakeConsole(), [], []
        self.pump = Pump(cast("Console", self.console))
        for rank in range(count):
            read, write = os.pipe()
            (folder / str(rank)).mkdir(exist_ok=True)
            streams = RankStreams(
                local_rank=rank, folder=folder / str(rank), stdio=(0, 1, write), source=read, shown=shown
            )
            self.ends.append(write)
            self.streams.append(streams)
            self.pump.add(streams)

    def say(self, rank: int, data: bytes) -> None:
        """Write as a rank does."""
        while data:
            data = data[os.write(self.ends[rank], data) :]

    def finish(self) -> bytes:
        """End all ranks, and return what the console got."""
        for end in self.ends:
            with contextlib.suppress(OSError):
                os.close(end)
        assert self.pump.finish(10) == []
        return b"".join(self.console.writes)


@pytest.mark.parametrize("half", [b"\r 10%", b"50 %\x1b"])
def test_one_ranks_half_lines_pass_at_once(tmp_path: Path, half: bytes) -> None:
    """A prompt or a progress bar of the only rank is not held back; nor, for more than a moment, what a mark of its end begins with."""
    ranks = Ranks(tmp_path, 1)
    ranks.pump.start()
    ranks.say(0, half)
    assert ranks.console.wait_for(half)
    assert ranks.finish() == half


def test_lines_of_several_ranks_stay_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a line waits for its end while others write."""
    monkeypatch.setattr(output, "_HALF_LINE_S", 60)
    ranks = Ranks(tmp_path, 2)
    ranks.pump.start()
    ranks.say(0, b"half ")
    ranks.say(1, b"other\n")
    assert ranks.console.wait_for(b"other\n")
    ranks.say(0, b"whole\n")
    assert ranks.console.wait_for(b"half whole\n")
    assert ranks.finish() == b"other\nhalf whole\n"


def test_pieces_of_four_ranks_become_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that all write at once, in pieces and with pauses, don't run into each other."""
    monkeypatch.setattr(output, "_HALF_LINE_S", 60)
    ranks = Ranks(tmp_path, 4)
    ranks.pump.start()

    def write(rank: int) -> None:
        for _ in range(40):
            for _ in range(3):
                ranks.say(rank, str(rank).encode() * 1000)
                time.sleep(0.0005)
            ranks.say(rank, b"\n")

    writers = [threading.Thread(target=write, args=(rank,)) for rank in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    lines = ranks.finish().decode().splitlines()
    assert sorted(lines) == sorted(str(rank) * 3000 for rank in range(4) for _ in range(40))


def test_half_a_line_whose_end_has_come_meanwhile_is_shown_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pump may get to run so late that the moment for half a line has passed: its end lies in the pipe already."""
    monkeypatch.setattr(output, "_HALF_LINE_S", 0.05)
    ranks = Ranks(tmp_path, 2)
    may_go_on, write = threading.Event(), ranks.console.write

    def write_late(fd: int, data: bytes) -> None:
        write(fd, data)
        if data == b"other\n":
            may_go_on.wait(10)

    monkeypatch.setattr(ranks.console, "write", write_late)
    ranks.say(0, b"half ")
    ranks.say(1, b"other\n")
    ranks.pump.start()
    assert ranks.console.wait_for(b"other\n")
    time.sleep(0.1)
    ranks.say(0, b"whole\n")
    may_go_on.set()
    assert ranks.console.wait_for(b"whole\n")
    ranks.finish()
    assert ranks.console.writes == [b"other\n", b"half whole\n"]


def test_a_rank_is_told_what_has_been_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mark of order is taken out, and answered when all before it is on the console: half lines too."""
    monkeypatch.setattr(output, "_HALF_LINE_S", 60)
    ranks = Ranks(tmp_path, 2)
    answers = list[tuple[int, bytes]]()
    came = threading.Event()

    def note(num_marks: int) -> None:
        answers.append((num_marks, b"".join(ranks.console.writes)))
        came.set()

    ranks.streams[0].tell_passed = note
    ranks.pump.start()
    for number, part in enumerate((b"\r 10%", b"\r 20%"), start=1):
        ranks.say(0, part + _ORDER_MARK)
        assert came.wait(10)
        came.clear()
        assert answers[-1] == (number, b"\r 10%\r 20%"[: 5 * number])
    assert ranks.finish() == b"\r 10%\r 20%"
    assert read_last_words(ranks.streams[0], ranks.pump) == " 20%"


def test_half_a_line_comes_out_after_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question that waits for its answer is shown though other ranks live."""
    monkeypatch.setattr(output, "_HALF_LINE_S", 0.001)
    ranks = Ranks(tmp_path, 2)
    ranks.pump.start()
    ranks.say(0, b"(Pdb) ")
    assert ranks.console.wait_for(b"(Pdb) ")
    ranks.finish()


def test_half_a_line_comes_out_although_another_rank_never_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pdb prompt of one rank is shown while another prints without end."""
    monkeypatch.setattr(output, "_HALF_LINE_S", 0.02)
    ranks = Ranks(tmp_path, 2)
    ranks.pump.start()
    stop = threading.Event()

    def chatter() -> None:
        while not stop.is_set():
            ranks.say(1, b"y\n" * 100)

    thread = threading.Thread(target=chatter)
    thread.start()
    ranks.say(0, b"(Pdb) ")
    with ranks.console._came:
        seen = ranks.console._came.wait_for(
            lambda: any(b"(Pdb) " in data for data in ranks.console.writes), timeout=0.5
        )
    stop.set()
    thread.join()
    ranks.finish()
    assert seen


def test_the_last_half_line_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank said without a newline before it died is shown."""
    monkeypatch.setattr(output, "_HALF_LINE_S", 60)
    ranks = Ranks(tmp_path, 2)
    ranks.pump.start()
    ranks.say(0, b"Killed")
    assert ranks.finish() == b"Killed"


def test_a_huge_line_passes_and_fills_no_memory(tmp_path: Path) -> None:
    """A megabyte without a newline comes out whole; of it only the end is kept."""
    ranks = Ranks(tmp_path, 2)
    ranks.pump.start()
    ranks.say(0, b"x" * (1 << 20))
    shown = ranks.finish()
    assert shown == b"x" * (1 << 20)
    assert 1 << 16 <= len(ranks.pump.tail(0).read()) <= 2 << 16


_MARK, _LAST_MARK, _ORDER_MARK = stderr_tail.MARKS
#: A rank writes one at once; a pipe may give it out in two parts.
_PARTS_OF_MARK = st.sampled_from(
    [_MARK, _MARK[:1], _MARK[:-3], _MARK[5:], b"x" + _MARK + b"y", _LAST_MARK, _LAST_MARK[-3:]]
)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.binary(max_size=20) | _PARTS_OF_MARK), max_size=20))
def test_nothing_is_lost_or_reordered(tmp_path_factory: pytest.TempPathFactory, said: list[tuple[int, bytes]]) -> None:
    """Whatever ranks write, the log and the tail of each hold it in order, and the console gets every byte but the end marks."""
    ranks = Ranks(tmp_path_factory.mktemp("pump"), 3)
    with mock.patch.object(output, "_HALF_LINE_S", 60):
        ranks.pump.start()
        for rank, data in said:
            ranks.say(rank, data)
        shown = ranks.finish()
    whole = [b"".join(data for one, data in said if one == rank) for rank in range(3)]
    words = [stderr_tail.ANY_MARK.sub(b"", one) for one in whole]
    assert sorted(shown) == sorted(b"".join(words))
    for rank, own in enumerate(words):
        assert ranks.pump.tail(rank).read() == own
        assert not own or ranks.streams[rank].log.read_bytes() == own


def test_hidden_ranks_are_kept_but_not_shown(tmp_path: Path) -> None:
    """--local-ranks-filter hides; the log and the tail stay."""
    ranks = Ranks(tmp_path, 1, shown=False)
    ranks.pump.start()
    ranks.say(0, b"secret\n")
    assert ranks.finish() == b""
    assert ranks.pump.tail(0).read() == b"secret\n"
    assert ranks.streams[0].log.read_bytes() == b"secret\n"


def test_a_console_that_is_gone_stops_no_rank(tmp_path: Path) -> None:
    """`rankwise run … 2>&1 | head`: the ranks go on writing, and their end is kept."""
    ranks = Ranks(tmp_path, 1)
    read, write = os.pipe()
    os.close(read)
    real = Console()
    ranks.console.write = lambda _, data: real.write(write, data)  # type: ignore[method-assign]
    ranks.pump.start()
    ranks.say(0, b"z" * 500_000 + b"\nthe end\n")
    ranks.finish()
    os.close(write)
    assert ranks.pump.tail(0).read().endswith(b"the end\n")


def test_a_console_with_a_high_number_is_written_to() -> None:
    """A job of many ranks has descriptors above 1023, which select() refuses."""
    resource = pytest.importorskip("resource")
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 1100:
        pytest.skip("fewer descriptors allowed here")
    read, write = os.pipe()
    os.dup2(write, 1090)
    os.close(write)
    try:
        Console().write(1090, b"said")
        assert os.read(read, 10) == b"said"
    finally:
        os.close(1090)
        os.close(read)


def test_the_log_rolls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much a rank prints, at most two files of the limit and a chunk stay, and the end is in them."""
    monkeypatch.setattr(output, "_LOG_BYTES", 1000)
    monkeypatch.setattr(output, "_CHUNK_BYTES", 100)
    ranks = Ranks(tmp_path, 1)
    ranks.pump.start()
    for number in range(1000):
        ranks.say(0, b"line %05d\n" % number)
    ranks.finish()
    log = ranks.streams[0].log
    old = log.with_suffix(".log.1")
    assert sorted(log.parent.iterdir()) == [log, old]
    kept = old.read_bytes() + log.read_bytes()
    assert len(kept) <= 2 * 1100
    assert (b"".join(b"line %05d\n" % number for number in range(1000))).endswith(kept)


def test_a_silent_rank_leaves_no_log(tmp_path: Path) -> None:
    """No empty file is named in a report."""
    ranks = Ranks(tmp_path, 1)
    ranks.pump.start()
    assert ranks.finish() == b""
    assert not ranks.streams[0].log.exists()


def test_streams_that_survivors_still_hold_are_returned(tmp_path: Path) -> None:
    """An uploader left on purpose keeps its standard error: the pump hands the read end on, open."""
    ranks = Ranks(tmp_path, 2)
    ranks.pump.start()
    ranks.say(0, b"still here\n")
    os.close(ranks.ends[1])
    assert ranks.pump.finish(10) == [ranks.streams[0].source]
    assert ranks.console.wait_for(b"still here\n")
    os.write(ranks.ends[0], b"more")
    assert os.read(cast("int", ranks.streams[0].source), 10) == b"more"
    os.close(ranks.ends[0])
    os.close(cast("int", ranks.streams[0].source))


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[list[RankStreams]]:
    """Streams that are closed after the test."""
    streams: list[RankStreams] = []
    yield streams
    for one in streams:
        for fd in [*one.to_close, *([one.source] if one.source is not None else [])]:
            os.close(fd)


@pytest.mark.parametrize(
    ("redirects", "tee", "out_file", "err_file"),
    [
        (Std.NONE, Std.NONE, False, False),
        (Std.OUT, Std.NONE, True, False),
        (Std.ERR, Std.NONE, False, True),
        (Std.ALL, Std.NONE, True, True),
        (Std.NONE, Std.ALL, True, True),
        (Std.OUT, Std.ERR, True, True),
    ],
)
def test_where_a_ranks_streams_go(
    tmp_path: Path, opened: list[RankStreams], redirects: Std, tee: Std, out_file: bool, err_file: bool
) -> None:
    """-r and -t send streams to files of torchrun's names; all else is inherited, or passes through the pump."""
    streams = open_streams(Logs(redirects={None: redirects}, tee={0: tee}), 0, tmp_path)
    opened.append(streams)
    assert (tmp_path / "stdout.log").exists() == out_file
    assert (tmp_path / "stderr.log").exists() == err_file
    assert (streams.stdio[1] == 1) == (not out_file)
    assert (streams.source is None) == err_file
    assert streams.is_redirected == err_file


def test_a_hidden_ranks_output_goes_nowhere(tmp_path: Path, opened: list[RankStreams]) -> None:
    """--local-ranks-filter 1 sends rank 0's output to /dev/null, and rank 1's through."""
    logs = Logs(shown_ranks=frozenset({1}))
    opened += [open_streams(logs, 0, tmp_path), open_streams(logs, 1, tmp_path)]
    assert str(Path(f"/proc/self/fd/{opened[0].stdio[1]}").readlink()) == os.devnull
    assert (opened[0].shown, opened[1].shown, opened[1].stdio[1]) == (False, True, 1)


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b"a\nb\n", "a\nb"),
        (b"windows\r\nline\r\n", "windows\nline"),
        (b"\r 10%\r 20%\r 30%\nend\n", " 30%\nend"),
        (b"loss 0.5\rloss 0.4\r", "loss 0.4"),
        (b"\n\n  caf\xc3\xa9 \xff\n\n", "  caf\u00e9 \ufffd"),
        (b"", ""),
    ],
)
def test_last_words_read_as_on_a_terminal(tmp_path: Path, opened: list[RankStreams], raw: bytes, shown: str) -> None:
    """Redrawn lines show what stands there in the end; from a pipe and from a file alike."""
    ranks = Ranks(tmp_path, 1)
    ranks.pump.start()
    ranks.say(0, raw)
    ranks.finish()
    assert read_last_words(ranks.streams[0], ranks.pump) == shown
    (tmp_path / "stderr.log").write_bytes(raw)
    streams = RankStreams(local_rank=5, folder=tmp_path, stdio=(0, 1, 2), is_redirected=True)
    assert read_last_words(streams, ranks.pump) == shown


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        (("no data\n", "wandb: bye\n", "a library complains\n"), "no data"),
        (("", "no data\n", "a library complains\n"), "no data"),
        (("", "", "a library complains\n"), ""),
    ],
)
def test_words_behind_the_end_are_left_out(
    parts: tuple[str, str, str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is printed as a rank ends is shown and kept, and tells of no cause: in a pipe and in a file.

    Where it said nothing before, what its functions of atexit have printed counts: loggers that hold back.
    """
    monkeypatch.setattr(output, "_HALF_LINE_S", 60)
    own, at_exit, late = (part.encode() for part in parts)
    whole = own + at_exit + late
    ranks = Ranks(tmp_path, 1)
    ranks.pump.start()
    for part in (own, _MARK[:7], _MARK[7:] + at_exit + _LAST_MARK[:-2], _LAST_MARK[-2:] + late):
        ranks.say(0, part)
    assert ranks.finish() == whole
    assert read_last_words(ranks.streams[0], ranks.pump) == whole.decode().strip()
    sizes = (len(own), len(own + at_exit))
    assert read_last_words(ranks.streams[0], ranks.pump, Ending(stderr_bytes=(None, None))) == told
    (tmp_path / "stderr.log").write_bytes(whole)
    streams = RankStreams(local_rank=5, folder=tmp_path, stdio=(0, 1, 2), is_redirected=True)
    assert read_last_words(streams, ranks.pump, Ending(stderr_bytes=sizes)) == told


@pytest.mark.parametrize(("begun", "expected"), [(b"", b""), (b"whole\n", b""), (b"loss 0.", b"\n")])
def test_a_report_begins_a_line_in_a_file_that_ranks_write_too(begun: bytes, expected: bytes, tmp_path: Path) -> None:
    """`> log 2>&1`: behind half a line of standard output comes a newline first, and else nothing."""
    with (tmp_path / "log").open("wb", buffering=0) as file:
        file.write(begun)
        assert terminal.begin_line(file.fileno(), file.fileno()) == expected


def test_a_report_begins_a_line_where_nobody_can_know(tmp_path: Path) -> None:
    """In a pipe for both streams there is an empty line at most; where standard output goes elsewhere there is none."""
    read, write = os.pipe()
    try:
        assert terminal.begin_line(write, write) == b"\n"
        with (tmp_path / "out").open("wb") as file:
            assert terminal.begin_line(write, file.fileno()) == b""
    finally:
        os.close(read)
        os.close(write)


def test_a_report_begins_a_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many blanks as columns, and back: from the first column they fill the line, from any other they wrap into the next."""
    pty = pytest.importorskip("pty")
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    try:
        monkeypatch.setattr(terminal, "width", lambda _fd: 20)
        assert terminal.begin_line(theirs, theirs) == b" " * 20 + b"\r\x1b[K"
    finally:
        os.close(ours)
        os.close(theirs)


def test_our_lines_do_not_continue_a_ranks() -> None:
    """A line of ours behind half a line that a rank wrote on standard error begins a new one, once."""
    read, write = os.pipe()
    saved = os.dup(2)
    os.dup2(write, 2)
    try:
        console = Console()
        console.write(2, b"\r 10%|#   ")
        console.say("first")
        console.say("second")
        console.write(2, b"whole\n")
        console.say("third")
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(write)
    with os.fdopen(read, "rb") as file:
        assert file.read() == b"\r 10%|#   \nfirst\nsecond\nwhole\nthird\n"


def test_what_ranks_have_just_printed_is_known() -> None:
    """The console knows a traceback that a rank printed last, through prefixes and colours; not one far above, nor one in a file."""
    console, sink = Console(), os.open(os.devnull, os.O_WRONLY)
    console._write = lambda _fd, data, patience: Console._write(console, sink, data, patience)  # type: ignore[method-assign]
    text = "Traceback (most recent call last):\n  File 'train.py', line 4\nValueError: boom\n"
    assert not console.has_shown(text)
    console.write(2, b"".join(b"[rank1]: \x1b[35m" + line.encode() + b"\x1b[0m\r\n" for line in text.splitlines()))
    assert console.has_shown(text)
    assert not console.has_shown(text + "KeyError: 1\n")
    assert not console.has_shown("boom"), "that is a part of another line"
    console.write(2, b"step\n" * 4000)
    assert not console.has_shown(text)
    os.close(sink)


def test_a_process_that_takes_anothers_place_is_judged_by_its_own_words(tmp_path: Path) -> None:
    """What its predecessor wrote last is no word of its own: neither from a pipe, nor from a file, nor in an error file."""
    ranks = Ranks(tmp_path, 1)
    ranks.pump.start()
    ranks.say(0, b"its predecessor's\n")
    assert ranks.console.wait_for(b"its predecessor's\n")
    (tmp_path / "stderr.log").write_bytes(b"its predecessor's\n")
    (tmp_path / "error.json").write_text("{}")
    streams = RankStreams(local_rank=5, folder=tmp_path, stdio=(0, 1, 2), is_redirected=True)
    ranks.pump.begin_again(0)
    streams.begin_again()
    assert not streams.error_file.exists()
    assert (read_last_words(ranks.streams[0], ranks.pump), read_last_words(streams, ranks.pump)) == ("", "")
    with streams.log.open("ab") as file:
        file.write(b"its own\n")
    ranks.say(0, b"its own\n")
    ranks.finish()
    for ending in (None, Ending(stderr_bytes=(streams.log.stat().st_size,) * 2)):
        assert read_last_words(streams, ranks.pump, ending) == "its own"
    assert read_last_words(ranks.streams[0], ranks.pump) == "its own"


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


_INTERRUPTED = b'Traceback (most recent call last):\n  File "train.py", line 4, in <module>\n    step()\n    ^^^^^^\nKeyboardInterrupt\n'


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("prefix", [b"", b"[rank3]: "])
def test_a_traceback_that_the_user_has_asked_for_is_only_in_the_log(size: int, prefix: bytes, tmp_path: Path) -> None:
    """After Ctrl-C, in whatever pieces it comes; what else a rank says is shown, and another exception, too, whose handling was interrupted."""
    told = b"".join(prefix + line for line in _INTERRUPTED.splitlines(keepends=True))
    other = told.replace(b"KeyboardInterrupt", b"ValueError: no")
    chain = b"".join(
        prefix + line
        for line in (b"\n", b"During handling of the above exception, another exception occurred:\n", b"\n")
    )
    whole = b"saving\n" + other + chain + told + b"saved\n" + other + told + other + chain + other + b"\r 10%"
    ranks = Ranks(tmp_path, 1)
    ranks.pump.start()
    ranks.pump.hide_interrupts()
    for at in range(0, len(whole), size):
        ranks.say(0, whole[at : at + size])
        wait_until(lambda seen=at + size: _size_of(tmp_path / "0" / "stderr.log") >= min(seen, len(whole)))
    assert ranks.finish() == b"saving\n" + other + prefix + b"\nsaved\n" + other + other + chain + other + b"\r 10%"
    assert (tmp_path / "0" / "stderr.log").read_bytes() == whole
