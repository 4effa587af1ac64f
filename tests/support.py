"""Run the launcher as users do, in real processes, and see that none is left behind."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import os
import pty
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import textwrap
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, final

import pytest

from gloo_words import without_gloo
from python_forks import LAUNCHING, PLAIN, TORCHRUN_SCRIPT, ForkedPython, can_fork

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

#: Carried in the environment by every process that a test starts, and by all that those start.
MARK = "LAUNCH_TEST_MARK"
RANKWISE: tuple[str, ...] = (sys.executable, "-m", "rankwise.run")
TORCHRUN: tuple[str, ...] = (sys.executable, "-m", "torch.distributed.run")

#: Variables of an outer launcher or of the machine that would change what a test sees.
_NOT_OURS = ("PET_", "RANKWISE_", "TORCHELASTIC_", "PYTHONPATH", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE",
             "MASTER_", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "NO_COLOR", "FORCE_COLOR", "PYTEST_", "TESTS_RESIDENT")  # fmt: skip
#: What an interpreter, its allocator and its loader read before a line is run.
_AT_START = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_")
#: A datagram holds the arguments and the environment of a process that is to be forked.
_LONGEST_ORDER = 100_000
_markers: list[str] = ["none"]
_is_checked: list[bool] = [False]
#: Where the resident servers of this session's launchers are; its first process names it for the others.
RESIDENT_FOLDER = Path(
    os.environ.setdefault("TESTS_RESIDENT_FOLDER", f"{tempfile.gettempdir()}/rankwise-tests-{os.getpid()}")
)
#: As many as there are kinds of launches: other numbers of ranks, with and without the compiler, scripts and modules.
_FOLDER, _MOST_RESIDENT = "RANKWISE_RESIDENT_FOLDER", "16"
_is_resident: list[bool] = [False]
_launches: list[int] = [0]


def find_torch() -> tuple[int, int]:
    """Return torch's major and minor version, without importing it; (0, 0) if there is none."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        major, minor = importlib.metadata.version("torch").split(".")[:2]
        return int(major), int(minor)
    return 0, 0


#: What ours is compared with, flag by flag and variable by variable, is the torchrun of this version.
IS_COMPARABLE = find_torch() >= (2, 13)
NOT_COMPARABLE = "torchrun before 2.13 has other flags and variables"


def without_patience(text: str) -> str:
    """Leave out what a launcher says after some seconds of silence: for whom it waits. It says so on a busy machine only."""
    return re.sub(r"(?m)^rankwise: (waiting for ranks? .* to stop, |no rank has started after \d+ s: ).*\n", "", text)


def set_marker(marker: str) -> None:
    """Make ``marker`` the one that processes started from now on carry."""
    _markers[0] = marker


def set_checked(is_checked: bool) -> None:
    """Say whether launchers started from now on check their script, as they do for a user who says nothing.

    Elsewhere they don't: the check costs more of the CPU than the launcher itself, and hundreds are started.
    """
    _is_checked[0] = is_checked


def set_resident(is_resident: bool) -> None:
    """Say whether launchers started from now on fork their ranks off this session's resident servers.

    A launch that imports torch for itself costs three seconds of the CPU; where that is not the point, one pays for all.
    """
    _is_resident[0] = is_resident


def count_launches() -> int:
    """Return how many launchers this process has started so far."""
    return _launches[0]


def make_resident_env() -> dict[str, str]:
    """Return the variables by which a launch uses one of this session's resident servers."""
    return {
        _FOLDER: str(RESIDENT_FOLDER),
        "RANKWISE_RESIDENT": "always",
        "RANKWISE_RESIDENT_MOST": _MOST_RESIDENT,
    }


def stop_residents() -> None:
    """End this session's resident servers."""
    env = {**os.environ, _FOLDER: str(RESIDENT_FOLDER)}
    if RESIDENT_FOLDER.exists():
        subprocess.run(
            [sys.executable, "-m", "rankwise", "resident", "stop"],
            env=env,
            stdout=subprocess.DEVNULL,
            check=False,
        )
        shutil.rmtree(RESIDENT_FOLDER, ignore_errors=True)


def make_env(env: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """Return a clean environment with the marker; None in ``env`` takes a variable out."""
    base = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_OURS)}
    if not _is_checked[0]:
        base["RANKWISE_CHECK"] = "0"
    base |= make_resident_env() if _is_resident[0] else {_FOLDER: str(RESIDENT_FOLDER)}
    wanted = {**base, MARK: _markers[0], **(env or {})}
    return {name: value for name, value in wanted.items() if value is not None}


def leftovers(marker: str | None = None, wait_s: float = 3.0) -> list[str]:
    """List living processes that carry the marker, after giving them ``wait_s`` to go: "pid command"."""
    end = time.monotonic() + wait_s
    while True:
        found = list_marked(marker)
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.02)


