"""The one door to what only some systems have: prctl, pseudo-terminals, limits, memory files.

Every function says what happens where the system lacks the thing, so that nobody else has to ask.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import select
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

IS_LINUX = sys.platform.startswith("linux")
IS_WINDOWS = os.name == "nt"
_SIOCGIFADDR = 0x8915

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37

#: What ends a process that does not listen; Windows knows one way only.
KILL_SIGNAL = int(getattr(signal, "SIGKILL", signal.SIGTERM))

# Used to ask a rank for its stacks. SIGUSR1/2 belong to schedulers and scripts, 32 and 33 to the C library.
STACK_SIGNAL: int | None = signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else None


# Looked up once and before any fork: loading a library in a forked child is not safe.
_LIBC = ctypes.CDLL(None, use_errno=True) if IS_LINUX else None


def _prctl(option: int, value: int) -> bool:
    return _LIBC is not None and _LIBC.prctl(option, value, 0, 0, 0) == 0


def die_with_parent() -> None:
    """Ask the kernel to SIGKILL this process when the thread that forked it ends; elsewhere nothing happens."""
    _prctl(_PR_SET_PDEATHSIG, int(getattr(signal, "SIGKILL", 9)))


def die_with_peer(fd: int, group: int) -> None:
    """Have the kernel kill a process group when the other end of a socket is closed, as it is when its process dies.

    Args:
        fd: The group's own end. Anything that comes from the other one kills the group, too, until O_ASYNC is taken off
            it.
        group: Whom.

    Raises:
        OSError: The system can't do that.
    """
    import fcntl

    fcntl.fcntl(fd, fcntl.F_SETOWN, -group)
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    if wait_ready([fd], 0):
        os.killpg(group, signal.SIGKILL)  # it was closed before


def adopt_orphans(adopts: bool = True) -> bool:  # noqa: FBT001 - a setting and its value
    """Become the parent of all descendants that lose theirs, or no longer; False where the system can't do it."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, int(adopts))


def adopts_orphans() -> bool:
    """Tell whether this process becomes the parent of descendants that lose theirs."""
    adopts = ctypes.c_int(0)
    return (
        _LIBC is not None
        and _LIBC.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(adopts), 0, 0, 0) == 0
        and adopts.value == 1
    )


def close_from(first: int) -> None:
    """Close all descriptors from a number on.

    Where the kernel has no close_range, ``os.closerange`` tries one number after the other, and containers may allow a
    billion of them.

    Args:
        first: The lowest.
    """
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208 - a path is no number
    except OSError:
        os.closerange(first, os.sysconf("SC_OPEN_MAX"))
        return
    for fd in numbers:
        if fd >= first:
            with suppress(OSError):  # that of the list itself
                os.close(fd)


def raise_file_limit() -> int | None:
    """Let this process open as many files as the hard limit allows: a job of many ranks takes several for each.

    Returns:
        The limit before, for ``set_file_limit``; None where there is none.
    """
    try:
        import resource
    except ImportError:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        set_file_limit(hard)
    return soft


def count_allowed_files() -> float:
    """Return how many files a process of this user may open at most, once it has raised its limit."""
    try:
        import resource
    except ImportError:
        return float("inf")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return float("inf") if hard == resource.RLIM_INFINITY else hard


def list_limits() -> dict[str, tuple[int, int]]:
    """Return all limits of this process, soft and hard, by the names of the module ``resource``; none where there are none."""
    try:
        import resource
    except ImportError:
        return {}
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {name: resource.getrlimit(getattr(resource, name)) for name in names}


def set_file_limit(limit: int | None) -> None:
    """Let this process, and what it starts, open so many files; None changes nothing."""
    if limit is None:
        return
    import resource

    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def wait_ready(fds: Iterable[int], timeout_s: float | None, *, to_write: bool = False) -> list[int]:
    """Wait until a descriptor can be read, or written, without blocking, or has come to its end.

    Unlike ``select.select`` it takes descriptors of any number: a job of many ranks has more than 1024.

    Args:
        fds: The descriptors.
        timeout_s: How long to wait at most; None: for ever.
        to_write: Whether to wait for room, and not for data.

    Returns:
        Those that are ready; empty if the time was over.

    Raises:
        OSError: A descriptor is closed.
    """
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLOUT if to_write else select.POLLIN)
    found = poll.poll(None if timeout_s is None else math.ceil(timeout_s * 1000))
    for fd, event in found:
        if event & select.POLLNVAL:
            raise OSError(errno.EBADF, f"descriptor {fd} is closed")
    return [fd for fd, _ in found]


