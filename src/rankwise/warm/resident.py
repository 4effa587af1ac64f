"""A warm server that outlives its job: each run gets a supervisor and a warm server of its own, both forked from here.

The launcher asks on a Unix socket, in a folder that only its user can enter, and is checked by the kernel's word for who it
is. What comes with the request is data: environment, folder, limits, which the fork takes on before anything else. Then the
supervisor serves the launcher as one that it had forked itself, so the ranks hang on the launcher's life, and not on ours.

It stands alone, as ``server.py`` does, and is loaded by path; the supervisor's code is taken from where the launcher has it.
"""

from __future__ import annotations

import contextlib
import glob
import importlib
import json
import math
import os
import select
import signal
import socket
import struct
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Between two looks at what ends a server that has nothing to do.
_LOOK_S = 20.0
#: Who connects and says nothing is sent away.
_SILENT_S = 5.0
#: The orphans of a supervisor that was killed come one after the other, as the kernel ends its ranks.
_SWEEP_S, _SWEEP_EVERY_S = 2.0, 0.05
#: So much of the memory stays free, or an idle server ends.
_FREE_PART = 0.05
_LONGEST_DATAGRAM = 60_000
#: A run may have more of these imported before its ranks are forked; all else is the script's own business.
_IMPORTABLE = ("torch.", "rankwise.")


