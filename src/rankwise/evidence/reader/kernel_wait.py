"""What a process waits for by the kernel's word: a child's end, the lock of a file, a pipe, a socket.

The system call in which the main thread stands tells it, with its first arguments, where the kernel shows them. Calls that serve
for many things, as futex and poll do, tell nothing.
"""

from __future__ import annotations

import stat
from pathlib import Path

from rankwise.evidence.reader.process_state import find_target, read_call
from rankwise.evidence.reader.process_table import read_stat

_READING = frozenset({"read", "pread", "readv", "recvfrom", "recvmsg"})
_WRITING = frozenset({"write", "writev", "sendto", "sendmsg"})
_OTHERS = {
    "open": "waiting for a file or a pipe to open",
    "accept": "waiting for a client to connect",
    "connect": "connecting to a server",
}
#: fcntl's F_SETLKW and F_OFD_SETLKW.
_LOCKING = {7, 38}
#: waitid's P_PID.
_ONE = 1
_NEGATIVE = 1 << 31


def find_wait(pid: int) -> str:
    """Return what the main thread of a process is doing in the kernel, as "waiting for process 4711 (ffmpeg)"; empty if it tells nothing."""
    call, arguments = read_call(pid)
    first, second = arguments[:2] or (0, 0)
    if call in {"wait4", "waitid"}:
        return _describe_child(first if call == "wait4" else second if first == _ONE else 0)
    if call == "flock" or (call == "fcntl" and second in _LOCKING):
        return f"waiting for the lock of {find_target(pid, first) or 'a file'}"
    if call in _READING:
        return _describe_stream(pid, first, "reading from", "waiting for data from")
    if call in _WRITING:
        return _describe_stream(pid, first, "writing to", "waiting for space in")
    return _OTHERS.get(call, "")


def _describe_child(pid: int) -> str:
    if not 0 < pid < _NEGATIVE:
        return "waiting for a process it has started"
    found = read_stat(pid)
    return f"waiting for process {pid}" + (f" ({found.name})" if found else "")


def _describe_stream(pid: int, fd: int, doing: str, waiting: str) -> str:
    target = find_target(pid, fd)
    kind, _, rest = target.partition(":[")
    if rest:
        return f"{waiting} a {kind}" if kind in {"pipe", "socket"} else ""
    try:
        is_fifo = stat.S_ISFIFO(Path(f"/proc/{pid}/fd/{fd}").stat().st_mode)
    except OSError:
        return ""
    return f"{waiting} the pipe {target}" if is_fifo else f"{doing} {target}"