def list_marked(marker: str | None = None) -> list[str]:
    """List living processes that carry the marker, now."""
    wanted = f"{MARK}={marker or _markers[0]}".encode()
    found = []
    for entry in os.listdir("/proc"):  # noqa: PTH208 - polled
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            if wanted not in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                continue
            state = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[0]
            command = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        # It outlives the run that has started it, whose environment it has.
        if state not in "ZX" and not command.strip().endswith(" rankwise-resident"):
            found.append(f"{entry} {command.strip()}")
    return found


def kill_leftovers(marker: str | None = None) -> None:
    """End what a test has left behind, so that the next one starts clean."""
    for line in list_marked(marker):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(line.split()[0]), signal.SIGKILL)


def wait_until(condition: Callable[[], Any], timeout_s: float = 15.0, what: str = "") -> Any:
    """Poll until ``condition`` is true and return its value; fail the test at the deadline."""
    end = time.monotonic() + timeout_s
    while True:
        if value := condition():
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout_s} s: {what or condition}")
        time.sleep(0.01)


def free_port() -> int:
    """Return a TCP port that nobody listens on, below those that the kernel gives to connections: one of them might take it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def write_script(folder: Path, text: str, name: str = "train.py") -> Path:
    """Write a rank's script, dedented, and return its path."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text).lstrip("\n"))
    return path


def line_of(path: Path, text: str) -> str:
    """Return ``file:LINE`` of the first line of a file that holds ``text``."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if text in line:
            return f"{path}:{number}"
    raise AssertionError(f"{text!r} is not in {path}")


def read_report(path: Path) -> dict[str, Any]:
    """Read what ``--report`` wrote."""
    report: dict[str, Any] = json.loads(path.read_text())
    return report


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str
    wall_s: float = 0.0


def plan_fork(command: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return what `ForkedPython` is to run for `rankwise run` or torchrun, and its options; no words for other commands, or where nothing can be forked."""
    for launcher, first, modules in (
        (RANKWISE, RANKWISE[-1], LAUNCHING),
        (TORCHRUN, str(TORCHRUN_SCRIPT), PLAIN),
    ):
        is_ours = launcher is RANKWISE
        if tuple(command[: len(launcher)]) == launcher and can_fork(modules, is_module=is_ours):
            return [first, *command[len(launcher) :]], {"modules": modules, "is_module": is_ours, "forks_ranks": not is_ours}  # fmt: skip
    return [], {}


def fork_launcher(
    command: Sequence[str],
    cwd: Path,
    env: Mapping[str, str | None] | None,
    fds: dict[int, int],
    *,
    text: str | None = None,
    takes_terminal: bool = False,
) -> ForkedPython | None:
    """Fork `rankwise run` or torchrun off a Python that has imported it; None for other commands, and in tests that are about the import.

    Args:
        command: What is to be run.
        cwd: Where.
        env: As for `make_env`.
        fds: Its standard streams.
        text: What it is given as its standard input.
        takes_terminal: Whether its standard input becomes its controlling terminal.
    """
    words, options = plan_fork(command) if _is_resident[0] else ([], {})
    if not words:
        return None
    # Read when an interpreter starts; torchrun's own is started as a user's is.
    if options["is_module"] and any(name.startswith(_AT_START) for name in env or {}):
        return None
    wanted = make_env(env)
    if sum(map(len, (*words, *wanted, *wanted.values()))) >= _LONGEST_ORDER:
        return None
    reading, writing = os.pipe()
    try:
        os.write(writing, (text or "").encode())
        os.close(writing)
        streams = fds if text is None else {0: reading, **fds}
        return ForkedPython(words, wanted, cwd, streams, own_session=True, takes_terminal=takes_terminal, **options)  # fmt: skip
    finally:
        os.close(reading)


