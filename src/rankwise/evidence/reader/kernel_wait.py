"""What a process waits for by the kernel's word: a child's end, the lock of a file, a pipe, a socket.

The system call in which the main thread stands tells it, with its first arguments, where the kernel shows them. Calls that serve
for many things, as futex and poll do, tell nothing.
"""

from __future__ import annotations

import os
import platform
import stat
from pathlib import Path

from rankwise.evidence.reader.process_state import read_call, read_stat

#: Numbers of system calls, by what they are for.
_NUMBERS: dict[str, dict[int, str]] = {
    "x86_64": {
        61: "wait4", 247: "waitid", 73: "flock", 72: "fcntl", 0: "read", 19: "read", 17: "read", 1: "write", 20: "write",
        45: "read", 47: "read", 44: "write", 46: "write", 43: "accept", 288: "accept", 42: "connect", 2: "open", 257: "open",
    },
    "aarch64": {
        260: "wait4", 95: "waitid", 32: "flock", 25: "fcntl", 63: "read", 65: "read", 67: "read", 64: "write", 66: "write",
        207: "read", 212: "read", 206: "write", 211: "write", 202: "accept", 242: "accept", 203: "connect", 56: "open",
    },
}  # fmt: skip
_STREAMS = {
    "read": ("reading from", "waiting for data from"),
    "write": ("writing to", "waiting for space in"),
}
_TOLD = {
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
    """Return what the main thread of a process is doing in the kernel, as "waiting for process 4711 (ffmpeg)"; empty if it tells nothing.

    Args:
        pid: The process.
    """
    words = read_call(pid)
    if len(words) < 3:
        return ""
    number, first, second = int(words[0]), int(words[1], 16), int(words[2], 16)
    call = _NUMBERS.get(platform.machine(), {}).get(number, "")
    if call in {"wait4", "waitid"}:
        return _tell_child(first if call == "wait4" else second if first == _ONE else 0)
    if call == "flock" or (call == "fcntl" and second in _LOCKING):
        return f"waiting for the lock of {_find_target(pid, first) or 'a file'}"
    if call in {"read", "write"}:
        return _tell_stream(pid, first, *_STREAMS[call])
    return _TOLD.get(call, "")


def _tell_child(pid: int) -> str:
    if not 0 < pid < _NEGATIVE:
        return "waiting for a process it has started"
    found = read_stat(pid)
    return f"waiting for process {pid}" + (f" ({found[0]})" if found else "")


def _tell_stream(pid: int, fd: int, doing: str, waiting: str) -> str:
    target = _find_target(pid, fd)
    kind, _, rest = target.partition(":[")
    if rest:
        return f"{waiting} a {kind}" if kind in {"pipe", "socket"} else ""
    try:
        is_fifo = stat.S_ISFIFO(Path(f"/proc/{pid}/fd/{fd}").stat().st_mode)
    except OSError:
        return ""
    return f"{waiting} the pipe {target}" if is_fifo else f"{doing} {target}"


def _find_target(pid: int, fd: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/{fd}")  # noqa: PTH115 - a link that leads nowhere
    except OSError:
        return ""
