"""`python -u script.py` by a fork of a Python that has imported torch, `python -m rankwise.run` by one that has imported the launcher: the tests pay for an import once, and not for each process."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from rankwise.warm.command_line import NAME
from rankwise.warm.huge_pages import gather

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: What scripts that make a group import, and torchrun, and what those that train or compile import beside it: a second more, and as
#: many modules again for each fork to take apart at its end.
PLAIN = ("torch", "torch.distributed", "torch.distributed.run", "torch.utils.data")
TRAINING = (*PLAIN, "torch._dynamo", "torch.distributed.tensor")
#: What `python -m rankwise.run` imports before its ranks run, and when one of them fails.
LAUNCHING = ("rankwise.cli.main", "rankwise.cli.run", "rankwise.launcher.supervised_workers", "rankwise.launcher.attempt_loop", "rankwise.launcher.resident",
             "rankwise.launcher.job_monitor", "rankwise.verdict.first_failure", "rankwise.launcher.entry_check", "rankwise.launcher.host_check", "rankwise.doctor.at_launch", "rankwise.doctor.probes.disk_space",
             "rankwise.doctor.probes.shared_memory", "rankwise.base.identity")  # fmt: skip
#: What the helper of a launcher with several nodes imports.
HELPING = ("torch", "torch.distributed.run", "torch.distributed.elastic.rendezvous.dynamic_rendezvous", "torch.distributed.elastic.timer")  # fmt: skip
#: `torchrun` as a script.
TORCHRUN_SCRIPT = Path(__file__).with_name("fork_site") / "torchrun.py"
#: `python -c` as a script: the text is its first argument.
_CODE_SCRIPT = TORCHRUN_SCRIPT.with_name("python_c.py")
#: `python` of a shell.
SHIM = TORCHRUN_SCRIPT.with_name("python_shim.py")
_READY_S = 120.0
#: The pid of a fork, how it has ended and its CPU milliseconds each take so much of the pipe, filled up with spaces.
ANSWER_BYTES = 16
_cpu_s = [0.0]


def measure_cpu_s() -> float:
    """Return the CPU seconds of what this process has had forked and seen end, and of the imports that it was the first to need."""
    return _cpu_s[0]


def can_fork(modules: Sequence[str], *, is_module: bool = False) -> bool:
    """Whether a Python that has imported ``modules`` can be forked here, before its script: not each build shows where it keeps its command."""
    return (
        sys.platform.startswith("linux")
        and hasattr(os, "pidfd_open")
        and _start(tuple(modules), is_module=is_module) is not None
    )


@final
class ForkedPython:
    """A forked Python; what `subprocess.Popen` offers of it, as far as it is needed.

    Attributes:
        stdout: What it writes to standard output, to be read, unless that goes elsewhere; ``stderr``: to standard error.
        returncode: As Popen's; None while it runs or nobody has asked.
    """

    stdin = None

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        folder: Path | None,
        fds: Mapping[int, int],
        *,
        modules: Sequence[str] = PLAIN,
        own_session: bool = False,
        takes_terminal: bool = False,
        is_module: bool = False,
        host_pid: int | None = None,
        forks_ranks: bool = False,
    ) -> None:
        """Fork; it must be possible (`can_fork`).

        Args:
            argv: The script, or the module, and its arguments.
            env: Its environment.
            folder: Where it stands; None: where we are.
            fds: Its descriptors: the number in the new process, and ours, or `subprocess.STDOUT`.
            modules: What is loaded already.
            own_session: Whether it leads a session.
            takes_terminal: Whether its standard input becomes that session's terminal.
            is_module: Whether it is `python -m MODULE`.
            host_pid: A process whose namespaces it enters.
            forks_ranks: Whether it is torchrun, whose ranks are forked, too.
        """
        sock, end = _start(tuple(modules), is_module=is_module), os.pipe()
        assert sock is not None
        pipes = {number: os.pipe() for number in (1, 2) if number not in fds}
        nowhere = os.open(os.devnull, os.O_RDONLY)
        given = {0: nowhere, **{number: pipe[1] for number, pipe in pipes.items()}, **fds}
        given = {number: given[1 if given[number] == subprocess.STDOUT else number] for number in sorted(given)}
        order = {"program": argv[0], "args": list(argv[1:]), "env": dict(env), "folder": str(folder or Path.cwd()),
                 "fds": [number for number in given if number > 2], "own_session": own_session, "takes_terminal": takes_terminal, "host_pid": host_pid, "forks_ranks": forks_ranks}  # fmt: skip
        try:
            socket.send_fds(sock, [json.dumps(order).encode()], [end[1], *given.values()])
        finally:
            for fd in (nowhere, end[1], *(pipe[1] for pipe in pipes.values())):
                os.close(fd)
        self._end = end[0]
        self.pid = int(os.read(self._end, ANSWER_BYTES))
        self.returncode: int | None = None
        self.stdout, self.stderr = (
            os.fdopen(pipes[number][0], encoding="utf-8") if number in pipes else None for number in (1, 2)
        )

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit code.

        Raises:
            subprocess.TimeoutExpired: It does not come.
        """
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("a forked Python", timeout or 0.0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; return what it wrote."""
        streams = [stream for stream in (self.stdout, self.stderr) if stream is not None]
        if any(stream.closed for stream in streams):
            return "", ""
        until, received = time.monotonic() + (timeout or 1e6), dict.fromkeys(streams, b"")
        todo = list(received)
        while todo:
            ready = select.select(todo, [], [], max(0.0, until - time.monotonic()))[0]
            if not ready:
                raise subprocess.TimeoutExpired("a forked Python", timeout or 0.0)
            for stream in ready:
                data = os.read(stream.fileno(), 1 << 16)
                received[stream] += data
                if not data:
                    todo.remove(stream)
        self.wait(max(0.0, until - time.monotonic()))
        for stream in streams:
            stream.close()
        out, err, *_ = (*(data.decode("utf-8", "replace") for data in received.values()), "")
        return out, err

    def send_signal(self, number: int) -> None:
        """Signal it, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it, if it runs."""
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._end], [], [], timeout_s)[0]:
            status, cpu_ms = map(int, os.read(self._end, 2 * ANSWER_BYTES).split() or (signal.SIGKILL, 0))
            os.close(self._end)
            self.returncode = os.waitstatus_to_exitcode(status)
            _cpu_s[0] += cpu_ms / 1000
        return self.returncode


def run_code(command: Sequence[str], *, modules: Sequence[str] = PLAIN, **options: Any) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Do what `subprocess.run` does with ``[python, "-c", CODE, …]`` and a pipe for standard output, by a fork where that can be.

    Args:
        command: What is to be run.
        modules: What is loaded already.
        **options: Those of `subprocess.run`.
    """
    if tuple(command[:2]) != (sys.executable, "-c") or not can_fork(modules):
        return subprocess.run(command, **options)  # noqa: PLW1510 - among the options
    forked = ForkedPython([str(_CODE_SCRIPT), *command[2:]], options.get("env") or os.environ, None, {2: 2}, modules=modules)  # fmt: skip
    assert forked.stdout is not None
    with forked.stdout:
        out = forked.stdout.read()
    return subprocess.CompletedProcess(command, forked.wait(), out)


def find_socket(modules: Sequence[str]) -> socket.socket | None:
    """Return the socket of a Python that was started as a user does by hand, who sets nothing; None where it can't be forked.

    Whoever has inherited it can have that fork: `fork_site/python_shim.py`.
    """
    return _start(tuple(modules), by_hand=True)


@functools.cache
def _start(modules: tuple[str, ...], *, by_hand: bool = False, is_module: bool = False) -> socket.socket | None:
    """Return a connection to fork by that ends with this process; None where a Python can't be given another command line."""
    sock = _connect(modules, by_hand=by_hand, is_module=is_module)
    if sock is not None:
        atexit.register(_stop, sock)
    return sock


def _connect(modules: tuple[str, ...], *, by_hand: bool, is_module: bool) -> socket.socket | None:
    """Connect to the Python that all workers of the tests fork from; start it where there is none.

    It ends with its last connection, which may be just now.
    """
    from support import RESIDENT_FOLDER

    name = f"forks-{zlib.crc32(repr((modules, by_hand, is_module)).encode()):08x}"
    RESIDENT_FOLDER.mkdir(mode=0o700, exist_ok=True)
    for _ in range(3):
        sock, process, answer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), None, b""
        with (RESIDENT_FOLDER / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                sock.connect(str(RESIDENT_FOLDER / name))
            except OSError:
                process = _start_server(RESIDENT_FOLDER / name, modules, by_hand=by_hand, is_module=is_module)
                sock.connect(str(RESIDENT_FOLDER / name))
        sock.settimeout(_READY_S)
        with contextlib.suppress(ConnectionError):
            answer = sock.recv(100)
            if process is not None:
                _count_import(process.pid)
                gather(process.pid)
            if answer == b"ready":
                return sock
        sock.close()
        if answer:
            break
    return None


def _start_server(path: Path, modules: tuple[str, ...], *, by_hand: bool, is_module: bool) -> subprocess.Popen[bytes]:
    """Start a Python to fork from, which listens at a path."""
    from support import make_env

    helpers = _connect(HELPING, by_hand=False, is_module=False) if modules == LAUNCHING else None
    helpers_fds = [] if helpers is None else [helpers.fileno()]
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, helpers or contextlib.nullcontext():
        listener.bind(str(path))
        listener.listen(64)
        env = make_env({
            "PYTHONPATH": str(Path(__file__).with_name("fork_site")),
            "TESTS_FORKS": json.dumps({"fd": listener.fileno(), "modules": modules, "helpers_fd": helpers_fds[0] if helpers_fds else None}),
            "OMP_NUM_THREADS": None if by_hand else "1",
            **({"TORCH_CPP_LOG_LEVEL": "FATAL"} if modules == HELPING else {}),  # read at the import; the helper sets it
        })  # fmt: skip
        command = [sys.executable, *(["-m"] if is_module else [] if by_hand else ["-u"]), NAME]
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, pass_fds=[listener.fileno(), *helpers_fds], start_new_session=True)  # fmt: skip
    process.returncode = 0  # it may outlive this process, and nobody waits for it
    return process


def _count_import(pid: int) -> None:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        _cpu_s[0] += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _stop(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_RDWR)  # what the tests have left running may have inherited it
    sock.close()
