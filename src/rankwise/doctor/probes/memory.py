"""The memory that is left for the job, and whether the kernel has killed for lack of it.

**Why it matters.** Where memory runs out, the kernel kills a process with SIGKILL: the rank ends with exit code -9, silently, and all
others hang or fail with `Connection closed by peer`. In a container the limit is that of the container, whatever the host has.

**How it is checked.** `MemAvailable` of the host and the limits of the control groups, whichever is less; how many processes of this container or session
the kernel has killed; swap; and the strict mode in which the kernel refuses memory that might not be there.

**What to do.** Fewer ranks or workers, or more memory: `--mem` of Slurm, `docker run --memory`, `resources.limits.memory` of Kubernetes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from rankwise.doctor.host import Host
from rankwise.doctor.limits.cgroups import count_oom_kills, find_memory_room
from rankwise.doctor.limits.ulimits import MORE_MEMORY
from rankwise.doctor.probe import Probe, Reading, fail, ok, skipped, warn
from rankwise.doctor.units import format_count, format_size

_MIB, _GIB = 1 << 20, 1 << 30
#: A rank that has only imported torch takes this much.
_RANK_BYTES = 300 * _MIB
_TIGHT_BYTES, _TIGHT_SHARE = _GIB, 0.05
_WHO_HAS_IT = "ps aux --sort=-rss | head  # who has it"


def look(host: Host) -> Iterator[Reading]:
    rows = re.findall(r"^(\w+):\s+(\d+) kB", host.read("/proc/meminfo"), re.MULTILINE)
    info = {name: int(kib) << 10 for name, kib in rows}
    if "MemAvailable" not in info:
        yield skipped("this system does not report its memory", "there is no /proc/meminfo")
        return
    limit, room = find_memory_room(host)
    size, left = min(float(info["MemTotal"]), limit), min(float(info["MemAvailable"]), max(0.0, room))
    is_limited = not math.isinf(limit) and room <= info["MemAvailable"]
    is_capped = limit < info["MemTotal"]
    # Of a small container on a full host, it is the host's memory that is short.
    whole = size if is_limited else float(info["MemTotal"])
    what = f"{format_size(left)} of {format_size(whole)} of memory are free"
    if is_limited or is_capped:
        what += f" (the limit of this container or session is {format_size(limit)})"
    ranks, found = host.job.num_ranks or 1, [*_check_others(host, info)]
    need = ranks * _RANK_BYTES
    if left < need:
        # Where all of it would be too little, nobody else has it.
        more = MORE_MEMORY if is_capped else "# fewer ranks, or a host with more memory"
        lack = fail(
            f"{what}; {format_count(ranks, 'rank')} take{'s' * (ranks == 1)} {format_size(need)} for torch alone",
            "the kernel kills a rank with SIGKILL (exit code -9), and the others wait for it", more if size < need else _WHO_HAS_IT, "R3"
        )  # fmt: skip
        found.insert(0, lack)
    elif left < min(_TIGHT_BYTES, _TIGHT_SHARE * whole):
        found.insert(0, warn(what, "a rank that needs more is killed with SIGKILL (exit code -9)", _WHO_HAS_IT, "R3"))
    yield from found or [ok(what, free=int(left), size=int(size))]


def _check_others(host: Host, info: dict[str, int]) -> Iterator[Reading]:
    """Report processes that were killed, memory that has gone to swap, and a kernel that promises no more than it has."""
    kills, swapped = count_oom_kills(host), info.get("SwapTotal", 0) - info.get("SwapFree", 0)
    if kills:
        yield warn(
            f"the kernel has killed {format_count(kills, 'process', 'processes')} of this container or session for lack of memory",
            "a rank or a data-loading worker that is killed this way ends with SIGKILL (exit code -9), silently", MORE_MEMORY, "R3"
        )  # fmt: skip
    if swapped > _GIB and info["MemAvailable"] < 0.1 * info["MemTotal"]:
        yield warn(
            f"{format_size(swapped)} have gone to swap, and {format_size(info['MemAvailable'])} of memory are free",
            "a rank whose memory is on disk is many times slower, and all wait for it", _WHO_HAS_IT
        )  # fmt: skip
    left = info.get("CommitLimit", 0) - info.get("Committed_AS", 0)
    is_strict = host.read("/proc/sys/vm/overcommit_memory") == "2"
    if is_strict and left < 8 * _GIB * (host.job.num_ranks or 1):
        yield warn(
            f"the kernel does not overcommit memory (vm.overcommit_memory=2), and {format_size(left)} can still be committed",
            "CUDA and workers reserve much more than they use: `Cannot allocate memory` with memory free", "sudo sysctl vm.overcommit_memory=0"
        )  # fmt: skip


PROBE = Probe("memory", "memory left for the job", "resources", "instant", look, classes=("R3",))
