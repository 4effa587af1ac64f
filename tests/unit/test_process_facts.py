"""What the kernel tells of a process: real ones that are stopped, dead, at work, or wait for somebody to type."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rankwise.evidence.reader.process_state import read_children, read_process, reads_terminal, takes_signals
from support import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.linux


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Return a function that starts a Python process; it is killed at the end."""
    started: list[subprocess.Popen[bytes]] = []

    def run(code: str, **options: object) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", code], **options)  # type: ignore[call-overload]
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()


def _state(pid: int) -> str:
    facts = read_process(pid)
    assert facts is not None
    return facts.state


def test_a_stopped_process_is_told_and_one_that_goes_on(
    start: Callable[..., subprocess.Popen[bytes]],
) -> None:
    """SIGSTOP makes it "stopped", SIGCONT "running" again."""
    process = start("import time; time.sleep(60)")
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: _state(process.pid) == "stopped")
    process.send_signal(signal.SIGCONT)
    wait_until(lambda: _state(process.pid) == "running")


def test_cpu_time_grows_only_in_a_process_that_computes(
    start: Callable[..., subprocess.Popen[bytes]],
) -> None:
    """The ticks of a loop go up."""
    process = start("while True: pass")
    first = read_process(process.pid)
    assert first is not None
    wait_until(lambda: (now := read_process(process.pid)) is not None and now.ticks > first.ticks + 3)


def test_a_process_that_is_gone_is_none() -> None:
    """What has ended and was waited for can't be seen, and has no children."""
    done = subprocess.Popen(["true"])
    done.wait()
    assert read_process(done.pid) is None
    assert read_children([done.pid]) == {done.pid: ()}
    assert not reads_terminal(done.pid)


def test_dead_children_are_seen_until_they_are_waited_for(
    start: Callable[..., subprocess.Popen[bytes]],
) -> None:
    """A worker that was killed is a Z among the children; one that lives is S, T or R. Names come with them."""
    code = """
import os, sys, time
pids = []
for _ in range(2):
    pid = os.fork()
    if not pid:
        time.sleep(60)
        os._exit(0)
    pids.append(pid)
print(*pids, flush=True)
time.sleep(60)
"""
    process = start(code, stdout=subprocess.PIPE)
    assert process.stdout is not None
    dies, lives = map(int, process.stdout.readline().split())
    os.kill(dies, signal.SIGKILL)
    wait_until(lambda: [one.state for one in read_children([process.pid])[process.pid] if one.pid == dies] == ["Z"])
    found = {one.pid: one for one in read_children([process.pid, os.getpid()])[process.pid]}
    assert sorted(found) == sorted([dies, lives])
    assert found[lives].state in "SR"
    assert found[lives].name.startswith("python")
    os.kill(lives, signal.SIGKILL)
    process.stdout.close()


@pytest.mark.skipif(os.uname().machine not in {"x86_64", "aarch64"}, reason="system calls have other numbers here")
@pytest.mark.parametrize("code", ["input()", "breakpoint()", "import readline; input()"])
def test_a_process_that_waits_for_somebody_to_type_is_told(
    start: Callable[..., subprocess.Popen[bytes]], code: str
) -> None:
    """input(), with readline or without, and pdb at a terminal: it waits for us. Asleep, or at a pipe: it does not."""
    ours, theirs = pty.openpty()
    options = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    process = start(code, **options)
    asleep = start("import time; time.sleep(60)", **options)
    piped = start("input()", stdin=subprocess.PIPE)
    os.close(theirs)
    try:
        wait_until(lambda: reads_terminal(process.pid))
        wait_until(lambda: _state(piped.pid) == "running")
        assert not reads_terminal(asleep.pid)
        assert not reads_terminal(piped.pid)
    finally:
        os.close(ours)
        assert piped.stdin is not None
        piped.stdin.close()


LASTING = {
    "a lock": "import threading; lock = threading.Lock(); lock.acquire(); print(flush=True); lock.acquire()",
    "a child": "import subprocess; child = subprocess.Popen(['sleep', '60']); print(flush=True); child.wait()",
}
BRITTLE = {
    "C's sleep": "import ctypes; sleep = ctypes.CDLL(None).sleep; print(flush=True); sleep(60)",
    "poll": "import select; print(flush=True); select.poll().poll(60_000)",
    "a loop": "print(flush=True)\nwhile True: pass",
}


@pytest.mark.parametrize(
    ("code", "expected"),
    [*((code, True) for code in LASTING.values()), *((code, False) for code in BRITTLE.values())],
    ids=[*LASTING, *BRITTLE],
)
def test_only_waits_that_go_on_after_a_signal_take_one(
    start: Callable[..., subprocess.Popen[bytes]], code: str, expected: bool
) -> None:
    """Locks and waits for children go on by themselves; a sleep or a poll in C would end early, and what runs may come to one."""
    process = start(code, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        if expected:
            wait_until(lambda: takes_signals(process.pid))
        else:
            wait_until(lambda: code.endswith("pass") or _is_in_a_call(process.pid))
            assert not takes_signals(process.pid)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()


def _is_in_a_call(pid: int) -> bool:
    number = Path(f"/proc/{pid}/syscall").read_text(encoding="ascii").split()[0]
    return number not in {"running", "0", "1", "63", "64"}  # reads and writes apart
