"""What a rank waits for that is no rank is told, with what to do: by the kernel's word, by its frames, or by its own line."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from rankwise.evidence.reader.kernel_wait import find_wait
from rankwise.evidence.reader.notes import Frame, Stack
from rankwise.verdict.local_wait import find_local_wait
from rankwise.verdict.run_rules import look
from scenes import elsewhere, gradient, in_backward, in_call, op, rank, scene, stack
from support import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from rankwise.verdict.finding import JobFinding

_LIB = "/env/lib/python3.11"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], int]]:
    """Return a function that starts a Python process and returns its number; it is killed at the end."""
    started: list[subprocess.Popen[bytes]] = []

    def run(code: str) -> int:
        head = "import fcntl, os, socket, subprocess, sys, time\n"
        process = subprocess.Popen([sys.executable, "-c", head + code], cwd=tmp_path, stdin=subprocess.PIPE)
        started.append(process)
        return process.pid

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.linux
@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("os.mkfifo('f'); open('f')", "waiting for a file or a pipe to open"),
        ("os.mkfifo('f'); os.read(os.open('f', os.O_RDWR), 1)", "waiting for data from the pipe {folder}/f"),
        ("sys.stdin.buffer.raw.read(1)", "waiting for data from a pipe"),
        ("os.write(os.pipe()[1], bytes(1 << 20))", "waiting for space in a pipe"),
        ("fcntl.flock(open('lock', 'w'), fcntl.LOCK_EX)", "waiting for the lock of {folder}/lock"),
        ("s = socket.create_server(('127.0.0.1', 0)); s.accept()", "waiting for a client to connect"),
        ("a, b = socket.socketpair(); a.recv(1)", "waiting for data from a socket"),
    ],
)
def test_the_kernel_tells_what_a_process_waits_for(
    code: str, told: str, start: Callable[[str], int], tmp_path: Path
) -> None:
    """Real processes in real system calls, with the name of the file where there is one."""
    with (tmp_path / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        pid = start(code)
        wait_until(lambda: find_wait(pid) == told.format(folder=tmp_path))


@pytest.mark.linux
def test_the_child_that_is_waited_for_is_named(start: Callable[[str], int]) -> None:
    """Its number and its name, so that one can look at it."""
    pid = start("child = subprocess.Popen(['sleep', '60']); os.write(1, b''); os.waitpid(child.pid, 0)")
    told = wait_until(lambda: find_wait(pid) if find_wait(pid).endswith(" (sleep)") else "")
    child = int(told.split()[-2])
    os.kill(child, 9)
    assert told == f"waiting for process {child} (sleep)"


@pytest.mark.linux
def test_what_serves_for_many_things_tells_nothing(start: Callable[[str], int]) -> None:
    """A sleep, a process at work, and one that is gone."""
    assert find_wait(start("time.sleep(60)")) == ""
    assert find_wait(start("while True: pass")) == ""
    assert find_wait(1 << 22) == ""


@pytest.mark.parametrize(
    ("frames", "told"),
    [
        ([("subprocess.py", "_try_wait"), ("subprocess.py", "wait")], "a process it has started"),
        ([("threading.py", "wait"), ("queue.py", "get")], "an item in a queue"),
        ([("threading.py", "wait"), ("threading.py", "wait")], "another thread"),
        ([("socket.py", "readinto"), ("http/client.py", "begin")], "a server to answer"),
        ([("ssl.py", "read"), ("socket.py", "readinto")], "a server to answer"),
        ([("site-packages/filelock/_api.py", "acquire")], "a file lock"),
        ([("multiprocessing/connection.py", "_recv")], "another process to send something"),
    ],
)
def test_frames_tell_what_is_waited_for(frames: list[tuple[str, str]], told: str) -> None:
    """Python's own modules, and well-known packages, between the user's line and C."""
    at = stack(*((f"{_LIB}/{file}", 1, function) for file, function in frames), at=5)
    local_wait = find_local_wait(rank(0, at=at), {})
    assert local_wait is not None
    assert local_wait.doing == f"waiting for {told}"
    assert local_wait.advice


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("with lock:", "waiting for a lock"),
        ("with B:", "waiting for a lock"),
        ("self._mutex.acquire()", "waiting for a lock"),
        ("fcntl.flock(file, fcntl.LOCK_EX)", "waiting for a file lock"),
        ("data = sock.recv(10)", "waiting for data from a socket"),
        ("with open(path) as file:", None),
        ("time.sleep(10)", "sleeping"),
        ("x = ]", None),
    ],
)
def test_the_users_own_line_tells_what_has_no_frame(line: str, told: str | None) -> None:
    """Functions of C have no frame: what the line calls is what it waits for."""
    text = (
        f"A, B = threading.Lock(), threading.Lock()\n{line}\n    pass\n" if line.startswith("with") else f"\n{line}\n"
    )
    local_wait = find_local_wait(rank(0, at=elsewhere(2)), {"/job/train.py": text})
    assert (local_wait and local_wait.doing) == told


def _told(**facts: object) -> JobFinding:
    waiting = rank(0, op(is_over=False), at=in_call())
    return look(scene(waiting, rank(1, **{"at": elsewhere(5), **facts})))[0]  # type: ignore[arg-type]


def test_the_kernels_word_stands_in_the_sentence() -> None:
    """Instead of "asleep": what it waits for, where, and what to do about it."""
    finding = _told(awaits="waiting for process 4711 (ffmpeg)")
    assert finding.message.startswith("rank 1 is waiting for process 4711 (ffmpeg) at train.py:5; rank 0 waits")
    assert "look at what that process does" in finding.fix
    assert "train.py:7" in finding.fix


def test_of_a_nameless_stream_the_frames_tell_more() -> None:
    """The kernel knows only that it is a socket; that a server is asked stands in the frames."""
    at = stack((f"{_LIB}/http/client.py", 9, "begin"), at=5)
    assert "waiting for a server to answer at" in _told(at=at, awaits="waiting for data from a socket").message


def test_who_sleeps_or_works_is_told_as_such() -> None:
    """No lock, no child: nothing is made up; and a thread pool's frames say nothing of a rank that computes."""
    assert _told().message.startswith("rank 1 is asleep at train.py:5")
    at = Stack(frames=(Frame(file=f"{_LIB}/queue.py", line=1, function="get"), *elsewhere(5).frames))
    assert "is busy" in _told(at=at, is_asleep=False).message


def test_a_lock_within_a_step_is_no_step_less() -> None:
    """Who trained along and waits for a lock, sleeps or reads a file is told as that, and not as one that made fewer backward passes."""
    waiting = rank(0, gradient(), gradient(is_over=False), at=in_backward(), steps=3)
    text = "for batch in loader:\n" + "    step()\n" * 10 + "    time.sleep(1000)\n"
    for facts, told in (
        (
            {"awaits": "waiting for the lock of /data/tokens.lock"},
            "waiting for the lock of /data/tokens.lock",
        ),
        ({"awaits": "reading from /data/part-3"}, "reading from /data/part-3"),
        ({}, "sleeping"),
    ):
        other = rank(1, gradient(), at=elsewhere(12), steps=3, **facts)  # type: ignore[arg-type]
        finding = look(scene(waiting, other, sources={"/job/train.py": text}))[0]
        assert (finding.rule, finding.culprits) == ("kept_waiting", (1,))
        assert finding.message.startswith(f"rank 1 is {told} at train.py:12; rank 0 waits")
        assert "backward passes" not in finding.fix
