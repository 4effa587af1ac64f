"""Start a launcher as a user would, watch its files and processes, and leave none behind; what all benchmarks share.

The benchmark adopts what its jobs leave (a subreaper, prctl(2)): a launcher that is killed, or that gives up, may
leave ranks in sessions of their own, and these would take the cores from the next job. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import platform
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_PR_SET_CHILD_SUBREAPER = 36
_KILL_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Launcher:
    """A command that starts ranks.

    Attributes:
        name: What the tables call it.
        argv: Its words; the flags and the script follow.
    """

    name: str
    argv: tuple[str, ...]


RANKWISE = Launcher("rankwise", (sys.executable, "-m", "rankwise.run"))
TORCHRUN = Launcher("torchrun", (sys.executable, "-m", "torch.distributed.run"))


@dataclass(frozen=True, slots=True)
class Job:
    """A launcher at work.

    Attributes:
        folder: Where it runs, with the script in it; gone with the job.
        started_s: The monotonic time just before it was started.
    """

    process: subprocess.Popen[bytes]
    folder: Path
    started_s: float

    def wait_end(self, limit_s: float) -> float | None:
        """Wait for the launcher's end; return its monotonic time, None if it is still there after ``limit_s``."""
        # Popen.wait with a timeout looks only every 0.05 s.
        pidfd = os.pidfd_open(self.process.pid)
        try:
            if not select.select([pidfd], [], [], max(0.0, limit_s))[0]:
                return None
            ended_s = time.monotonic()
        finally:
            os.close(pidfd)
        self.process.wait()
        return ended_s

    def wait_until(self, is_true: Callable[[], bool], limit_s: float) -> bool:
        """Wait for a condition; False if the launcher ends, or ``limit_s`` pass, before it is true."""
        end_s = time.monotonic() + limit_s
        while not is_true():
            if self.process.poll() is not None or time.monotonic() > end_s:
                return is_true()
            time.sleep(0.01)
        return True

    @property
    def errors(self) -> str:
        """What the launcher and the ranks have written to standard error."""
        return (self.folder / "errors.txt").read_text(encoding="utf-8", errors="replace")


def prepare() -> None:
    """Adopt orphans, and clean up also when this benchmark is told to end.

    Raises:
        SystemExit: This is not Linux.
    """
    if not sys.platform.startswith("linux"):
        raise SystemExit("the benchmarks read /proc and need Linux")
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise SystemExit(f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(ctypes.get_errno())}")

    def leave(number: int, _frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)


@contextmanager
def start_job(launcher: Launcher, flags: Sequence[str], script: str, *, holds: bool = False) -> Iterator[Job]:
    """Start a job in a folder of its own, as ``train.py``; at the end nothing is left of it.

    Args:
        launcher: Who starts the ranks.
        flags: The launcher's flags.
        script: Text of the script.
        holds: Whether the ranks see ``HOLD=1``.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark_", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "train.py").write_text(script)
        (folder / "tmp").mkdir()
        env = {**os.environ, "TMPDIR": str(folder / "tmp"), **({"HOLD": "1"} if holds else {})}
        with (folder / "errors.txt").open("wb") as errors:
            started_s = time.monotonic()
            process = subprocess.Popen(
                [*launcher.argv, *flags, "train.py"],
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
        try:
            yield Job(process, folder, started_s)
        finally:
            _end(process)


def list_job_processes() -> list[int]:
    """Return the pids of all processes below this one: the launcher, its ranks, and what they have left behind."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError, ValueError, IndexError):
            # A command's name may hold spaces and brackets: the fields begin after the last one.
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found, todo = list[int](), [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return [pid for pid in found if not _is_resident(pid)]


def _is_resident(pid: int) -> bool:
    """Whether a process is a server that outlives its jobs; what is below it counts."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().endswith(b"\0rankwise-resident\0")
    return False


def sum_pss_bytes(pids: Sequence[int]) -> int:
    """Return the memory of some processes; a page that several share counts as a fraction in each of them."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def count_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def describe_host() -> str:
    """Return what the numbers depend on, in a line."""
    load = " ".join(f"{one:.1f}" for one in os.getloadavg())
    return (
        f"{count_cores()} cores, load average {load}, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, torch {version('torch')}"
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the launcher first, lest it starts ranks anew, and then whatever is left below us."""
    if process.poll() is None:
        process.kill()
        process.wait()
    end_s = time.monotonic() + _KILL_LIMIT_S
    while left := list_job_processes():
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if time.monotonic() > end_s:
            print(f"processes {left} could not be killed", file=sys.stderr)
            return
        time.sleep(0.005)
