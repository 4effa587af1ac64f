"""The processes of a host, as psutil lists them (of a command line only the program and its script), and those whose launcher is gone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath
from types import ModuleType
from typing import TypeAlias, final

from rankwise.base.host import find_port_holder
from rankwise.doctor.host import Host
from rankwise.doctor.units import format_age

#: By what the processes of one job know each other: the job's id, and the address and port of its rendezvous.
JobKey: TypeAlias = tuple[str, str, str]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process.

    Attributes:
        command: The program and its script: ``python train.py``; arguments may be secret, and are left out.
        name: What the process calls itself: ``pt_data_worker``.
        user: Whose it is: a name, else a number.
        is_stuck: Whether it is stuck in the kernel; ``is_dead``: whether it has ended, and its parent has not yet
            noticed.
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
    for before, word in pairwise(words):
        if before == "-m":
            return f"{program} -m {word}"[:80]
        if word.startswith("-c"):
            return f"{program} -c …"
        # The values of -W and -X stand by themselves.
        if not word.startswith("-") and before not in {"-W", "-X"}:
            return f"{program} {PurePath(word).name}"[:80]
    return program


def find_port_user(host: Host, port: int) -> tuple[str, str]:
    """Return who listens at a TCP port, and its process number; no number where it is another user's, and nothing where nobody does."""
    holder = find_port_holder(port, proc=host.path("/proc"))
    pid = holder.split()[1] if holder.startswith("pid ") else ""
    if pid:  # its arguments may be secret
        command = name_command(host.read(f"/proc/{pid}/cmdline").split("\0"))
        holder = f"pid {pid} ({command or 'without a name'})"
    return holder, pid


#: In a container process 1 may be the launcher itself, or a shell that waits for it, or start one program and fetch the
#: dead.
_MAY_LAUNCH = tuple("python pypy sh bash dash zsh env torchrun rankwise accelerate deepspeed mpirun".split())  # noqa: SIM905
_SMALL_INITS = {"tini", "dumb-init", "docker-init", "catatonit", "pause"}
_APART_S = 60.0
_GPU_FILES = ("/dev/nvidia", "/dev/kfd")


def list_suspects(host: Host) -> list[Process]:
    """Return the processes that process 1 has started or adopted, and that look like a rank or a worker of a job."""
    return [one for one in list_processes(host, parent=1) if _is_of_job(one)]


def list_left_over(host: Host, suspects: Iterable[Process]) -> list[Process]:
    """Return those of some suspects whose launcher is gone.

    A process that somebody has sent to the background is none, nor is a service, nor what a rank of a living job has
    started.
    """
    adopted = [one for one in suspects if _is_adopted(host, one)]
    ages = _list_living_jobs(host) if adopted else {}
    # An older process is of an earlier job, which may have met at the same place.
    return [one for one in adopted if (job := _find_job(one.env)) is None or one.age_s > ages.get(job, -1.0)]


def is_left_over(host: Host, process: Process) -> bool:
    """Return whether a process is a rank or a worker of a job whose launcher is gone."""
    return _is_of_job(process) and bool(list_left_over(host, [process]))


def find_possible_launcher(host: Host) -> str:
    """Return process 1 by name, where it may itself have started what runs below it; empty where it adopts the orphans."""
    first = read_process(host, 1)
    name = first.command.split(" ")[0] if first is not None else ""
    return name if name.startswith(_MAY_LAUNCH) else ""


def find_holdings(host: Host, processes: Iterable[Process]) -> tuple[bool, int, list[int]]:
    """Return whether some processes hold GPUs, how many bytes of memory (what they share counts for each), and at which ports they listen.

    Of other users' processes only the memory can be seen.
    """
    has_gpus, memory_bytes, ports = False, 0, set[int]()
    for process in processes:
        for fd in host.names(f"/proc/{process.pid}/fd"):
            with suppress(OSError):
                has_gpus |= str(host.path(f"/proc/{process.pid}/fd/{fd}").readlink()).startswith(_GPU_FILES)
        with use_psutil(host) as ps:
            one = ps.Process(process.pid)
            memory_bytes += one.memory_info().rss
            ports |= {link.laddr.port for link in one.net_connections("tcp") if link.status == ps.CONN_LISTEN}
    return has_gpus, memory_bytes, sorted(ports)


def _is_of_job(process: Process) -> bool:
    is_one = process.name.startswith("pt_data_") or process.is_spawned or _find_job(process.env) is not None
    return is_one and process.parent == 1 and not process.is_dead


def _is_adopted(host: Host, process: Process) -> bool:
    """Return whether process 1 has adopted another, and has not started it."""
    first = read_process(host, 1)
    if first is None or find_possible_launcher(host):
        return False
    if first.command.split(" ")[0] in _SMALL_INITS:
        return first.age_s - process.age_s > _APART_S
    group = host.read(f"/proc/{process.pid}/cgroup")
    return not ("/system.slice/" in group and ".service" in group)


def _find_job(env: Mapping[str, str]) -> JobKey | None:
    if "TORCHELASTIC_RUN_ID" not in env:
        return None
    return env["TORCHELASTIC_RUN_ID"], env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")


def _list_living_jobs(host: Host) -> dict[JobKey, float]:
    """Return the jobs that have a launcher here, with the seconds for which that has run: it is what has started their ranks."""
    processes = {one.pid: one for one in list_processes(host) if not one.is_dead}
    found: dict[JobKey, float] = {}
    for process in processes.values():
        job, launcher = _find_job(process.env), processes.get(process.parent)
        # What was adopted is no sign of life, nor is what that has started.
        if job is not None and launcher is not None and launcher.pid > 1 and _find_job(launcher.env) != job:
            found[job] = max(found.get(job, 0.0), launcher.age_s)
    return found
