"""Becoming a rank: what a forked child of the warm server does to be what a started process would be.

It stands alone, as ``server.py`` does, and is loaded by path, once for all ranks.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import signal
import struct
import sys
import time
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_GET_NAME = 1, 15, 16
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_PR_SET_CHILD_SUBREAPER = 36
_ADOPTION_S = 60.0
#: Packages whose libraries read variables when they are imported.
_READ_AT_IMPORT = ("torch", "numpy")
#: torch's own default seed, where it is a constant: a fresh interpreter has it, and so must a rank.
_CONSTANT_SEED = 67280421310721

_libc: Any = ctypes.CDLL(None, use_errno=True) if sys.platform.startswith("linux") else None


class LateEnvironment:
    """Starts a rank again, cold, if it has changed a variable that torch would read when the script imports torch.

    A script may say ``os.environ["OMP_NUM_THREADS"] = "4"`` before it imports torch; here torch is there before
    it. So at its first import of torch, which finds torch loaded, the environment is compared with that of the
    start. Where it differs, the same process becomes the plain command, and the script runs from its first line.
    """

    def __init__(
        self,
        latched: tuple[str, ...],
        read: frozenset[str],
        asked: tuple[str, ...],
        start: dict[str, str],
        fds: list[int],
        *,
        ignored: set[int],
        mask: set[Any],
    ) -> None:
        self._latched, self._asked, self._read = latched, asked, read
        self._start, self._fds, self._ignored, self._mask = start, fds, ignored, mask
        # A library may have set something in C, in the server, that Python does not know of.
        self._environs = (dict(os.environ), _read_c_environ())
        self._pid, self._folder, self._umask = os.getpid(), _get_folder(), os.umask(0o77)
        os.umask(self._umask)

    def compare(self, package: str) -> None:
        """Go on if nothing has changed; else this call does not return.

        Args:
            package: What the script imports.
        """
        if os.getpid() != self._pid:
            return  # a forked child is no rank
        prefixes = self._latched if package in _READ_AT_IMPORT else (*self._latched, *self._asked)
        for old, new in zip(self._environs, (dict(os.environ), _read_c_environ()), strict=True):
            different = {name for name, _ in {*old.items()} ^ {*new.items()}}
            changed = {name for name in different if name in self._read or name.startswith(prefixes)}
            if changed:
                self._start_again(min(changed), package)

    def _start_again(self, name: str, package: str) -> None:
        for fd in self._fds:
            with _Quiet():  # the script closed it
                os.set_inheritable(fd, True)
        # What an exec does not reset by itself; by C, as Python lets only the main thread do it.
        for number in signal.valid_signals() - self._ignored:
            if signal.getsignal(number) is signal.SIG_IGN:
                _libc.signal(int(number), None)
        os.umask(self._umask)
        if self._folder:
            with _Quiet():
                os.chdir(self._folder)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        if os.environ.get("LOCAL_RANK") == "0":
            text = f"rankwise: cold start: the script sets {name} before it imports {package}\n"
            with _Quiet():
                os.write(2, text.encode("utf-8", "surrogateescape"))
        os.execve(sys.executable, sys.orig_argv, self._start)


class _Quiet:
    """Swallows what the system refuses: contextlib is imported by the script or not at all."""

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: object, traceback: object) -> bool:
        return isinstance(error, OSError)


def _read_c_environ() -> dict[str, str]:
    """Return the environment as C sees it: os.putenv changes only that."""
    table: Any = ctypes.POINTER(ctypes.c_char_p).in_dll(_libc, "environ")
    found: dict[str, str] = {}
    index = 0
    while table and (entry := table[index]) is not None:
        name, _, value = entry.partition(b"=")
        found[os.fsdecode(name)] = os.fsdecode(value)
        index += 1
    return found


class ImportWatch:
    """Notices that the script imports what is loaded already: the statement asks a module's spec whether it is ready.

    Args:
        asked: Packages that the user has had preloaded; torch and numpy are watched in any case.
    """

    def __init__(self, asked: set[str]) -> None:
        self._packages = {*_READ_AT_IMPORT, *asked}
        self._seen: set[str] = set()
        self._late: LateEnvironment | None = None
        self._watched: Any = None

    def install(self) -> None:
        """Have all modules of theirs ask us; once for all ranks, before the fork."""
        plain: Any = type(json.__spec__)
        if self._watched is None:
            self._watched = self._make_watched(plain)
        for name, module in list(sys.modules.items()):
            spec = getattr(module, "__spec__", None)
            if name.partition(".")[0] in self._packages and type(spec) is plain:
                spec.__class__ = self._watched

    def _make_watched(self, plain: Any) -> Any:
        def is_initializing(spec: Any) -> bool:
            if self._late is not None:
                # Once is enough: torch has import statements in functions that every training step calls.
                spec.__class__ = plain
                top = spec.name.partition(".")[0]
                if top not in self._seen:
                    # Once torch is there, numpy is too.
                    self._seen.update(_READ_AT_IMPORT if top == "torch" else (top,))
                    self._late.compare(top)
            value: bool = vars(spec).get("_initializing", False)
            return value

        def set_initializing(spec: Any, value: bool) -> None:  # noqa: FBT001 - a setter's form
            vars(spec)["_initializing"] = value

        names = {"_initializing": property(is_initializing, set_initializing), "__module__": plain.__module__}
        return type(plain.__name__, (plain,), names)

    def begin(self, late: LateEnvironment) -> None:
        """In a rank: from now on imports are the script's."""
        self._late = late