class Resident:
    """The part of a warm server that makes it serve many runs.

    Args:
        server: What is forked.
        orders: ``folder`` and ``key``: where it is found, under which name; ``home``: the folder that rankwise is in;
            ``idle_s``: it ends after so long without a run.
        load: Gives another module of this folder.
    """

    def __init__(self, server: Any, orders: dict[str, Any], load: Callable[[str], Any]) -> None:
        self._server, self._orders, self._load = server, orders, load
        self._cold: type[Exception] = server.cold_error
        self._command_line: Any = None
        self._supervisor: Any = None
        self._loaded: Any = load("loaded_modules").Loaded(load("checks").list_importable)
        self._runs: set[int] = set()
        self._left_alone: set[int] = set()
        self._sweep_until_s = 0.0
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._served, self._is_gathered = 0, False
        self._path = ""

    def prepare(self) -> None:
        """Find out whether ranks of any command can be forked from here, and load the supervisor."""
        import resource  # noqa: F401 - before the loaded modules are noted: a script may have one of that name

        if not self._server.become_rank.adopt_orphans():
            raise self._cold("this system does not let us adopt forked ranks")
        self._command_line = self._load("command_line").CommandLine()
        if not self._command_line.can_change:
            raise self._cold("this Python does not show where it keeps its command line")
        self._supervisor = self._import_supervisor()

    def _import_supervisor(self) -> Any:
        """Load the launcher's supervisor, and forget that it was loaded: a script must find no module that it did not import."""
        home = self._orders["home"]
        sys.path.insert(0, home)
        try:
            supervisor = importlib.import_module("rankwise.launcher.supervisor")
        except ImportError as error:
            raise self._cold(f"the ranks' Python can't load the supervisor: {error}") from None
        finally:
            sys.path.remove(home)
        for name in [name for name in sys.modules if name.partition(".")[0] == "rankwise"]:
            self._loaded.note_module(sys.modules.pop(name))
        return supervisor

    def outlive(self) -> None:
        """Live on without the launcher: until now the kernel would have ended this process with it (`_die_with` there)."""
        import fcntl  # torch has it loaded

        fd = self._server.take_socket().fileno()
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_ASYNC)

    # ----------------------------------------------------------------- serve

    def serve(self) -> None:
        """Serve runs until there is a reason to end; returns in the warm server of a run."""
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _wake)
        # Unlike a run's own server, whose command line is that of its ranks.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._note_loaded()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nowhere, number)
        os.close(nowhere)
        os.chdir("/")
        first = self._server.take_socket()
        try:
            listener = self._listen()
        except OSError as error:  # a disk that is full, a folder that is gone
            _say(first, {"refused": f"{self._orders['folder']}: {error.strerror}"})
            os._exit(0)
        waiting = {first.fileno(): (first, time.monotonic() + _SILENT_S)}
        idle_since, login = time.monotonic(), _find_login()
        while True:
            ready = self._wait(listener, *waiting)
            now = time.monotonic()
            has_ended = self._reap(now)
            if listener.fileno() in ready:
                self._accept(listener, waiting, now + _SILENT_S)
            done = [fd for fd, (_, until_s) in waiting.items() if fd in ready or now >= until_s]
            for fd in done:
                sock, _ = waiting.pop(fd)
                others = (listener, *(other for other, _ in waiting.values()))
                if fd in ready and self._answer(sock, others):
                    return
                sock.close()
            if has_ended or done:
                idle_since = now
            # Who is connected, as a launcher on a busy host may be for a while, is still to say what it wants.
            if not self._runs and not waiting:
                if self._find_end(now - idle_since, login):
                    self._leave()
                self._gather(listener)

    def _wait(self, listener: socket.socket, *fds: int) -> set[int]:
        """Return the descriptors on which something has happened; none after a while."""
        poll = select.poll()
        for fd in (listener.fileno(), self._woken.fileno(), *fds):
            poll.register(fd, select.POLLIN)
        wait_s = min(_SILENT_S if fds else _LOOK_S, self._orders["idle_s"])
        if time.monotonic() < self._sweep_until_s:
            wait_s = _SWEEP_EVERY_S
        ready = {fd for fd, _ in poll.poll(math.ceil(wait_s * 1000))}
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass
        return ready

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Through a descriptor: a path of a socket has 107 bytes at most.
        folder = os.open(self._orders["folder"], os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        name = f"{self._orders['key']}-{os.getpid()}.sock"
        listener.bind(f"/proc/self/fd/{folder}/{name}")
        os.close(folder)
        listener.listen(64)
        self._path = os.path.join(self._orders["folder"], name)
        return listener

    def _accept(self, listener: socket.socket, waiting: dict[int, Any], until_s: float) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return  # it is gone again
        peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if struct.unpack("3i", peer)[1] == os.geteuid():
            waiting[sock.fileno()] = (sock, until_s)
        else:
            sock.close()

    def _answer(self, sock: socket.socket, others: tuple[socket.socket, ...]) -> bool:
        """Do what somebody asks for; True in the warm server of a run."""
        fds: list[int] = []
        try:
            data, fds, _, _ = socket.recv_fds(sock, _LONGEST_DATAGRAM, 8)
            request: dict[str, Any] = json.loads(data) if data else {}
            if "run" in request:
                with os.fdopen(fds.pop(), "rb") as file:
                    file.seek(0)
                    request = json.loads(file.read())
                return self._run(request, fds, sock, others)
            if "info" in request:
                _say(sock, self._describe())
            elif "stop" in request:
                _say(sock, {"stopped": os.getpid()})
                self._leave()
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            pass  # who asks like this is none of ours, or is gone
        finally:
            for fd in fds:
                os.close(fd)
        return False

    def _run(
        self, request: dict[str, Any], fds: list[int], sock: socket.socket, others: tuple[socket.socket, ...]
    ) -> bool:
        missing = [name for name in request["modules"] if name.startswith(_IMPORTABLE) and name not in sys.modules]
        if missing:
            self._server.extend(missing)
            self._note_loaded()
            self._is_gathered = False
        if reason := self._server.imports.find_obstacle():
            _say(sock, {"refused": reason})
            self._leave()
        if reason := self._server.imports.find_other_variable(request["env"]) or _find_limit(request):
            _say(sock, {"refused": reason})
            return False
        # A supervisor is deaf to it, from its first moment on.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            pid = self._server.fork()
        except OSError as error:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _say(sock, {"refused": f"fork: {error.strerror}"})
            return False
        if pid:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        else:
            for one in (sock, *others):
                one.close()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._woken.close()
            self._waker.close()
            return self._begin_run(request, fds)
        # Beside its first steps, as it takes as long; nobody has heard of it.
        if changed := self._loaded.find_changed():
            os.kill(pid, signal.SIGKILL)
            _say(sock, {"refused": f"{changed} has changed on disk since it was loaded"})
            self._leave()
        self._runs.add(pid)
        self._served += 1
        with contextlib.suppress(OSError):  # somebody has removed it
            os.utime(self._path)
        _say(sock, {"supervisor": pid})
        return False

    def _gather(self, listener: socket.socket) -> None:
        """Make the next runs' forks cheap, once a run has shown that there are any; a launcher that asks comes first."""
        if self._served and not self._is_gathered:
            gather = self._load("huge_pages").gather
            self._is_gathered = gather(os.getpid(), stop=lambda: bool(select.select([listener], [], [], 0)[0]))

    def _leave(self) -> None:
        if self._path:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        os._exit(0)

    # -------------------------------------------------------------- in a run

    def _begin_run(self, request: dict[str, Any], fds: list[int]) -> bool:
        """Become the supervisor of a run, and fork its warm server; returns in that, and never in the supervisor."""
        try:
            supervisors, folder, *streams = fds
            fds.clear()  # they are ours from here on
            os.setsid()
            os.fchdir(folder)
            os.close(folder)
            for number, fd in enumerate(streams):
                os.dup2(fd, number)
                os.close(fd)
            _take_on(request, self._server.imports.list_set())
            self._server.become_rank.adopt_orphans()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = self._server.fork()
            if not pid:
                os.close(supervisors)
                ours.close()
                self._command_line.change(request["program"], request["args"])
                self._server.serve_run(theirs, request)
                return True
            theirs.close()
            self._server.become_rank.show(os.environb, [*request["shown"], request["program"], *request["args"]])
            link = socket.socket(fileno=supervisors)
            self._supervisor.keep(link, (pid, ours), frozenset(request["ignored"]))
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)

    # ------------------------------------------------------------------- end

    def _reap(self, now_s: float) -> bool:
        """Take in who has ended, and end what a supervisor that was killed has left to us; tell whether a run is over."""
        has_ended = False
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = found
                self._left_alone.discard(pid)
                if pid not in self._runs:
                    continue
                self._runs.remove(pid)
                has_ended = True
                if status == 0:
                    # By itself a supervisor ends all that was its run's; what it has left alone the script left running
                    # on purpose.
                    self._left_alone.update(_list_children())
                else:
                    self._sweep_until_s = now_s + _SWEEP_S
        if now_s < self._sweep_until_s:
            for orphan in {*_list_children()} - self._left_alone - self._runs:
                _kill_tree(orphan)
        return has_ended

    def _find_end(self, idle_s: float, login: str) -> str:
        """Tell why a server that has nothing to do should end; empty while it should not."""
        if idle_s > self._orders["idle_s"]:
            return "it was not used"
        if login and not os.path.exists(login):
            return "its user has logged out"
        if not os.path.exists(self._path):
            return "its socket was removed"
        if self._find_elder():
            return "two launchers started a server at the same time"
        return _find_shortage() or self._loaded.find_changed()

    def _find_elder(self) -> bool:
        """Tell whether there is another server for all of our runs, which has the lower number: one of the two is enough."""
        start = os.path.join(self._orders["folder"], f"{self._orders['key']}-")
        pids = [path[len(start) : -len(".sock")] for path in glob.glob(f"{glob.escape(start)}*.sock")]
        return any(pid.isdigit() and int(pid) < os.getpid() and _can_give_what_we_can(int(pid)) for pid in pids)

    def _note_loaded(self) -> None:
        self._loaded.note_all([*sys.modules.values(), *self._server.list_own_modules()])

    def _describe(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(), "begun": self._loaded.begin_s, "served": self._served, "running": len(self._runs), "python": sys.executable,
            "torch": str(getattr(sys.modules.get("torch"), "__version__", "")), "asked": self._orders["asked"], "memory_bytes": _measure_memory(),
            "key": self._orders["key"],
        }  # fmt: skip


