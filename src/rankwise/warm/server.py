"""The warm server: a rank's own command, stopped before its first line; it imports torch once and forks the ranks.

It runs in the `site` phase of a Python that was started as the rank's very command, so what is forked here and
let go is an ordinary interpreter about to run the script. It stands alone, as ``hook/sitecustomize.py`` does:
the ranks' Python may have no rankwise. It never computes, never touches a device, and has one thread: else a
forked child would inherit a library that believes in threads, or a driver, that it hasn't got.

Orders and answers are JSON datagrams on a socket whose other end is the keeper's:
what to fork, with descriptors, and ``{"hello" | "ready" | "cold" | "warning" | "forked" | "refused": …}``.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import select
import signal
import socket
import struct
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_GET_NAME = 1, 15, 16
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
# Ignored by the server: its command line is the ranks' own, so a `pkill -f train.py` means them.
_DEAF_TO = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel", "/dev/davinci", "/dev/neuron")
#: What in a sitecustomize would be another thing in the server than in a rank: Debian's and Ubuntu's has none of it.
_PER_PROCESS = re.compile(
    r"environ|getenv|getpid|getppid|print\(|open\(|write\(|logging|Thread|socket|time\."
)
#: Packages whose libraries read variables when they are imported.
_READ_AT_IMPORT = ("torch", "numpy")
#: What each rank has its own of; there is none in the server.
_RANKS_OWN = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR",
                        "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"})  # fmt: skip
#: torch's own default seed, where it is a constant: a fresh interpreter has it, and so must a rank.
_CONSTANT_SEED = 67280421310721
_OWN_REFERENCES = 2
# jemalloc (in pyarrow, so in pandas and datasets) is made for this: a forked child cleans up in the foreground.
_FORK_SAFE = frozenset({"jemalloc_bg_thd"})
_REHEARSAL_S = 10.0
_ADOPTION_S = 60.0
#: Ranks forked by one process between; each order comes with five descriptors.
_MOST_AT_ONCE = 8
#: So long without an order, and the rest is imported, for restarts.
_IDLE_S = 1.0

_libc: Any = ctypes.CDLL(None, use_errno=True) if sys.platform.startswith("linux") else None


class Cold(Exception):  # noqa: N818 - a decision, not an error
    """Ranks must not be forked from here; the text says why."""


def serve(orders: str, *, known: frozenset[str], hook_folder: str) -> None:
    """Import, check, and fork ranks when told to; returns only in a rank.

    Args:
        orders: JSON: ``fd`` of the socket; names to import: ``torch`` (must succeed), ``asked`` (by the user) and
            ``later``, and the ``wanted`` parts of what was asked for; ``first_path``, the folder that the script will have in front of its sys.path, or null;
            ``latched``, prefixes of variables that libraries read when they are imported.
        known: Modules that had been loaded before any of ours.
        hook_folder: Where the hook is, for a rank that starts again by itself.
    """
    server = _Server(json.loads(orders), known, hook_folder)
    try:
        server.prepare()
    except Cold as reason:
        server.say({"cold": str(reason)})
        os._exit(0)
    server.serve()


def check_site(orders: str) -> None:
    """Refuse to serve, before it runs, where a sitecustomize of the environment's own acts for each process.

    Args:
        orders: As for ``serve``.
    """
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec("sitecustomize")
    try:
        with open(spec.origin or "", encoding="utf-8", errors="replace") as file:  # type: ignore[union-attr]
            text = file.read()
    except (OSError, AttributeError):
        return
    if found := _PER_PROCESS.search(text):
        sock = socket.socket(fileno=json.loads(orders)["fd"])
        reason = f"{spec.origin} acts for each process: {found[0]}" if spec else ""
        sock.send(json.dumps({"cold": reason}).encode("utf-8", "backslashreplace"))
        os._exit(0)


class _Server:
    def __init__(self, orders: dict[str, Any], known: frozenset[str], hook_folder: str) -> None:
        self._sock = socket.socket(fileno=orders["fd"])
        os.set_inheritable(orders["fd"], False)
        self._orders, self._known, self._hook_folder = orders, known, hook_folder
        self._later: list[str] = list(orders["later"])
        self._name = _get_name()
        self._thread_owners: list[str] = []
        self._sources: dict[str, int] = {}
        self._rank_readers: dict[str, str] = {}
        self._watch = _ImportWatch()
        self.say({"hello": os.getpid()})
        signals = [getattr(signal, name) for name in _DEAF_TO]
        self._handlers = {number: signal.signal(number, signal.SIG_IGN) for number in signals}

    def say(self, answer: dict[str, Any]) -> None:
        try:
            self._sock.send(json.dumps(answer).encode("utf-8", "backslashreplace"))
        except OSError:
            os._exit(0)  # the keeper is gone

    # ---------------------------------------------------------------- before

    def prepare(self) -> None:
        """Import what the ranks will need, and check that a fork of this process is as good as a new one.

        Raises:
            Cold: It is not.
        """
        start, was_enabled = time.monotonic(), gc.isenabled()
        # Nearly all that an import makes stays: looking for garbage takes a tenth of its time, and finds little.
        gc.disable()
        if watcher := _find_watcher():
            raise Cold(watcher)
        before = frozenset(sys.modules)
        for name in self._orders["torch"]:
            self._import(name, must=name == "torch")
        self._import_asked()
        for module, name in self._rank_readers.items():
            if not _is_mended(module):
                raise Cold(f"{module} asks for {name} when it is imported, and a preload has none")
        if shadowed := self._find_shadowed(frozenset(sys.modules) - self._known):
            raise Cold(shadowed)
        _set_name(b"rankwise-warm")
        self._watch.install()
        _freeze()
        if was_enabled:
            gc.enable()
        self._rehearse()
        if reason := self._find_obstacle():
            raise Cold(reason)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # what dies here is reaped by the kernel
        num_modules = len(frozenset(sys.modules) - before)
        self.say({"ready": os.getpid(), "num_modules": num_modules, "seconds": time.monotonic() - start})

    def _import(self, name: str, *, part: str = "", must: bool = False, asked: bool = False) -> None:
        threads = _count_threads()
        try:
            # As the statement does it: a part may be a module, or be loaded when it is asked for.
            module = __import__(name, fromlist=[part] if part else [])
            if part and part != "*":
                getattr(module, part, None)
        except BaseException as error:  # a module may even call sys.exit
            reason = f"import {name}: {_first_line(error)}"
            if must:
                raise Cold(reason) from None
            if asked:
                self.say({"warning": f"--preload {name}: {_first_line(error)}"})
        if _count_threads() > threads:
            self._thread_owners.append(name)

    def _import_asked(self) -> None:
        """Import what the user named, as the script itself would find it."""
        first = self._orders["first_path"]
        before = frozenset(sys.modules)
        if first is not None:
            sys.path.insert(0, first)
        environ: Any = os.environ
        encodekey, readers = environ.encodekey, self._rank_readers

        def note(name: str) -> bytes:
            if name in _RANKS_OWN:
                readers.setdefault(_find_caller(), name)
            key: bytes = encodekey(name)
            return key

        environ.encodekey = note
        try:
            for name in self._orders["asked"]:
                self._import(name, asked=True)
            for module, name in self._orders["wanted"]:
                self._import(module, part=name)
        finally:
            environ.encodekey = encodekey
            if first is not None and first in sys.path:
                sys.path.remove(first)
        if first is None or not self._orders["asked"]:
            return
        # The user's own code may be edited between two attempts; what is installed is not.
        for name in frozenset(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None) or ""
            if file.startswith(os.path.join(first, "")) and "site-packages" not in file:
                self._sources[file] = os.stat(file).st_mtime_ns

    def _find_shadowed(self, loaded: frozenset[str]) -> str:
        """Tell which module of ours the script's folder has under the same name: the script would get that one."""
        first = self._orders["first_path"]
        if first is None:
            return ""
        from_there = {os.path.realpath(file) for file in self._sources}
        tops = {name.partition(".")[0] for name in loaded}
        for name, path in sorted(_list_importable(first)):
            if name in tops and os.path.realpath(path) not in from_there:
                return f"{path} has the name of a module that is loaded already"
        return ""

    def _rehearse(self) -> None:
        """Fork once for nothing: OpenBLAS ends its threads for it, and the child tells whether it can be a rank."""
        read_end, write_end = os.pipe()
        middle = _fork()
        if not middle:
            if not _fork():
                try:
                    os.write(write_end, (_find_bad_fork() or "ok").encode())
                finally:
                    os._exit(0)
            os._exit(0)
        os.close(write_end)
        os.waitpid(middle, 0)
        ready = select.select([read_end], [], [], _REHEARSAL_S)[0]
        told = os.read(read_end, 4096).decode() if ready else ""
        os.close(read_end)
        if told != "ok":
            raise Cold(
                told or f"a forked child of the warm server did not get on within {_REHEARSAL_S:.0f} s"
            )

    def _find_obstacle(self) -> str:
        """Tell why no rank can be forked off this process now; empty if one can."""
        threads = _list_threads()
        if threads is None:
            return "the threads of a process can't be counted: /proc does not show them"
        if lost := sorted(set(threads[1:]) - _FORK_SAFE):
            owners = ", ".join(self._thread_owners) or "an import"
            return f"{owners} started threads ({', '.join(lost)}), and a fork would lose them"
        for fd, target in _list_descriptors():
            if target.startswith(_DEVICES):
                return f"an import opened {target} (descriptor {fd}), and a fork can't share a device"
        for file, time_ns in self._sources.items():
            try:
                if os.stat(file).st_mtime_ns != time_ns:
                    return f"{file} was edited after it was preloaded"
            except OSError:
                return f"{file} is gone since it was preloaded"
        return ""

    # ----------------------------------------------------------------- serve

    def serve(self) -> None:
        """Take orders until the keeper is gone; returns in a rank."""
        forked = False
        while True:
            wait_s = _IDLE_S if forked and self._later else None
            if not select.select([self._sock], [], [], wait_s)[0]:
                self._import_rest()
                continue
            batch = self._receive()
            if not batch:
                os._exit(0)  # the keeper has no more use for us, or is gone
            forked = True
            if self._fork_all(batch):
                return
            for _, fds in batch:
                _close(fds)

    def _receive(self) -> list[tuple[dict[str, Any], list[int]]]:
        """Return the orders that are there, some at most; none when the keeper's end is closed."""
        batch: list[tuple[dict[str, Any], list[int]]] = []
        while len(batch) < _MOST_AT_ONCE and (not batch or select.select([self._sock], [], [], 0)[0]):
            try:
                data, fds, _, _ = socket.recv_fds(self._sock, 1 << 20, 16)
            except OSError:
                break
            if not data:
                break
            batch.append((json.loads(data), fds))
        return batch

    def _import_rest(self) -> None:
        """Import what a later attempt will need: this attempt's ranks have had to do it by themselves."""
        names, self._later = self._later, []
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for name in names:
            self._import(name)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        _freeze()
        with_threads = _fork()  # as in the rehearsal: OpenBLAS ends its threads for a fork
        if not with_threads:
            os._exit(0)
        try:
            os.waitpid(with_threads, 0)
        except ChildProcessError:
            return

    def _fork_all(self, batch: list[tuple[dict[str, Any], list[int]]]) -> bool:
        """Fork ranks that are not our children, by a process between: the keeper adopts them, and they outlive us.

        Returns:
            True in a rank; False in the server.
        """
        me, reason = os.getpid(), self._find_obstacle()
        # Nothing is lost between the fork and the handlers that a rank has.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._handlers)
        middle = -1
        try:
            middle = -1 if reason else _fork()
        except OSError as error:
            reason = f"fork: {error.strerror}"
        for order, _ in batch if reason else ():
            self.say({"refused": order["tag"], "reason": reason})
        if middle:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            return False
        middle = os.getpid()
        for order, fds in batch:
            try:
                pid = os.fork()
            except OSError as error:
                self.say({"refused": order["tag"], "reason": f"fork: {error.strerror}"})
                continue
            if not pid:
                for _, others in batch:
                    _close([] if others is fds else others)
                self._become(order, fds, mask=mask, strangers=(me, middle))
                return True
            # Told before our end, which is what lets the rank go on: the keeper knows its pid before it can die.
            self.say({"forked": order["tag"], "pid": pid})
        os._exit(0)

    # ------------------------------------------------------------ in a rank

    def _become(
        self, order: dict[str, Any], fds: list[int], *, mask: set[Any], strangers: tuple[int, int]
    ) -> None:
        """Make this forked process what a started one would be."""
        os.setsid()
        self._sock.close()
        _place(fds, order["fds"])
        _renew_streams()
        _set_name(self._name)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, handler in self._handlers.items():
            # None: not Python's, but some library's; what that was nobody can tell.
            signal.signal(number, signal.SIG_IGN if order["deaf"] else handler or signal.SIG_DFL)
        start = {**os.environ}
        for name, value in order["env"].items():
            if value is None:
                os.environ.pop(name, None)
                start.pop(name, None)
            else:
                os.environ[name] = start[name] = value
        _wait_adoption(order["keeper"], strangers)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _renew_identity()
        for module in self._rank_readers:
            _mend(module)
        if order["runs"] != "script":
            _run_main(order["runs"], order["args"])
        start["PYTHONPATH"] = os.pathsep.join(
            [self._hook_folder, *([os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else [])]
        )
        if os.environ.get("PYTHONPATH") == "":
            start["RANKWISE_EMPTY_PYTHONPATH"] = "1"
        _show_environment(os.environb)
        inherited = [number for number in order["fds"] if number > 2]
        ignored = {int(number) for number, handler in self._handlers.items() if handler is signal.SIG_IGN}
        latched = tuple(self._orders["latched"])
        self._watch.begin(_LateEnvironment(latched, start, inherited, ignored, mask))


class _LateEnvironment:
    """Starts a rank again, cold, if it has changed a variable that torch would read when the script imports torch.

    A script may say ``os.environ["OMP_NUM_THREADS"] = "4"`` before it imports torch; here torch is there before
    it. So at its first import of torch, which finds torch loaded, the environment is compared with that of the
    start. Where it differs, the same process becomes the plain command, and the script runs from its first line.
    """

    def __init__(
        self,
        latched: tuple[str, ...],
        start: dict[str, str],
        fds: list[int],
        ignored: set[int],
        mask: set[Any],
    ) -> None:
        self._latched, self._start, self._fds, self._ignored, self._mask = latched, start, fds, ignored, mask
        self._pid, self._folder, self._umask = os.getpid(), _get_folder(), os.umask(0o77)
        os.umask(self._umask)

    def compare(self) -> None:
        """Go on if nothing has changed; else this call does not return."""
        if os.getpid() != self._pid:
            return  # a forked child is no rank
        ours = {name: value for name, value in self._start.items() if name.startswith(self._latched)}
        for environ in (dict(os.environ), _read_c_environ()):
            theirs = {name: value for name, value in environ.items() if name.startswith(self._latched)}
            if theirs != ours:
                changed = {*theirs.items()} ^ {*ours.items()}
                self._start_again(min(name for name, _ in changed))

    def _start_again(self, name: str) -> None:
        if os.environ.get("LOCAL_RANK") == "0":
            text = f"rankwise: cold start: the script sets {name} before it imports torch\n"
            os.write(2, text.encode("utf-8", "surrogateescape"))
        for fd in self._fds:
            os.set_inheritable(fd, True)
        # What an exec does not reset by itself.
        for number in signal.valid_signals() - self._ignored:
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        os.umask(self._umask)
        if self._folder:
            os.chdir(self._folder)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        os.execve(sys.executable, sys.orig_argv, self._start)


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


class _ImportWatch:
    """Notices that the script imports torch or numpy, which are loaded: the statement asks their spec if they are ready."""

    def __init__(self) -> None:
        self._seen: set[str] = set(_READ_AT_IMPORT)
        self._late: _LateEnvironment | None = None

    def install(self) -> None:
        """Have all modules of theirs ask us; once for all ranks, before the fork."""
        plain: Any = type(json.__spec__)

        def is_initializing(spec: Any) -> bool:
            top = spec.name.partition(".")[0]
            if self._late is not None and top not in self._seen:
                self._seen.add(top)
                self._late.compare()
            value: bool = vars(spec).get("_initializing", False)
            return value

        def set_initializing(spec: Any, value: bool) -> None:  # noqa: FBT001 - a setter's form
            vars(spec)["_initializing"] = value

        names = {"_initializing": property(is_initializing, set_initializing), "__module__": plain.__module__}
        watched = type(plain.__name__, (plain,), names)
        for name, module in list(sys.modules.items()):
            spec = getattr(module, "__spec__", None)
            if name.partition(".")[0] in _READ_AT_IMPORT and type(spec) is plain:
                spec.__class__ = watched

    def begin(self, late: _LateEnvironment) -> None:
        """In a rank: from now on imports are the script's."""
        self._seen.clear()
        self._late = late


def _get_folder() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""  # it is gone


def _find_watcher() -> str:
    """Tell what traces this process since its start: it would see the server, and only one of the ranks."""
    monitoring = getattr(sys, "monitoring", None)
    tools = [monitoring.get_tool(number) for number in range(6)] if monitoring else []
    if tool := next((tool for tool in tools if tool), None):
        return f"{tool} watches every Python from its start"
    for name in ("ddtrace", "debugpy", "pydevd"):
        if name in sys.modules:
            return f"{name} is loaded into every Python at its start"
    if sys.gettrace() is not None or sys.getprofile() is not None:
        return "a tracer watches every Python from its start"
    return ""


def _list_importable(folder: str) -> Iterator[tuple[str, str]]:
    """Give name and path of each module or package that lies directly in a folder."""
    import importlib.machinery

    suffixes = tuple(importlib.machinery.all_suffixes())
    try:
        entries = sorted(os.listdir(folder or "."))
    except OSError:
        return
    for entry in entries:
        path = os.path.join(folder, entry)
        if entry.endswith(suffixes):
            suffix = max((suffix for suffix in suffixes if entry.endswith(suffix)), key=len)
            yield entry[: -len(suffix)], path
        elif "." not in entry:
            for suffix in suffixes:
                if os.path.isfile(os.path.join(path, f"__init__{suffix}")):
                    yield entry, os.path.join(path, f"__init__{suffix}")
                    break


def _freeze() -> None:
    """Keep the collector off what is shared with the ranks: a collection would write to it, and so copy it.

    ``__main__`` gets a new one in its place, before anything of the script is in it: what a frozen object holds is
    never collected, so cycles of the script's own objects would not be taken apart at exit, and their ``__del__``
    not run.
    """
    old = sys.modules["__main__"]
    # Modules have imported it (dill, for one), it may have a second name, and garbage has copies of the table of
    # modules (58, from inspect, after an import of torch._dynamo). Frozen objects can't be asked.
    holders: list[Any] = [holder for holder in gc.get_referrers(old) if type(holder) is dict]
    gc.freeze()
    new = type(old)("__main__")
    vars(new).clear()
    vars(new).update(vars(old))
    if "__annotations__" in vars(old):
        vars(new)["__annotations__"] = {}
    for names in holders:
        for name, value in list(names.items()):
            if value is old:
                names[name] = new
    # Known by now to us here and to getrefcount itself.
    if sys.getrefcount(old) > _OWN_REFERENCES:
        import atexit

        atexit.register(gc.unfreeze)  # takes 0.2 s at exit, and more with more modules


def _fork() -> int:
    """Fork; Python 3.12 would warn of threads, and those that are left here are known to bear it."""
    if _count_threads() == 1:
        return os.fork()
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _list_threads() -> list[str] | None:
    """Return the names of this process's threads, the main one first; None if the system hides them."""
    try:
        tasks = sorted(os.listdir("/proc/self/task"), key=int)
    except OSError:
        return None
    names = []
    for task in tasks:
        try:
            with open(f"/proc/self/task/{task}/comm") as file:
                names.append(file.read().strip())
        except OSError:
            continue
    return names or None


def _count_threads() -> int:
    return len(_list_threads() or ())


def _list_descriptors() -> Iterator[tuple[str, str]]:
    for fd in os.listdir("/proc/self/fd"):
        try:
            yield fd, os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue


def _find_bad_fork() -> str:
    """Tell, in a forked child, which device library was set up before the fork; it would refuse to work here."""
    torch = sys.modules.get("torch")
    for name in ("cuda", "xpu", "mtia", "mps"):
        is_bad = getattr(getattr(torch, name, None), "_is_in_bad_fork", None)
        if callable(is_bad) and is_bad():
            return f"an import set up torch.{name}, which a forked process can't use"
    return ""


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _place(fds: list[int], extra: list[int]) -> None:
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


def _renew_streams() -> None:
    """Let the standard streams ask their descriptors anew what they are: a pipe, a file, a terminal.

    In place, as modules may hold them; as CPython makes them (create_stdio in pylifecycle.c).
    """
    import io

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


def _wait_adoption(keeper: int, strangers: tuple[int, int]) -> None:
    """Wait until we are the keeper's child, then die with it. It takes milliseconds, or somebody has stopped them."""
    end = time.monotonic() + _ADOPTION_S
    while os.getppid() in strangers and time.monotonic() < end:
        time.sleep(0.0001)
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != keeper:
        os._exit(1)  # nobody would ever end us


def _find_caller() -> str:
    """Return the module that looks something up in os.environ."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") in ("os", "_collections_abc"):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))


def _is_mended(module: str) -> bool:
    """Whether we know how to give each rank what a module has asked for at its import: Lightning's rank_zero."""
    found = sys.modules.get(module)
    return hasattr(found, "rank_zero_only") and callable(getattr(found, "_get_rank", None))


def _mend(module: str) -> None:
    found: Any = sys.modules[module]
    found.rank_zero_only.rank = found._get_rank() or 0


def _renew_identity() -> None:
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


def _show_environment(environ: Any) -> None:
    """Let /proc/PID/environ and ``ps e`` show this rank's variables, by which people find a rank; else the server's.

    The kernel lets a process say where its environment lies (prctl(2), PR_SET_MM_MAP, Linux 3.18). Where it may
    not, nothing is lost but the view.
    """
    block = b"".join(b"%s=%s\0" % pair for pair in environ.items())
    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return
    # Numbered as in proc(5), from 3 on.
    at = {number: int(fields[number - 3]) for number in (26, 27, 28, 45, 46, 47, 48, 49)}
    _libc.mmap.restype = _libc.sbrk.restype = ctypes.c_void_p
    # Private memory, as only that is shown; never given back.
    memory = _libc.mmap(None, ctypes.c_size_t(len(block)), 3, 0x22, -1, ctypes.c_long(0))
    if memory in (None, ctypes.c_void_p(-1).value):
        return
    ctypes.memmove(memory, block, len(block))
    places = (
        at[26], at[27], at[45], at[46], at[47], _libc.sbrk(0), at[28], at[48], at[49], memory, memory + len(block)
    )  # fmt: skip
    layout = struct.pack("=11QQIi", *places, 0, 0, -1)
    _libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, layout, ctypes.c_ulong(len(layout)), 0)


def _run_main(path: str, args: list[str]) -> None:
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


def _get_name() -> bytes:
    name = ctypes.create_string_buffer(16)
    _libc.prctl(_PR_GET_NAME, name, 0, 0, 0)
    return name.value


def _set_name(name: bytes) -> None:
    _libc.prctl(_PR_SET_NAME, ctypes.create_string_buffer(name), 0, 0, 0)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
