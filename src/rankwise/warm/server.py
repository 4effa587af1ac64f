"""The warm server: a rank's own command, stopped before its first line; it imports torch once and forks the ranks.

It runs in the `site` phase of a Python that was started as the rank's very command, so what is forked here and
let go is an ordinary interpreter about to run the script. It stands alone, as ``hook/sitecustomize.py`` does:
the ranks' Python may have no rankwise. It never computes, never touches a device, and has one thread: else a
forked child would inherit a library that believes in threads, or a driver, that it hasn't got.

Orders and answers are JSON datagrams on a socket whose other end is the supervisor's:
what to fork, with descriptors, and ``{"hello" | "ready" | "cold" | "warning" | "forked" | "refused": …}``.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

# Ignored by the server: its command line is the ranks' own, so a `pkill -f train.py` means them.
_DEAF_TO = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_REHEARSAL_S = 10.0
#: Ranks forked by one process between; each order comes with seven descriptors.
_MOST_AT_ONCE = 8
_LONGEST_ORDER, _MOST_FDS = 1 << 20, 16
#: So long without an order, and the rest is imported, for restarts.
_IDLE_S = 1.0


class Cold(Exception):  # noqa: N818 - a decision, not an error
    """Ranks must not be forked from here; the text says why."""


def serve(
    orders: str,
    *,
    known: frozenset[str],
    hook_folder: str,
    load: Callable[[str], Any],
    load_recording: Callable[[], list[Any]],
) -> None:
    """Import, check, and fork ranks when told to; returns only in a rank.

    Args:
        orders: JSON: ``fd`` of the socket; names to import: ``torch`` (must succeed), ``asked`` (by the user) and
            ``later``, and the ``wanted`` parts of what was asked for; ``first_path``, the folder that the script will
            have in front of its sys.path, or null; ``latched``, prefixes of variables that libraries read when they are
            imported, from C or in other ways that are not seen here; ``resident``, for a server that serves one run
            after the other: see ``resident.py``.
        known: Modules that had been loaded before any of ours.
        hook_folder: Where the hook is, for a rank that starts again by itself.
        load: Gives another module of this folder, loaded as this one was.
        load_recording: Loads what records in a rank, and returns all modules that were loaded so.
    """
    answer = json.loads(orders)
    server = Server(answer, known, hook_folder, load, load_recording)
    resident = None
    try:
        if "resident" in answer:
            try:
                resident = load("resident").Resident(server, answer["resident"], load)
            except OSError as error:  # without /proc nothing can be said about this process
                why = load("checks").find_thread_or_device("") or f"{error.filename}: {error.strerror}"
                raise Cold(why) from None
        if resident is not None:
            resident.prepare()
        server.prepare()
    except Cold as reason:
        server.say({"cold": str(reason)})
        os._exit(0)
    if resident is not None:
        resident.outlive()
    server.say_ready()
    if resident is not None:
        resident.serve()  # returns in the warm server of a run, which is forked from this one
    server.serve()


def check_site(orders: str, *, checks: Any) -> None:
    """Refuse to serve, before it runs, where a sitecustomize of the environment's own acts for each process.

    Args:
        orders: As for ``serve``.
        checks: As for ``serve``.
    """
    if reason := checks.find_site_obstacle():
        sock = socket.socket(fileno=json.loads(orders)["fd"])
        sock.send(json.dumps({"cold": reason}).encode("utf-8", "backslashreplace"))
        os._exit(0)


class Server:
    """What is forked from what is loaded."""

    cold_error = Cold

    def __init__(
        self,
        orders: dict[str, Any],
        known: frozenset[str],
        hook_folder: str,
        load: Callable[[str], Any],
        load_recording: Callable[[], list[Any]],
    ) -> None:
        self.become_rank, self._checks, self._freezing = load("become_rank"), load("checks"), load("freezing")
        self._argv: list[str] | None = None
        self._sock = socket.socket(fileno=orders["fd"])
        os.set_inheritable(orders["fd"], False)
        self._orders, self._hook_folder = orders, hook_folder
        self.imports = load("imports").Imports(orders, known, self.say, Cold, load)
        self._load_recording = load_recording
        self._later: list[str] = list(orders["later"])
        self._name = self.become_rank.get_name()
        self._ready: dict[str, Any] = {}
        self._num_expected = 0
        self._spares = load("spares").Spares(self.fork)
        self._watch = self.become_rank.ImportWatch({name.partition(".")[0] for name in orders["asked"]})
        self.say({"hello": os.getpid()})
        signals = [getattr(signal, name) for name in _DEAF_TO]
        self._handlers = {number: signal.signal(number, signal.SIG_IGN) for number in signals}

    def say(self, answer: dict[str, Any]) -> None:
        try:
            self._sock.send(json.dumps(answer).encode("utf-8", "backslashreplace"))
        except OSError:
            os._exit(0)  # the supervisor is gone

    # ---------------------------------------------------------------- before

    def prepare(self) -> None:
        """Import what the ranks will need, and check that a fork of this process is as good as a new one.

        Raises:
            Cold: It is not.
        """
        start, was_enabled = time.monotonic(), gc.isenabled()
        # Nearly all that an import makes stays: looking for garbage takes a tenth of its time, and finds little.
        gc.disable()
        if watcher := self._checks.find_watcher():
            raise Cold(watcher)
        before = frozenset(sys.modules)
        self.imports.import_torch()
        self._libraries = self._freezing.list_libraries()
        self.imports.import_asked()
        self._load_recording()
        self.imports.check()
        self.become_rank.set_name(b"rankwise-warm")
        self._watch.install()
        self._freezing.freeze(self._libraries)
        if was_enabled:
            gc.enable()
        self._rehearse()
        if reason := self.imports.find_obstacle():
            raise Cold(reason)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # what dies here is reaped by the kernel
        num_modules = len(frozenset(sys.modules) - before)
        self._ready = {"ready": 0, "num_modules": num_modules, "seconds": time.monotonic() - start}

    def say_ready(self) -> None:
        """Tell that ranks can be forked."""
        self.say({**self._ready, "ready": os.getpid()})

    def _rehearse(self) -> None:
        """Fork once for nothing: OpenBLAS ends its threads for it, and the child tells whether it can be a rank."""
        read_end, write_end = os.pipe()
        middle = self.fork()
        if not middle:
            if not self.fork():
                try:
                    os.write(write_end, (self._checks.find_bad_fork() or "ok").encode())
                finally:
                    os._exit(0)
            os._exit(0)
        os.close(write_end)
        os.waitpid(middle, 0)
        ready = select.select([read_end], [], [], _REHEARSAL_S)[0]
        text = os.read(read_end, 4096).decode() if ready else ""
        os.close(read_end)
        if text != "ok":
            raise Cold(text or f"a forked child of the warm server made no progress within {_REHEARSAL_S:.0f} s")

    # ------------------------------------------------- for a resident server

    def take_socket(self) -> socket.socket:
        """Return the socket to whoever has started this process, who asks for the first run."""
        return self._sock

    def list_own_modules(self) -> list[Any]:
        """Return those of our modules that sys.modules does not have."""
        return self._load_recording()

    def extend(self, names: list[str]) -> None:
        """Import more of torch's modules."""
        handler = signal.getsignal(signal.SIGCHLD)
        self._later = names
        self._import_rest()
        signal.signal(signal.SIGCHLD, handler)

    def serve_run(self, sock: socket.socket, request: dict[str, Any]) -> None:
        """Be the warm server of one run from here on, which has just been forked; ``serve`` follows.

        Args:
            sock: To the run's supervisor.
            request: ``first_path``: the folder that the script will have in front of its sys.path; ``ignored``: signals that
                the run's launcher was started with as ignored; ``num_processes``: at least so many will be asked for.
        """
        self._sock, self._argv, self._later = sock, sys.orig_argv, []
        self.imports.first_path, self._num_expected = request["first_path"], request["num_processes"]
        for name in _DEAF_TO:
            plain = signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL
            self._handlers[getattr(signal, name)] = signal.SIG_IGN if name in request["ignored"] else plain
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        self.say({"hello": os.getpid()})
        if shadowed := self.imports.find_shadowed():
            self.say({"cold": shadowed})
            os._exit(0)
        self.say_ready()

    # ----------------------------------------------------------------- serve

    def serve(self) -> None:
        """Take orders until the supervisor is gone; returns in a rank."""
        forked = False
        while True:
            wait_s = 0 if self._num_expected else _IDLE_S if forked and self._later else None
            if not select.select([self._sock], [], [], wait_s)[0]:
                if not self._num_expected:
                    self._import_rest()
                elif self._fork_spares():
                    return
                continue
            self._num_expected = 0
            batch = self._receive()
            if not batch:
                os._exit(0)  # the supervisor has no more use for us, or is gone
            forked = True
            if self._fork_all(batch):
                return
            for _, fds in batch:
                _close(fds)

    def _receive(self) -> list[tuple[dict[str, Any], list[int]]]:
        """Return the orders that are there, some at most; none when the supervisor's end is closed."""
        batch: list[tuple[dict[str, Any], list[int]]] = []
        while len(batch) < _MOST_AT_ONCE and (not batch or select.select([self._sock], [], [], 0)[0]):
            try:
                data, fds, _, _ = socket.recv_fds(self._sock, _LONGEST_ORDER, _MOST_FDS)
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
        was_enabled = gc.isenabled()
        gc.disable()
        self.imports.import_more(names)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        self._watch.install()
        gc.unfreeze()  # else nobody can tell who holds __main__
        self._freezing.freeze(self._libraries)
        if was_enabled:
            gc.enable()
        with_threads = self.fork()  # as in the rehearsal: OpenBLAS ends its threads for a fork
        if not with_threads:
            os._exit(0)
        try:
            os.waitpid(with_threads, 0)
        except ChildProcessError:
            return

    def _fork_spares(self) -> bool:
        """Fork some of the processes that will be asked for; True in a rank, which has its order by then."""
        number = min(self._num_expected, _MOST_AT_ONCE)
        self._num_expected -= number
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._handlers)
        asked = self._spares.fork(number)
        if asked is None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            return False
        order, fds, strangers = asked
        # By itself: the server may be ended as soon as all are there.
        self.say({"forked": order["tag"], "pid": os.getpid()})
        self._become(order, fds, mask=mask, strangers=strangers)
        return True

    def _fork_all(self, batch: list[tuple[dict[str, Any], list[int]]]) -> bool:
        """Fork ranks that are not our children, by a process between: the supervisor adopts them, and they outlive us.

        Returns:
            True in a rank; False in the server.
        """
        me, reason = os.getpid(), self.imports.find_obstacle()
        rest = batch if reason else [one for one in batch if not self._spares.use(*one)]
        if not rest:
            return False
        # Nothing is lost between the fork and the handlers that a rank has.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._handlers)
        middle = -1
        try:
            middle = -1 if reason else self.fork()
        except OSError as error:
            reason = f"fork: {error.strerror}"
        for order, _ in rest if reason else ():
            self.say({"refused": order["tag"], "reason": reason})
        if middle:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            return False
        # A rank that dies while we are still here must be the supervisor's to reap.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        middle = os.getpid()
        for order, fds in rest:
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
            # Told before our end, which is what lets the rank go on: the supervisor knows its pid before it can die.
            self.say({"forked": order["tag"], "pid": pid})
        os._exit(0)

    def fork(self) -> int:
        """Fork; Python 3.12 would warn of threads, and those that are left here are known to bear it."""
        if self._checks.count_threads() == 1:
            return os.fork()
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return os.fork()

    # ------------------------------------------------------------ in a rank

    def _become(self, order: dict[str, Any], fds: list[int], *, mask: set[Any], strangers: tuple[int, int]) -> None:
        """Make this forked process what a started one would be."""
        os.setsid()
        self._sock.close()
        self.become_rank.place(fds, order["fds"])
        self.become_rank.renew_streams()
        self.become_rank.set_name(self._name)
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
        self.become_rank.wait_adoption(order["supervisor"], strangers)
        if "RANKWISE_CALL" in order["env"]:
            mask = {*mask, signal.SIGINT}  # a function's rank lets it in when it can end without a traceback
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.become_rank.renew_identity()
        self.imports.mend()
        if order["runs"] != "script":
            self.become_rank.run_main(order["runs"], order["args"])
        start["PYTHONPATH"] = os.pathsep.join(
            [self._hook_folder, *([os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else [])]
        )
        if os.environ.get("PYTHONPATH") == "":
            start["RANKWISE_EMPTY_PYTHONPATH"] = "1"
        self.become_rank.show(os.environb, self._argv)
        inherited = [number for number in order["fds"] if number > 2]
        ignored = {int(number) for number, handler in self._handlers.items() if handler is signal.SIG_IGN}
        latched, (read, asked) = tuple(self._orders["latched"]), self.imports.list_read()
        late = self.become_rank.LateEnvironment(latched, read, asked, start, inherited, ignored=ignored, mask=mask)
        self._watch.begin(late)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