def _take_on(request: dict[str, Any], set_by_imports: dict[str, str]) -> None:
    """Be as the launcher is: what a fork can be given."""
    env = {**set_by_imports, **request["env"]}
    import resource

    os.umask(request["umask"])
    for name, limits in request["limits"].items():
        resource.setrlimit(getattr(resource, name), limits)
    if (step := request["nice"] - os.getpriority(os.PRIO_PROCESS, 0)) > 0:
        os.nice(step)
    for name in list(os.environ):
        if name not in env:
            del os.environ[name]
    os.environ.update(env)


def _find_limit(request: dict[str, Any]) -> str:
    """Tell which limit can't be given to a fork of ours; empty if all can."""
    import resource

    if request["nice"] < os.getpriority(os.PRIO_PROCESS, 0):
        return "the resident server has a higher nice value than this run"
    for name, (_, hard) in request["limits"].items():
        if _is_lower(resource.getrlimit(getattr(resource, name))[1], hard):
            return f"the resident server has a lower {name}"
    return ""


def _can_give_what_we_can(pid: int) -> bool:
    """Tell whether another server lives that may give its forks the limits and the niceness that we may."""
    import resource

    numbers = [number for name, number in vars(resource).items() if name.startswith("RLIMIT_")]
    try:
        return os.getpriority(os.PRIO_PROCESS, pid) <= os.getpriority(os.PRIO_PROCESS, 0) and not any(
            _is_lower(resource.prlimit(pid, number)[1], resource.getrlimit(number)[1]) for number in numbers
        )
    except OSError:
        return False  # it is gone


