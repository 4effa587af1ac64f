"""The console's view of log files: whole lines with their rank in front."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import TYPE_CHECKING, cast

import pytest

from rankwise.launcher import tee as module
from rankwise.launcher.console import Console
from rankwise.launcher.tee import Tee, make_prefix

if TYPE_CHECKING:
    from pathlib import Path


class FakeConsole:
    """Remembers what it was given, by descriptor."""

    def __init__(self) -> None:
        self.by_fd: dict[int, bytes] = {}
        self.came = threading.Event()

    def write(self, fd: int, data: bytes) -> None:
        """Take bytes."""
        self.by_fd[fd] = self.by_fd.get(fd, b"") + data
        self.came.set()


def _show(path: Path, data: bytes, prefix: str = "[0]:") -> bytes:
    """Return what the console gets of a file that is whole before it is followed."""
    path.write_bytes(data)
    console = FakeConsole()
    tee = Tee(cast("Console", console))
    tee.add(path, to_fd=1, prefix=prefix)
    tee.start()
    tee.finish(10)
    return console.by_fd.get(1, b"")


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"a\nb\n", b"[0]:a\n[0]:b\n"),
        (b"half", b"[0]:half\n"),
        (b"a\n\nb\n", b"[0]:a\n[0]:\n[0]:b\n"),
        (b"10%\r20%\r30%\nend\n", b"[0]:30%\n[0]:end\n"),
        (b"\r 10%\r 20%\n", b"[0]: 20%\n"),
        (b"windows\r\n", b"[0]:windows\n"),
        (b"\xff\x00\n", b"[0]:\xff\x00\n"),
        (b"", b""),
    ],
)
def test_lines_are_shown_whole(tmp_path: Path, data: bytes, shown: bytes) -> None:
    """Each line has its prefix, half a line at the end gets a newline, and a redrawn line shows its end."""
    assert _show(tmp_path / "log", data) == shown


def test_a_progress_bar_at_the_end_is_shown_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar that was never ended with a newline shows its last state, without carriage returns."""
    monkeypatch.setattr(module, "_PROGRESS_EVERY_S", 1e9)
    assert _show(tmp_path / "log", b"start\n\r 10%\r 20%\r 30%") == b"[0]:start\n[0]: 30%\n"


def test_a_huge_line_comes_in_parts(tmp_path: Path) -> None:
    """A line of three megabytes is shown, in parts, and does not fill the memory."""
    shown = _show(tmp_path / "log", b"x" * (3 << 20) + b"\nend\n", prefix="")
    assert shown.replace(b"\n", b"") == b"x" * (3 << 20) + b"end"
    assert 3 <= shown.count(b"\n") <= 6


def test_a_file_that_grows_is_followed(tmp_path: Path) -> None:
    """A line is shown when it is whole, before the end of the job."""
    path, console = tmp_path / "log", FakeConsole()
    tee = Tee(cast("Console", console))
    tee.add(path, to_fd=2, prefix="")
    tee.start()
    with path.open("ab", buffering=0) as file:
        file.write(b"ha")
        file.write(b"lf\n")
        assert console.came.wait(10)
        file.write(b"end")
    tee.finish(10)
    assert console.by_fd == {2: b"half\nend\n"}


def test_a_file_that_never_comes_is_no_error(tmp_path: Path) -> None:
    """A rank that could not be started has no log."""
    console = FakeConsole()
    tee = Tee(cast("Console", console))
    tee.add(tmp_path / "none", to_fd=1, prefix="")
    tee.start()
    tee.finish(10)
    assert console.by_fd == {}


def test_without_files_nothing_is_started() -> None:
    """A job without -t has no tee."""
    tee = Tee(cast("Console", FakeConsole()))
    tee.start()
    tee.finish(0)


def test_lines_that_match_a_filter_are_copied(tmp_path: Path) -> None:
    """--duplicate-stdout-filters copies the lines that hold one of its words, of all ranks and with their prefix, as torchrun does."""
    console = FakeConsole()
    tee = Tee(cast("Console", console))
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"apple\nplum\norange %s\n" % name.encode())
        tee.add(tmp_path / name, to_fd=1, prefix="p:", filters=("apple", "orange"), copy_to=tmp_path / "copy")
    tee.start()
    tee.finish(10)
    copied = sorted((tmp_path / "copy").read_text().splitlines())
    assert copied == ["p:apple", "p:apple", "p:orange a", "p:orange b"]
    assert console.by_fd[1].count(b"p:plum\n") == 2


def test_a_copy_that_can_not_be_written_stops_nothing(tmp_path: Path) -> None:
    """A full disk or a missing folder loses the copy, not the console's view of all ranks."""
    console, errors = FakeConsole(), []
    tee = Tee(cast("Console", console))
    (tmp_path / "a").write_bytes(b"apple\n")
    (tmp_path / "b").write_bytes(b"plum\n")
    tee.add(tmp_path / "a", to_fd=1, prefix="", filters=("apple",), copy_to=tmp_path / "no" / "copy")
    tee.add(tmp_path / "b", to_fd=1, prefix="")
    old, threading.excepthook = threading.excepthook, errors.append
    try:
        tee.start()
        tee.finish(10)
    finally:
        threading.excepthook = old
    assert errors == []
    assert console.by_fd == {1: b"apple\nplum\n"}


def test_a_console_that_is_gone_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """A reader that has left (`| head`) gets nothing more, and the tee ends."""
    (tmp_path / "log").write_bytes(b"line\n" * 200_000)
    read, write = os.pipe()
    os.close(read)
    tee = Tee(Console())
    tee.add(tmp_path / "log", to_fd=write, prefix="")
    tee.start()
    start = time.monotonic()
    tee.finish(30)
    os.close(write)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("template", "filled"),
    [
        ("[${role_name}${local_rank}]:", "[trainer1]:"),
        ("<$rank> ", "<5> "),
        ("${hostname}:${rank}: ", f"{socket.gethostname()}:5: "),
        ("${unknown} $5 $$", "${unknown} $5 $"),
        ("", ""),
    ],
)
def test_prefixes(template: str, filled: str) -> None:
    """Torchrun's names are filled in; what is no name stays."""
    assert make_prefix(template, role_name="trainer", rank=5, local_rank=1) == filled
