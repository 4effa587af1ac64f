"""The host as probes see it: its files, programs, names and environment, all behind one seam.

A test gives a folder in the place of ``/``, an environment, and answers of programs; nothing else of the host is seen.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TypeVar, cast, final

from rankwise.base.clock import SYSTEM_CLOCK, Clock
from rankwise.base.deadline import OverdueError, call_within
from rankwise.base.environ import environ
from rankwise.base.os_calls import KILL_SIGNAL

T = TypeVar("T")

_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """What a program has answered; without an exit code there is none such, or it did not end in time, and ``why`` says which."""

    code: int | None
    out: str = ""
    err: str = ""
    why: str = ""

    @property
    def is_good(self) -> bool:
        """Whether it ended with 0."""
        return self.code == 0

    @property
    def failure(self) -> str:
        """Why it is not good, in a line: mostly the program's last one."""
        return self.why or (self.err.strip().splitlines() or [f"exit code {self.code}"])[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    """The job that is to run here, as far as it is known; what is not known is None or empty.

    Attributes:
        num_ranks: Ranks on this host; ``num_workers``: workers of each rank's data loader.
        num_nodes: Hosts of the job; 1 where nobody says more.
        master_addr: Where the ranks meet; ``is_master``: whether that is this host.
        python: The interpreter of the ranks; ``script``: their program, a file or a folder.
        backend: ``gloo`` or ``nccl``; empty: whichever fits.
        is_launch: Whether a launcher is about to start the ranks here: it sets RANK and its kin anew, whatever they say
            now.
    """

    num_ranks: int | None = None
    num_nodes: int = 1
    num_workers: int | None = None
    master_addr: str = ""
    master_port: int | None = None
    is_master: bool | None = None
    checkpoints: Path | None = None
    python: str = ""
    backend: str = ""
    script: Path | None = None
    is_launch: bool = False


def run_program(argv: Sequence[str], timeout_s: float, *, lifeline: bool = False) -> ProgramResult:
    """Run a program to its end, or to the end of its time, with English words and no input.

    With a ``lifeline`` its input is a pipe that nothing is ever written to, and that ends with us.
    """
    stdin = subprocess.PIPE if lifeline else subprocess.DEVNULL
    try:
        process = subprocess.Popen(
            argv, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**environ(), "LC_ALL": "C"}, start_new_session=True
        )  # fmt: skip
    except OSError as error:
        return ProgramResult(code=None, why=f"{argv[0]} can't be run: {error.strerror}")
    held, process.stdin = process.stdin, None  # `communicate` would end it
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        kill_group(process)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        # `subprocess.run` would wait for ever: one that is stuck in a driver does not listen to SIGKILL either.
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
        return ProgramResult(code=None, why=f"{argv[0]} did not end within {timeout_s:.0f} s")
    finally:
        if held is not None:
            held.close()
    return ProgramResult(code=process.returncode, out=out.decode(errors="replace"), err=err.decode(errors="replace"))


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a session, and what it has started."""
    with suppress(OSError):
        os.killpg(process.pid, KILL_SIGNAL) if hasattr(os, "killpg") else process.kill()


def resolve(name: str) -> tuple[str, ...]:
    """Return the addresses of a name as a rank gets them, in their order; none if it has none, or no name server answers.

    A name server that is gone may take half a minute to be given up: there is a bound.
    """

    def ask() -> tuple[str, ...]:
        info = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return tuple(dict.fromkeys(str(one[4][0]).partition("%")[0] for one in info))

    try:
        return call_within(5.0, ask)
    except (OSError, UnicodeError, OverdueError):
        return ()


@final
class Host:
    """One host: its environment, job, files below ``root``, programs, clock and name.

    Args:
        lookup: Tells the addresses of a name, in their order; none if it has none. Without, the system is asked.
        answers: What some queries (see ``ask``) are to return, which are not made then.
    """

    def __init__(
        self,
        *,
        env: Mapping[str, str] | None = None,
        job: JobShape | None = None,
        root: Path = Path("/"),
        run: Callable[[Sequence[str], float], ProgramResult] = run_program,
        clock: Clock = SYSTEM_CLOCK,
        name: str = "",
        lookup: Callable[[str], tuple[str, ...]] = resolve,
        answers: Mapping[Callable[[Host], object], object] | None = None,
    ) -> None:
        self.env: Mapping[str, str] = environ() if env is None else env
        self.job = job or JobShape()
        self.root, self._run, self.clock = root, run, clock
        self.name = name or socket.gethostname()
        self._lookup = lookup
        self._looked_up: dict[str, tuple[tuple[str, ...], float]] = {}
        self._lookup_lock = Lock()
        self._answers = {**(answers or {})}
        self._locks: dict[Callable[[Host], object], Lock] = {}

    def ask(self, query: Callable[[Host], T]) -> T:
        """Return what a query of this host finds. Each is made once: cold drivers and imports of torch take seconds, and longer if several ask."""
        with self._locks.setdefault(query, Lock()):
            if query not in self._answers:
                self._answers[query] = query(self)
            return cast(T, self._answers[query])

    def path(self, path: str) -> Path:
        """Return where a file of the host is."""
        return self.root / path.lstrip("/")

    def read(self, path: str) -> str:
        """Return a file's text without blanks at its ends; empty if it can't be read."""
        try:
            with self.path(path).open("rb") as file:
                return file.read(_MOST_BYTES).decode(errors="replace").strip()
        except OSError:
            return ""

    def has(self, path: str) -> bool:
        """Return whether there is such a file or folder; one that we may not see is none."""
        try:
            return self.path(path).exists()
        except OSError:
            return False

    @property
    def is_container(self) -> bool:
        """Whether this is a container, as far as it tells."""
        names = {"APPTAINER_CONTAINER", "SINGULARITY_CONTAINER"}
        signs = ("/.singularity.d", "/run/.containerenv", "/.dockerenv")
        return self.is_pod or bool(names & {*self.env}) or any(map(self.has, signs))

    @property
    def is_pod(self) -> bool:
        """Whether this is a container of Kubernetes, as far as it tells."""
        return "KUBERNETES_SERVICE_HOST" in self.env or self.has("/var/run/secrets/kubernetes.io")

    def may_write(self, path: str) -> bool:
        """Return whether we may put files into a folder, by its rights and by how its file system is mounted; nothing is written."""
        # Asking by effective ids is a newer call, which old runtimes of containers refuse to everybody.
        is_other = os.access in os.supports_effective_ids and (os.getuid(), os.getgid()) != (os.geteuid(), os.getegid())
        return os.access(self.path(path), os.W_OK | os.X_OK, effective_ids=is_other)

    def names(self, path: str) -> list[str]:
        """Return what a folder holds, sorted; nothing if it can't be read."""
        try:
            return sorted(one.name for one in self.path(path).iterdir())
        except OSError:
            return []

    def run(self, *argv: str, timeout_s: float = 5.0) -> ProgramResult:
        """Run a program; one that is missing, or late, is an answer, too."""
        return self._run(argv, timeout_s)

    def lookup(self, name: str) -> tuple[str, ...]:
        """Return the addresses of a name, in their order; none if it has none."""
        return self.time_lookup(name)[0]

    def time_lookup(self, name: str) -> tuple[tuple[str, ...], float]:
        """Return the addresses of a name, and how many seconds it took to get them. Each name is asked for once."""
        # Several probes want the same name, and a dead name server costs seconds each time.
        with self._lookup_lock:
            if name not in self._looked_up:
                begin_s = self.clock.monotonic()
                ips = self._lookup(name)
                self._looked_up[name] = ips, self.clock.monotonic() - begin_s
            return self._looked_up[name]

    def usage(self, path: str) -> tuple[int, int] | None:
        """Return the size of the file system that holds a folder, and what is free in it for us, in bytes; None if it can't be told."""
        info = self._stat_disk(path)
        return None if info is None else (info.f_frsize * info.f_blocks, info.f_frsize * info.f_bavail)

    def count_inodes(self, path: str) -> tuple[int, int] | None:
        """Return how many files a file system can hold, and how many more; None if it can't be told, or there is no such limit."""
        info = self._stat_disk(path)
        return (info.f_files, info.f_favail) if info is not None and info.f_files else None

    def _stat_disk(self, path: str) -> os.statvfs_result | None:
        try:
            return os.statvfs(self.path(path))
        except (OSError, AttributeError):
            return None