def _is_lower(limit: int, other: int) -> bool:
    import resource

    return limit != resource.RLIM_INFINITY and (other == resource.RLIM_INFINITY or limit < other)


def _wake(_number: int, _frame: object) -> None:
    """Let the wake-up descriptor tell that a child has ended."""


def _say(sock: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # it is gone
        sock.send(json.dumps(message).encode())


def _find_login() -> str:
    """Return the file that systemd keeps while the session of our user lasts; empty where there is none."""
    path = f"/run/systemd/sessions/{os.environ.get('XDG_SESSION_ID', '')}"
    return path if os.path.isfile(path) else ""


def _find_shortage() -> str:
    """Tell that the host, or the cgroup, is short of memory."""
    facts = dict(_read_pairs("/proc/meminfo"))
    total, free = facts.get("MemTotal:", 0), facts.get("MemAvailable:", 1)
    if total and free < total * _FREE_PART:
        return "the host is short of memory"
    try:
        with open("/proc/self/cgroup") as file:
            folder = next((line[3:].strip() for line in file if line.startswith("0::")), "")
        with open(f"/sys/fs/cgroup{folder}/memory.max") as file:
            most = file.read().strip()
        with open(f"/sys/fs/cgroup{folder}/memory.current") as file:
            used = int(file.read())
    except (OSError, ValueError):
        return ""
    return "its cgroup is short of memory" if most.isdigit() and used > int(most) * (1 - _FREE_PART) else ""


def _read_pairs(path: str) -> Iterator[tuple[str, int]]:
    try:
        with open(path) as file:
            for line in file:
                words = line.split()
                if len(words) > 1 and words[1].isdigit():
                    yield words[0], int(words[1])
    except OSError:
        return


def _measure_memory() -> int:
    """Return our part of the memory, in bytes: what is shared with ranks counts by halves, thirds, and so on."""
    return dict(_read_pairs("/proc/self/smaps_rollup")).get("Pss:", 0) * 1024


def _list_children(root: int | None = None) -> list[int]:
    root, found = root or os.getpid(), []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:
            continue
        if parent == root:
            found.append(int(name))
    return found


def _kill_tree(pid: int) -> None:
    """Kill an orphan and what is below it, and have nothing escape meanwhile: what we kill is stopped first."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGSTOP)
    for child in _list_children(pid):
        _kill_tree(child)
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
