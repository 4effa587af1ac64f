"""The cores that the job may use, against its ranks, threads and workers.

**Why it matters.** In a container or a batch job a process sees all cores of the host and may use few of them: ranks that start a thread for each
core that they see compete, and everything is many times slower. Conversely, `OMP_NUM_THREADS=1`, which torchrun sets, lets a
job on the CPU use one core of many. More workers than cores make loading slower, not faster (`Our suggested max number of worker ...`).

Ranks that srun or mpirun starts get no `OMP_NUM_THREADS`: each starts as many threads as it sees cores.

**How it is checked.** The process's affinity and the control group's quota; how often the group was stopped because its quota was used up; the
variable `OMP_NUM_THREADS`. `rankwise run` by itself gives each rank its share of the cores.

**What to do.** As many threads as cores divided by ranks, and no more workers than cores. Ask for more cores: `--cpus-per-task` of Slurm,
`docker run --cpus`, `resources.limits.cpu` of Kubernetes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from rankwise.base.host import count_cores_of, find_cpu_quota
from rankwise.base.identity import Identity, read_all
from rankwise.doctor.host import Host
from rankwise.doctor.limits.cgroups import list_groups, read_counters
from rankwise.doctor.probe import Probe, Reading, ok, skipped, warn
from rankwise.doctor.units import format_count

#: A group that was stopped in more than this share of its periods has too few cores for what it runs.
_OFTEN, _ENOUGH_PERIODS = 0.25, 100
_IDLE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """What the job may use: processors as the system counts them (two for a core with hyper-threads), their cores, and how many by quota."""

    cpus: int
    cores: int
    quota: float

    @property
    def usable(self) -> int:
        """How many threads can compute at once."""
        return self.cpus if math.isinf(self.quota) else max(1, min(self.cpus, math.ceil(self.quota)))


def look(host: Host) -> Iterator[Reading]:
    cores = read_cores(host)
    if cores is None:
        why = "there is no /proc/self/status"
        yield skipped("this system does not report which cores a process may use", why)
        return
    limit = "" if math.isinf(cores.quota) else f", {cores.quota:g} of them by quota"
    what = f"{format_count(cores.cores, 'core')} ({format_count(cores.cpus, 'processor')}){limit}"
    fine = ok(what, cores=cores.cores, cpus=cores.cpus, usable=cores.usable)
    yield from [*_check_ranks(host, cores), *_check_throttled(host)] or [fine]


def read_cores(host: Host) -> Cores | None:
    """Return what the job may use; None where the system does not tell."""
    found = re.search(r"^Cpus_allowed_list:\s*(\S+)", host.read("/proc/self/status"), re.MULTILINE)
    if found is None:
        return None
    cpus = read_list(found[1])
    return Cores(cpus=len(cpus), cores=count_cores_of(cpus, host.root), quota=find_cpu_quota(host.root))


def read_list(text: str) -> list[int]:
    """Read a list of the kernel: ``0-3,8`` is 0, 1, 2, 3, 8."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            found += range(int(first), int(last if last.isdigit() else first) + 1)
    return found


def _check_ranks(host: Host, cores: Cores) -> Iterator[Reading]:
    ranks, workers = host.job.num_ranks, host.job.num_workers or 0
    online = len(read_list(host.read("/sys/devices/system/cpu/online")))
    # srun and mpirun bind each task to its own cores: those that are seen may be those of one rank alone.
    if ranks is None or (ranks > 1 and ranks * cores.cpus <= online and _find_plain_launcher(host)):
        return
    limit = "" if math.isinf(cores.quota) else f" (quota {cores.quota:g})"
    seen = f"{format_count(cores.usable, 'processor')} can be used here{limit}"
    if ranks > cores.usable:
        yield warn(
            f"{format_count(ranks, 'rank')}, and {seen}", "ranks share cores: fine for testing, but slower than fewer ranks",
            f"rankwise run --nproc-per-node {cores.usable} …", "X17"
        )  # fmt: skip
    else:
        yield from _check_threads(host, cores, ranks, seen)
    if ranks * workers > cores.usable:
        yield warn(
            f"{format_count(ranks, 'rank')} with {format_count(workers, 'worker')} each {'is' if ranks * workers == 1 else 'are'} {format_count(ranks * workers, 'process', 'processes')} that load data, and {seen}",
            "they compete with each other and with the ranks; torch warns `Our suggested max number of worker`",
            f"# num_workers={max(1, cores.usable // ranks - 1)} in the DataLoader, or more cores for the job", "X17"
        )  # fmt: skip


def _check_threads(host: Host, cores: Cores, ranks: int, seen: str) -> Iterator[Reading]:
    text = host.env.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    threads = int(text) if text.isdigit() else 0
    share = max(1, min(cores.cores, cores.usable) // ranks)
    launcher = _find_plain_launcher(host)
    if ranks * threads > cores.usable:
        yield warn(
            f"{format_count(ranks, 'rank')} with OMP_NUM_THREADS={threads} are {ranks * threads} threads, and {seen}",
            "the threads compete for cores: many times slower than with fewer", f"export OMP_NUM_THREADS={share}", "X17"
        )  # fmt: skip
    elif threads == 1 and share >= _IDLE and host.job.backend == "gloo":
        yield warn(
            f"OMP_NUM_THREADS=1 lets {format_count(ranks, 'rank')} use {ranks} of {format_count(min(cores.cores, cores.usable), 'core')}",
            "a job on the CPU is slower by as much", "unset OMP_NUM_THREADS  # rankwise run gives each rank its share", "X17"
        )  # fmt: skip
    elif not text and launcher and ranks > 1:
        yield warn(
            f"{launcher} starts {ranks} ranks here without OMP_NUM_THREADS: each starts a thread for each of {format_count(cores.cpus, 'processor')}",
            "the threads compete for cores: many times slower than with fewer; torchrun and rankwise run set it, srun and mpirun do not",
            f"export OMP_NUM_THREADS={share}", "X17"
        )  # fmt: skip


def _find_plain_launcher(host: Host) -> str:
    """Return what has started this task, where it gives its tasks no number of threads and they are the job's ranks; empty otherwise."""
    if "TORCHELASTIC_RUN_ID" in host.env:
        return ""
    # RANK and its like may have been set by hand, from the launcher's own.
    info = (one for one in read_all(host.env) if isinstance(one, Identity) and one.names[0] != "RANK")
    nearest = next(info, None)
    if nearest is None or nearest.local_world_size != host.job.num_ranks:
        return ""
    return {"Slurm": "srun", "Flux": "flux run"}.get(nearest.source, "mpirun")


def _check_throttled(host: Host) -> Iterator[Reading]:
    for folder in list_groups(host, "cpu"):
        info = read_counters(host, f"{folder}/cpu.stat")
        periods, stopped = info.get("nr_periods", 0), info.get("nr_throttled", 0)
        if periods >= _ENOUGH_PERIODS and stopped > _OFTEN * periods:
            yield warn(
                f"the cgroup's CPU quota was exhausted in {stopped} of {periods} periods ({stopped / periods:.0%})",
                "all threads were stopped until the next period: ranks stall for up to 0.1 s at a time, and all wait for them",
                "# fewer threads and workers, or a larger quota: docker run --cpus=…, resources.limits.cpu of Kubernetes", "X17"
            )  # fmt: skip
            return


PROBE = Probe("cores", "cores against ranks, threads and workers", "resources", "instant", look, classes=("X17",))