def pick_high_descriptors(count: int) -> tuple[int, ...]:
    """Return descriptor numbers above those that a script's own files get, within this process's limit."""
    limit = os.sysconf("SC_OPEN_MAX") if hasattr(os, "sysconf") else 256
    first = min(100, max(3, limit - 2 * count))
    return tuple(range(first, first + count))


#: Where a rank finds the files for its notes and its stacks, the warm server its socket, and the rank again the file
#: for its evidence and the pipe by which it is asked for more: high, so that the script's own descriptors get the
#: numbers that they have under torchrun.
NOTES_FD, STACKS_FD, SERVER_FD, EVIDENCE_FD, ASK_FD = pick_high_descriptors(5)


#: How a supervisor that a resident server has forked is called, with its launcher's number behind it: it is no child of
#: that.
SUPERVISOR_NAME = "rankwise-supervisor"


def make_memory_file(name: str) -> int:
    """Open an unnamed file of no size, in memory where possible, and return its descriptor.

    Unlike a file in a folder it can be written when the disk is full, and it goes with its last user.
    """
    if hasattr(os, "memfd_create"):
        with suppress(OSError):  # refused by a sandbox
            return os.memfd_create(name, os.MFD_CLOEXEC)
    fd, path = tempfile.mkstemp(prefix=name)
    if not IS_WINDOWS:
        Path(path).unlink()
    return fd


def open_terminal(like_fd: int) -> tuple[int, int] | None:
    """Open a pseudo-terminal that looks like the terminal ``like_fd``.

    Returns:
        (our end, the program's end); None where there are none left or the system has none.
    """
    try:
        import pty
        import termios
    except ImportError:
        return None
    try:
        ours, theirs = pty.openpty()
    except OSError:
        return None
    try:
        settings = termios.tcgetattr(like_fd)
        # Bytes pass as they are: the real terminal at the end does the newline work, once.
        settings[1] &= ~termios.OPOST
        settings[3] &= ~termios.ECHO
        termios.tcsetattr(theirs, termios.TCSANOW, settings)
    except termios.error:
        pass
    copy_terminal_size(like_fd, ours)
    return ours, theirs


def find_address(interface: str) -> str:
    """Return the IPv4 address of a network interface; empty if it has none, or this is not Linux."""
    try:
        import fcntl
        import socket
        import struct

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    except (ImportError, OSError):
        return ""
    return str(socket.inet_ntoa(found[20:24]))


def copy_terminal_size(from_fd: int, to_fd: int) -> None:
    """Give the terminal ``to_fd`` the rows and columns of ``from_fd``; nothing happens without terminals."""
    try:
        import fcntl
        import termios
    except ImportError:
        return
    try:
        size = fcntl.ioctl(from_fd, termios.TIOCGWINSZ, b"\0" * 8)
        fcntl.ioctl(to_fd, termios.TIOCSWINSZ, size)
    except OSError:
        pass


def try_lock_file(fd: int) -> bool | None:
    """Lock a file for whoever opened it like this; it is unlocked when the last copy of the descriptor is closed.

    A forked child has a copy, and must close it.

    Returns:
        Whether it is ours now; None where the system or the file system has no locks.
    """
    try:
        import fcntl
    except ImportError:
        return None
    try:
        # Not lockf: that lock goes as soon as anything in this process opens the file and closes it again, as a backup
        # does.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in {errno.EACCES, errno.EAGAIN}:
            return False
        if error.errno in {errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}:
            return None
        raise
    return True


def listens_to(pid: int, number: int | None, *, or_ignores: bool = False) -> bool:
    """Tell whether a process catches a signal, in whatever language; False where /proc is missing, or for no signal.

    Args:
        pid: The process.
        number: The signal.
        or_ignores: Whether to ignore it counts too.
    """
    if number is None:
        return False
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    names = ("SigCgt:", "SigIgn:") if or_ignores else ("SigCgt:",)
    masks = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(names)]
    return any(mask >> (number - 1) & 1 for mask in masks)