@final
class Running:
    """A launcher in the background; its output goes to files, so that nobody waits for us to read."""

    def __init__(
        self,
        command: Sequence[str],
        cwd: Path,
        *,
        env: Mapping[str, str | None] | None = None,
        stdin: str | int | None = None,
        out: int | None = None,
        preexec_fn: Callable[[], None] | None = None,
    ) -> None:
        self._out: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as we do
        self._err: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as we do
        self.started_s = time.monotonic()
        _launches[0] += 1
        self.process: subprocess.Popen[bytes] | ForkedPython
        fds = {1: self._out.fileno() if out is None else out, 2: self._err.fileno()}
        if preexec_fn is None and out != subprocess.PIPE and not isinstance(stdin, int):
            forked = fork_launcher(command, cwd, env, fds, text=stdin)
            if forked is not None:
                self.process = forked
                return
        self.process = subprocess.Popen(
            list(command), cwd=cwd, env=make_env(env), stdout=self._out if out is None else out, stderr=self._err,
            stdin=subprocess.PIPE if isinstance(stdin, str) else stdin if stdin is not None else subprocess.DEVNULL,
            start_new_session=True, preexec_fn=preexec_fn,  # noqa: PLW1509 - no other thread forks
        )  # fmt: skip
        if isinstance(stdin, str) and self.process.stdin is not None:
            self.process.stdin.write(stdin.encode())
            self.process.stdin.close()

    @property
    def out(self) -> str:
        """What it has written to standard output so far, but for what Gloo of older torch writes there."""
        return without_gloo(self._read(self._out))

    @property
    def err(self) -> str:
        """What it has written to standard error so far."""
        return self._read(self._err)

    @staticmethod
    def _read(file: IO[bytes]) -> str:
        size = os.fstat(file.fileno()).st_size
        return os.pread(file.fileno(), min(size, 64 << 20), 0).decode("utf-8", "replace")

    def send(self, number: int) -> None:
        """Signal the launcher itself."""
        self.process.send_signal(number)

    def finish(self, timeout_s: float = 60.0) -> Result:
        """Wait for the end; a launcher that does not end is killed and fails the test."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            left = list_marked()
            out, err = self.out, self.err
            self.process.kill()
            self.process.wait()
            self.close()
            raise AssertionError(f"no end within {timeout_s} s\nalive: {left}\nout: {out}\nerr: {err}") from None
        result = Result(code=code, out=self.out, err=self.err, wall_s=time.monotonic() - self.started_s)
        self.close()
        return result

    def close(self) -> None:
        """Close the files."""
        self._out.close()
        self._err.close()


@contextlib.contextmanager
def start_rankwise(args: Sequence[str], cwd: Path, **options: Any) -> Iterator[Running]:
    """Start the launcher in the background; it is killed at the end of the block if it still runs."""
    running = Running([*RANKWISE, *args], cwd, **options)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait()
        running.close()


def run_rankwise(
    args: Sequence[str],
    cwd: Path,
    *,
    env: Mapping[str, str | None] | None = None,
    timeout_s: float = 60,
    stdin: str | None = None,
    launcher: Sequence[str] = RANKWISE,
) -> Result:
    """Run the launcher (or torchrun) to its end, in its own session, without a terminal."""
    if tuple(launcher) == TORCHRUN and not IS_COMPARABLE:
        pytest.skip(NOT_COMPARABLE)
    return Running([*launcher, *args], cwd, env=env, stdin=stdin).finish(timeout_s)


def run_reported(
    args: Sequence[str], cwd: Path, *, env: Mapping[str, str | None] | None = None, timeout_s: float = 60
) -> tuple[Result, dict[str, Any]]:
    """Run the launcher with ``--report`` and return its end and the report."""
    path = cwd / "report.json"
    result = run_rankwise(["--report", str(path), *args], cwd, env=env, timeout_s=timeout_s)
    assert path.exists(), f"no report, exit {result.code}\n{result.err}"
    return result, read_report(path)


@dataclass(slots=True)
class Terminal:
    """A program on a pseudo-terminal of its own, as its controlling terminal."""

    command: Sequence[str]
    cwd: Path
    env: Mapping[str, str | None] | None = None
    size: tuple[int, int] = (40, 123)
    stdout: int | None = None
    process: subprocess.Popen[bytes] | ForkedPython = field(init=False)
    _ours: int = field(init=False)
    _seen: bytearray = field(init=False, default_factory=bytearray)
    _reader: threading.Thread = field(init=False)

    def __enter__(self) -> Terminal:
        self._ours, theirs = pty.openpty()
        self.resize(*self.size, tell=False)

        def take_terminal() -> None:
            fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

        env = {"TERM": "xterm", **(self.env or {})}
        stdout = theirs if self.stdout is None else self.stdout
        self.process = fork_launcher(
            self.command, self.cwd, env, {0: theirs, 1: stdout, 2: theirs}, takes_terminal=True
        ) or subprocess.Popen(
            list(self.command), cwd=self.cwd, env=make_env(env), stdin=theirs, stdout=stdout, stderr=theirs,
            start_new_session=True, preexec_fn=take_terminal,  # noqa: PLW1509 - no other thread forks
        )  # fmt: skip
        os.close(theirs)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._ours, 1 << 16)
            except OSError:
                return
            if not data:
                return
            self._seen += data

    @property
    def text(self) -> str:
        """What the terminal has shown so far."""
        return self._seen.decode("utf-8", "replace")

    def resize(self, rows: int, columns: int, *, tell: bool = True) -> None:
        """Give the terminal another size; the kernel tells the foreground group (SIGWINCH)."""
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        if tell:
            os.kill(self.process.pid, signal.SIGWINCH)

    def type(self, text: str) -> None:
        r"""Type on its keyboard; ``\x03`` is Ctrl-C."""
        os.write(self._ours, text.encode())

    def finish(self, timeout_s: float = 60) -> Result:
        """Wait for the end and return all that was shown."""
        start = time.monotonic()
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end within {timeout_s} s\n{list_marked()}\n{self.text}") from None
        self._reader.join(2)
        return Result(code=code, out=self.text, err="", wall_s=time.monotonic() - start)

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        kill_leftovers()
        self._reader.join(2)
        os.close(self._ours)
