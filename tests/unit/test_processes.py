"""Trees of processes: real short ones, below a process of their own, so that no other is ever in danger."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from rankwise.launcher.processes import list_descendants

pytestmark = pytest.mark.linux

_HEAD = """
import json, os, signal, subprocess, sys, time
from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.os_calls import adopt_orphans
from rankwise.launcher.processes import end_descendants, list_descendants
adopt_orphans()

def shell(text, ready=True):
    process = subprocess.Popen(["sh", "-c", text], stdout=subprocess.PIPE, start_new_session=True)
    if ready:
        process.stdout.readline()
    return process.pid

def wait_for(count):
    while len(list_descendants(os.getpid())) < count:
        SYSTEM_CLOCK.sleep(0.001)

start = time.monotonic()
"""
_TAIL = """
print(json.dumps({"told": told, "left": list_descendants(os.getpid()), "s": time.monotonic() - start}))
"""


def _below(code: str) -> dict[str, Any]:
    """Run code in a process that adopts orphans; return what it found."""
    text = textwrap.dedent(_HEAD) + textwrap.dedent(code) + _TAIL
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_descendants_are_found_parents_first() -> None:
    """Children and grandchildren are listed, no zombies, parents before children."""
    found = _below(
        """
        pid = shell("sh -c 'sleep 30 & echo; wait' & wait")
        wait_for(3)
        listed = list_descendants(os.getpid())
        dead = subprocess.Popen(["true"])
        os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
        told = [listed[0] == pid, len(listed), dead.pid in list_descendants(os.getpid()), list_descendants(pid) == listed[1:]]
        end_descendants((), 0, SYSTEM_CLOCK)
        """
    )
    assert (found["told"], found["left"]) == ([True, 3, False, True], [])


def test_nobody_descends_from_a_pid_that_is_not() -> None:
    """A root that is gone has no descendants."""
    assert list_descendants(2**22 + 5) == []


def test_who_was_born_while_proc_was_read_is_ended_too() -> None:
    """A list without an orphan whose parent ended while it was made is not the end: the kernel still has a child of ours."""
    found = _below(
        """
        from rankwise.launcher import processes
        shell("setsid sleep 30 & echo")
        lists = [[], []]
        processes.list_descendants = lambda root: lists.pop() if lists else list_descendants(root)
        told = end_descendants((), 0, SYSTEM_CLOCK)
        """
    )
    assert (found["told"], found["left"]) == (1, [])


def test_all_are_ended_orphans_and_daemons_too() -> None:
    """Whole trees end, also what has left its session and lost its parent."""
    found = _below(
        """
        shell("setsid sleep 30 & sleep 30 & echo")
        shell("trap '' TERM HUP; echo; sleep 30; sleep 30")
        told = end_descendants((), 0, SYSTEM_CLOCK)
        """
    )
    assert found["left"] == []
    assert found["told"] >= 3
    assert found["s"] < 5


def test_those_that_hear_sigterm_get_their_grace() -> None:
    """A process that saves at SIGTERM can; it is not killed within its grace."""
    found = _below(
        """
        r, w = os.pipe()
        os.set_inheritable(w, True)
        process = subprocess.Popen(["sh", "-c", f"trap 'echo saved >&{w}; exit' TERM; echo; while :; do sleep 0.01; done"],
                                   stdout=subprocess.PIPE, pass_fds=[w])
        process.stdout.readline()
        os.close(w)
        end_descendants((), 5, SYSTEM_CLOCK)
        told = os.read(r, 100).decode()
        """
    )
    assert (found["told"], found["left"]) == ("saved\n", [])
    assert found["s"] < 4


def test_a_stopped_process_ends_within_its_grace() -> None:
    """SIGSTOP does not keep a process from its SIGTERM."""
    found = _below(
        """
        pid = shell("echo; exec sleep 30")
        os.kill(pid, signal.SIGSTOP)
        told = end_descendants((), 5, SYSTEM_CLOCK)
        """
    )
    assert (found["told"], found["left"]) == (1, [])
    assert found["s"] < 4


def test_a_hurry_ends_the_grace() -> None:
    """Ctrl-C again: those that ignore SIGTERM are killed at once."""
    found = _below(
        """
        shell("trap '' TERM; echo; while :; do sleep 0.01; done")
        told = end_descendants((), 20, SYSTEM_CLOCK, hurry=lambda: True)
        """
    )
    assert found["left"] == []
    assert found["s"] < 4


def test_kept_processes_stay() -> None:
    """A pid in `keep` is left alone; it does not hold up the end of the others."""
    found = _below(
        """
        kept, other = shell("echo; exec sleep 30"), shell("echo; exec sleep 30")
        end_descendants([kept], 0, SYSTEM_CLOCK)
        told = list_descendants(os.getpid()) == [kept]
        os.kill(kept, signal.SIGKILL)
        os.waitpid(kept, 0)
        """
    )
    assert (found["told"], found["left"]) == (True, [])


def test_nothing_to_end_takes_no_time() -> None:
    """Without descendants it returns at once, with 0."""
    found = _below("told = end_descendants((), 5, SYSTEM_CLOCK)")
    assert found["told"] == 0
    assert found["s"] < 1


def test_only_one_sessions_are_ended() -> None:
    """What one dead rank has left behind ends, and the children of others live."""
    found = _below(
        """
        first, second = (shell("sleep 30 & echo; exec sleep 30") for _ in range(2))
        end_descendants((), 5, SYSTEM_CLOCK, session=first)
        told = [os.getsid(pid) == second for pid in list_descendants(os.getpid())]
        end_descendants((), 0, SYSTEM_CLOCK)
        """
    )
    assert (found["told"], found["left"]) == ([True, True], [])
