"""The processes of a host, as psutil lists them; never more of a command line than the program and its script."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import ModuleType

    from rankwise.doctor.host import Host


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process.

    Attributes:
        command: The program and its script: ``python train.py``; arguments may be secret, and are left out.
        name: What the process calls itself: ``pt_data_worker``.
        user: Whose it is: a name, else a number.
        age_s: How long it has run.
        is_stuck: Whether it is stuck in the kernel; ``is_dead``: whether it has ended, and its parent has not yet noticed.
        is_spawned: Whether multiprocessing has spawned it.
        env: The environment that it was started with; empty where it is another user's.
    """

    pid: int
    parent: int
    command: str
    name: str
    user: str
    age_s: float
    is_stuck: bool
    is_dead: bool
    is_spawned: bool
    env: Mapping[str, str]

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.command}) of {self.user}, started {format_age(self.age_s)} ago"


@contextmanager
def use_psutil(host: Host) -> Iterator[ModuleType]:
    """Let psutil look at a host, and end the block quietly where a process has ended, or may not be seen."""
    import psutil  # noqa: PLC0415 - most runs never ask

    usual, psutil.PROCFS_PATH = psutil.PROCFS_PATH, str(host.path("/proc"))  # a test has a folder of its own
    try:
        with suppress(psutil.Error, OSError, ValueError):
            yield psutil
    finally:
        psutil.PROCFS_PATH = usual


def list_processes(host: Host, *, parent: int | None = None) -> list[Process]:
    """Return all processes that can be seen; of one parent, if it is given."""
    pids: list[int] = []
    with use_psutil(host) as ps:
        pids = sorted(ps.pids())
    return [one for pid in pids if (one := read_process(host, pid, parent=parent)) is not None]


def read_process(host: Host, pid: int, *, parent: int | None = None) -> Process | None:
    """Return a process; None if there is none, it can't be seen, or it has another parent than the given one."""
    found: Process | None = None
    with use_psutil(host) as ps:
        one, env = ps.Process(pid), dict[str, str]()
        with one.oneshot():
            if parent is None or one.ppid() == parent:
                with suppress(ps.Error, OSError):  # another user's
                    env = one.environ()
                argv, status = one.cmdline(), one.status()
                found = Process(
                    pid=pid, parent=one.ppid(), name=one.name(), user=one.username(), age_s=max(0.0, host.clock.time() - one.create_time()),
                    command=name_command(argv) or one.name(), env=env, is_spawned=any("from multiprocessing.spawn import" in word for word in argv),
                    is_stuck=status == ps.STATUS_DISK_SLEEP, is_dead=status == ps.STATUS_ZOMBIE,
                )  # fmt: skip
    return found


def is_inside(host: Host, pid: int, ancestor: int) -> bool:
    """Return whether a process is another one, or was started by it, or by one that it started."""
    above = {pid}
    with use_psutil(host) as ps:
        above |= {one.pid for one in ps.Process(pid).parents()}
    return ancestor in above


def name_command(argv: list[str]) -> str:
    """Return the program and, of an interpreter, its script or module; no other argument."""
    words = [word for word in argv if word]
    if not words:
        return ""
    program = PurePath(words[0].split(" ")[0]).name
    if not program.startswith(("python", "pypy")):
        return program[:40]
    for at, word in enumerate(words[1:], start=1):
        if word == "-m":
            return f"{program} -m {words[at + 1]}"[:80] if at + 1 < len(words) else program
        if word == "-c" or word.startswith("-c"):
            return f"{program} -c …"
        if not word.startswith("-"):
            # The values of -W and -X stand by themselves.
            if words[at - 1] in {"-W", "-X"}:
                continue
            return f"{program} {PurePath(word).name}"[:80]
    return program


def format_age(age_s: float) -> str:
    """Describe a span of time in the unit that fits: ``2 h``."""
    for unit, seconds in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= 2 * seconds:
            return f"{age_s / seconds:.0f} {unit}"
    return f"{age_s:.0f} s"