def _get_folder() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""  # it is gone


def place(fds: list[int], extra: list[int]) -> None:
    """Put the descriptors that came with an order where a rank expects them."""
    wanted = [0, 1, 2, *extra]
    safe = []
    for fd in fds:
        moved, passed = fd, []
        while moved in wanted:
            passed.append(moved)
            moved = os.dup(moved)
        for number in passed:
            os.close(number)
        safe.append(moved)
    for number, fd in zip(wanted, safe, strict=True):
        os.dup2(fd, number, inheritable=number <= 2)
        os.close(fd)


def renew_streams() -> None:
    """Let the standard streams ask their descriptors anew what they are: a pipe, a file, a terminal.

    In place, as modules may hold them; as CPython makes them (create_stdio in pylifecycle.c).
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        stream: Any = getattr(sys, name)
        if type(stream) is not io.TextIOWrapper or stream is not getattr(sys, f"__{name}__"):
            continue
        buffer: Any = stream.buffer
        raw = getattr(buffer, "raw", buffer)  # unbuffered output has no layer between
        if type(raw) is not io.FileIO or raw.fileno() != fd:
            continue
        settings: dict[str, Any] = {
            "encoding": stream.encoding,
            "errors": stream.errors,
            "newline": "\n",
            "line_buffering": stream.line_buffering,
            "write_through": stream.write_through,
        }
        # What a FileIO has once found out it keeps, so there must be another one.
        new: Any = io.FileIO(fd, "rb" if fd == 0 else "wb", closefd=False)
        new.name = raw.name
        if buffer is raw:
            buffer = new
        else:
            type(buffer).__init__(buffer, new, getattr(new, "_blksize", io.DEFAULT_BUFFER_SIZE))
        io.TextIOWrapper.__init__(stream, buffer, **settings)


def wait_adoption(supervisor: int, strangers: tuple[int, int]) -> None:
    """Wait until we are the supervisor's child, then die with it.

    It takes milliseconds, or somebody has stopped them.
    """
    end = time.monotonic() + _ADOPTION_S
    while os.getppid() in strangers and time.monotonic() < end:
        time.sleep(0.0001)
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != supervisor:
        os._exit(1)  # nobody would ever end us


def renew_identity() -> None:
    """Give this process what a fresh interpreter draws for itself; else all ranks would share the server's."""
    threading, torch = sys.modules.get("threading"), sys.modules.get("torch")
    if threading is not None and hasattr(threading.Thread, "_set_native_id"):
        threading.main_thread()._set_native_id()
    if torch is not None and torch.initial_seed() != _CONSTANT_SEED:
        torch.default_generator.seed()
    # numpy's legacy generator; `random` reseeds itself, and default_rng asks the system each time.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    tempfile: Any = sys.modules.get("tempfile")
    if tempfile is not None:
        tempfile.tempdir = None  # asked for at an import; the script may set TMPDIR first
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)


