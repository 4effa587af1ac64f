"""Ranks and workers whose launcher is gone, and what they hold."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, final

from rankwise.doctor.limits.processes import list_processes, read_process, use_psutil

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rankwise.doctor.host import Host
    from rankwise.doctor.limits.processes import Process

    #: By what the processes of one job know each other: the job's id, and the place where its ranks meet.
    JobKey: TypeAlias = tuple[str, str, str]

#: In a container process 1 may be the launcher itself, or a shell that waits for it, or start one program and fetch the dead.
_MAY_LAUNCH = (
    "python",
    "pypy",
    "sh",
    "bash",
    "dash",
    "zsh",
    "env",
    "torchrun",
    "rankwise",
    "accelerate",
    "deepspeed",
    "mpirun",
)
_SMALL_INITS = {"tini", "dumb-init", "docker-init", "catatonit", "pause"}
_APART_S = 60.0
_GPU_FILES = ("/dev/nvidia", "/dev/kfd")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """What processes hold, as far as it can be seen.

    Attributes:
        has_gpus: Whether one has a GPU open.
        memory_bytes: Memory of them all, with what they share counted for each.
        ports: At which they listen.
    """

    has_gpus: bool = False
    memory_bytes: int = 0
    ports: tuple[int, ...] = ()


def list_suspects(host: Host) -> list[Process]:
    """Return the processes that process 1 has started or adopted, and that look like a rank or a worker of a job."""
    return [one for one in list_processes(host, parent=1) if _is_of_job(one)]


def list_left_over(host: Host, suspects: Iterable[Process]) -> list[Process]:
    """Return those of some suspects whose launcher is gone.

    A process that somebody has sent to the background is none, nor is a service, nor what a rank of a living job has started.
    """
    adopted = [one for one in suspects if _is_adopted(host, one)]
    ages = _list_living_jobs(host) if adopted else {}
    return [one for one in adopted if not _belongs(one, ages)]


def is_left_over(host: Host, process: Process) -> bool:
    """Return whether a process is a rank or a worker of a job whose launcher is gone."""
    return _is_of_job(process) and bool(list_left_over(host, [process]))


def find_possible_launcher(host: Host) -> str:
    """Return process 1 by name, where it may itself have started what runs below it; empty where it adopts the orphans."""
    first = read_process(host, 1)
    name = first.command.split(" ")[0] if first is not None else ""
    return name if name.startswith(_MAY_LAUNCH) else ""


def find_holdings(host: Host, processes: Iterable[Process]) -> Holdings:
    """Return what some processes hold; of other users' processes only the memory can be seen."""
    has_gpus, memory_bytes, ports = False, 0, set[int]()
    for process in processes:
        for fd in host.names(f"/proc/{process.pid}/fd"):
            with suppress(OSError):
                has_gpus |= str(host.path(f"/proc/{process.pid}/fd/{fd}").readlink()).startswith(_GPU_FILES)
        with use_psutil(host) as ps:
            one = ps.Process(process.pid)
            memory_bytes += one.memory_info().rss
            ports |= {link.laddr.port for link in one.net_connections("tcp") if link.status == ps.CONN_LISTEN}
    return Holdings(has_gpus=has_gpus, memory_bytes=memory_bytes, ports=tuple(sorted(ports)))


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


def _belongs(process: Process, ages: Mapping[JobKey, float]) -> bool:
    """Return whether a process belongs to a living job: an older one is of an earlier job, which may have met at the same place."""
    job = _find_job(process.env)
    return job is not None and process.age_s <= ages.get(job, -1.0)
