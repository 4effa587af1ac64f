"""What the kernel tells of a rank: whether it runs, is stopped or waits for somebody to type, and what it has started.

Read from /proc. Where there is none, or it hides other processes, less is known, and nothing is guessed.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

from rankwise.evidence.reader.process_table import list_below, list_processes, read_stat
from rankwise.evidence.reader.scene import Child

if TYPE_CHECKING:
    from collections.abc import Collection

    from rankwise.evidence.reader.scene import State

#: Less of a core is no sign of life: threads that wake up now and then use it.
IDLE_SHARE = 0.05
_STATES: dict[str, State] = {
    "R": "running", "S": "running", "I": "running", "D": "disk sleep", "T": "stopped", "Z": "ended", "X": "ended",
}  # fmt: skip
#: Stopped by a debugger from outside, such as gdb.
_TRACED = "t"
#: The system calls that show what a thread waits for, by their numbers.
_CALLS: dict[str, dict[int, str]] = {
    "x86_64": {
        0: "read", 17: "pread", 19: "readv", 45: "recvfrom", 47: "recvmsg", 1: "write", 20: "writev", 44: "sendto", 46: "sendmsg",
        2: "open", 257: "open", 42: "connect", 43: "accept", 288: "accept", 23: "select", 270: "select", 61: "wait4", 247: "waitid",
        72: "fcntl", 73: "flock", 202: "futex", 230: "clock_nanosleep",
    },
    "aarch64": {
        63: "read", 67: "pread", 65: "readv", 207: "recvfrom", 212: "recvmsg", 64: "write", 66: "writev", 206: "sendto", 211: "sendmsg",
        56: "open", 203: "connect", 202: "accept", 242: "accept", 72: "select", 260: "wait4", 95: "waitid",
        25: "fcntl", 32: "flock", 98: "futex", 115: "clock_nanosleep",
    },
}  # fmt: skip
#: Of these the kernel goes on by itself after a signal.
_LASTING = frozenset({"wait4", "waitid", "flock"})
#: The thread by which torch's RPC polls shared memory.
_POLLS = "TP_SHM_reactor"
_TERMINALS = ("/dev/pts/", "/dev/tty", "/dev/console")
_LEAST_FIELDS = 22
#: clock_nanosleep up to a point in time (TIMER_ABSTIME), as Python's time.sleep has it from 3.11 on.
_UNTIL = 1


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """A process at one moment.

    Attributes:
        state: Where it stands.
        ticks: CPU time that all its threads have used, in clock ticks.
        is_traced: Whether a debugger from outside holds it.
    """

    state: State
    ticks: int
    is_traced: bool = False


def ticks_per_second() -> int:
    """Return how many clock ticks are a second of CPU time."""
    return os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def read_process(pid: int) -> ProcessFacts | None:
    """Return what is known of a process; None if it is gone or can't be seen."""
    found = read_stat(pid)
    if found is None:
        return None
    if len(found.fields) < _LEAST_FIELDS:
        return None
    return ProcessFacts(
        state=_STATES.get(found.state, "running"),
        ticks=found.ticks,
        is_traced=found.state == _TRACED,
    )


def read_core_wait(pid: int) -> tuple[float, int] | None:
    """Return for how many seconds the main thread was ready to run and had no core, and how often it has let go of its own; None if the kernel does not say."""
    try:
        waited_ns = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])
        status = Path(f"/proc/{pid}/status").read_text()
        return waited_ns / 1e9, int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    except (OSError, ValueError, IndexError):
        return None


def read_children(parents: Collection[int]) -> dict[int, tuple[Child, ...]]:
    """Return what processes have started and not yet waited for, and what that has started: workers of a DataLoader, dead ones too.

    One walk over all processes of the host serves all parents: too dear for every look, cheap for one at a hang.
    """
    processes = list_processes()
    parents_of = {pid: stat.parent for pid, stat in processes.items()}
    found = {}
    for parent in parents:
        below = [(pid, processes[pid]) for pid in sorted(list_below(parent, parents_of))]
        found[parent] = tuple(Child(pid=pid, name=stat.name, state=stat.state, ticks=stat.ticks) for pid, stat in below)
    return found


def has_busy_threads(pid: int) -> bool:
    """Tell whether a thread beside the main one runs at this moment."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 - hot, and /proc
    except OSError:
        return False
    for thread in threads:
        found = None if int(thread) == pid else read_stat(pid, thread)
        if found is not None and found.state == "R":
            return True
    return False


def read_polling_ticks(pid: int) -> int:
    """Return the CPU time, in clock ticks, of the thread by which torch's RPC polls shared memory: it never rests while its process waits."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 - /proc
    except OSError:
        return 0
    stats = (read_stat(pid, thread) for thread in threads)
    return sum(one.ticks for one in stats if one is not None and one.name == _POLLS)


def takes_signals(pid: int) -> bool:
    """Tell whether the main thread of a process stands in a wait that a signal can't disturb.

    The kernel goes on with such a wait by itself after the signal's handler, or whoever has called it must do so, as
    the end is a point in time. Others, such as ``sleep`` and ``poll``, end early for ever, and what C code makes of
    that nobody knows. False also where it can't be seen, and for what runs: it may be just before such a call.
    """
    call, arguments = read_call(pid)
    if call == "futex":
        return arguments[3] == 0  # without a timeout
    return arguments[1] == _UNTIL if call == "clock_nanosleep" else call in _LASTING


def reads_terminal(pid: int) -> bool:
    """Tell whether the main thread of a process waits for somebody to type at a terminal, as pdb and input() do.

    False also where that can't be seen: the kernel shows the system call of a process only to those that may trace it.
    """
    call, arguments = read_call(pid)
    if call == "read":
        return find_target(pid, arguments[0]).startswith(_TERMINALS)
    # readline waits for descriptor 0 alone: the first argument is the highest descriptor and one.
    return call == "select" and arguments[0] == 1 and find_target(pid, 0).startswith(_TERMINALS)


def read_call(pid: int) -> tuple[str, list[int]]:
    """Return the system call that the main thread of a process is in, and its six arguments; no name if it runs, or none is known."""
    try:
        with open(f"/proc/{pid}/task/{pid}/syscall", encoding="ascii") as file:  # noqa: PTH123 - hot
            words = file.read().split()
    except OSError:
        return "", []
    if len(words) < 7 or not words[0].isdecimal():
        return "", []
    name = _CALLS.get(platform.machine(), {}).get(int(words[0]), "")
    return name, [int(word, 16) for word in words[1:7]]


def find_target(pid: int, fd: int) -> str:
    """Return what a descriptor of a process leads to, as the kernel names it; empty if that can't be seen."""
    try:
        return os.readlink(f"/proc/{pid}/fd/{fd}")  # noqa: PTH115 - hot, and a link that leads nowhere
    except OSError:
        return ""