def show(environ: Any, argv: list[str] | None = None) -> None:
    """Let /proc/PID, ``ps`` and ``ps e`` show this rank's variables, by which people find a rank; else the server's.

    The kernel lets a process say where these lie (prctl(2), PR_SET_MM_MAP, Linux 3.18). Where it may not, nothing is
    lost but the view.

    Args:
        environ: The variables, as bytes.
        argv: The command, if that is another one, too.
    """
    block = b"".join(b"%s=%s\0" % pair for pair in environ.items())
    command = b"".join(os.fsencode(word) + b"\0" for word in argv or ())
    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return
    # Numbered as in proc(5), from 3 on.
    at = {number: int(fields[number - 3]) for number in (26, 27, 28, 45, 46, 47, 48, 49)}
    _libc.mmap.restype = _libc.sbrk.restype = ctypes.c_void_p
    # Private memory, as only that is shown; never given back. Both in one, as programs that rename themselves expect
    # it.
    memory = _libc.mmap(None, ctypes.c_size_t(len(command) + len(block)), 3, 0x22, -1, ctypes.c_long(0))
    if memory in (None, ctypes.c_void_p(-1).value):
        return
    ctypes.memmove(memory, command + block, len(command) + len(block))
    middle, end = memory + len(command), memory + len(command) + len(block)
    words = (memory, middle) if command else (at[48], at[49])
    places = (at[26], at[27], at[45], at[46], at[47], _libc.sbrk(0), at[28], *words, middle, end)
    layout = struct.pack("=11QQIi", *places, 0, 0, -1)
    _libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, layout, ctypes.c_ulong(len(layout)), 0)


def run_main(path: str, args: list[str]) -> None:
    """Run a program of ours, which has a function ``main``, instead of the user's script; does not return."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("rankwise_program", path)
    if spec is None or spec.loader is None:
        os._exit(1)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        module.main(*args)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


def adopt_orphans() -> bool:
    """Become the parent of all descendants that lose theirs; False where the system does not allow it."""
    return bool(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def get_name() -> bytes:
    """Return what ps and top call this process."""
    name = ctypes.create_string_buffer(16)
    _libc.prctl(_PR_GET_NAME, name, 0, 0, 0)
    return name.value


def set_name(name: bytes) -> None:
    """Have ps and top call this process so, by 15 bytes at most."""
    _libc.prctl(_PR_SET_NAME, ctypes.create_string_buffer(name), 0, 0, 0)


def find_reader() -> Any:
    """Return the frame that looks something up in os.environ, to be called two calls below that."""
    frame = sys._getframe(3)
    while frame.f_back is not None and frame.f_globals.get("__name__") in (
        "os",
        "collections.abc",
        "_collections_abc",
    ):
        frame = frame.f_back
    return frame


class ReadVariables:
    """Which variables are looked up in Python while modules are imported, and in which lines."""

    def __init__(self) -> None:
        self._reads: dict[tuple[Any, int], set[str]] = {}

    def note(self, name: str) -> None:
        """Note that a variable is looked up, by a call just below that of ``os.environ.encodekey``."""
        frame = find_reader()
        if frame.f_globals.get("__name__", "").partition(".")[0] not in sys.stdlib_module_names:
            # By the line: where an instruction is depends on how often it was run before.
            self._reads.setdefault((frame.f_code, frame.f_lineno), set()).add(name)

    def list_by_name(self, there: frozenset[str]) -> frozenset[str]:
        """Return those that were looked up by name; a loop over all that were there has copied them, for a program to be started.

        Args:
            there: The variables that were set.
        """
        read = (names - there if names >= there else names for names in self._reads.values())
        return frozenset().union(*read)


def is_mended(module: str) -> bool:
    """Whether we know how to give each rank what a module has asked for at its import: Lightning's rank_zero_only."""
    return hasattr(getattr(sys.modules.get(module), "rank_zero_only", None), "rank")


def mend(module: str, name: str) -> None:
    """Give this rank what the module would have found itself in the variable ``name``."""
    found: Any = sys.modules[module]
    found.rank_zero_only.rank = int(os.environ.get(name, "0"))
