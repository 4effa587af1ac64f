"""Who holds memory on the GPUs.

**Why it matters.** A rank of an earlier job that was not killed, or somebody else's notebook, keeps its memory on the GPU: a new job ends
with `CUDA out of memory` although it has run here before, or the rank on that GPU is slower than the others and all wait for it.

**How it is checked.** `nvidia-smi` lists the processes with their memory; the system shows whose they are and since when. A rank or a
data-loading worker whose launcher is gone is a leftover. What belongs to the calling job is left out. In a container other containers' processes can't
be seen; their memory can.

**What to do.** Kill leftovers by their PID. Ask the owners of other processes, or choose other GPUs by `CUDA_VISIBLE_DEVICES`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from rankwise.doctor.gpu.nvidia import Gpu, query_nvidia, run_smi, split_row, to_int
from rankwise.doctor.host import Host
from rankwise.doctor.limits.processes import is_inside, is_left_over, read_process
from rankwise.doctor.probe import Probe, Reading, ok
from rankwise.doctor.units import format_count

#: A driver, a display and a monitor hold less.
_SMALL_MIB = 1024
#: With so much of the memory taken a job can hardly start.
_FULL = 0.9


def look(host: Host) -> Iterator[Reading]:
    nvidia = host.ask(query_nvidia)
    if not nvidia.gpus:
        yield nvidia.skip()
        return
    ran = run_smi(host, "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits")
    rows = [cells for cells in map(split_row, ran.out.splitlines()) if len(cells) == 3 and cells[1].isdigit()]
    is_quiet = True
    for gpu in nvidia.gpus:
        held = {int(pid): to_int(used) for uuid, pid, used in rows if uuid == gpu.uuid}
        ours = {pid for pid in held if is_inside(host, pid, os.getpid())}
        others = {pid: used for pid, used in held.items() if used >= _SMALL_MIB // 2 and pid not in ours}
        processes = {pid: read_process(host, pid) for pid in others}
        orphans = [pid for pid, one in processes.items() if one is not None and is_left_over(host, one)]
        used_mib = gpu.used_mib - sum(held[pid] for pid in ours)
        if orphans or used_mib >= max(_SMALL_MIB, gpu.memory_mib // 20):
            is_quiet = False
            who = "; ".join(f"{processes[pid] or f'pid {pid}'}: {used} MiB" for pid, used in others.items())
            yield _report(gpu, who, orphans, used_mib)
    if is_quiet:
        yield ok(f"no other process holds memory on {format_count(len(nvidia.gpus), 'GPU')}")


def _report(gpu: Gpu, who: str, orphans: list[int], used_mib: int) -> Reading:
    who = who or "by processes that can't be seen from here: another container's, or another user's"
    what = f"GPU {gpu.index}: {used_mib} of {gpu.memory_mib} MiB are taken: {who}"
    why = "a rank there ends with `CUDA out of memory`, or is slower than the others, and all wait for it"
    fix = "nvidia-smi  # whose it is; or choose other GPUs: CUDA_VISIBLE_DEVICES=… rankwise run …"
    if orphans:
        what += f"; the launcher of {len(orphans)} of them is gone"
        why = "left over from an earlier job: a new one ends with `CUDA out of memory`, or is slowed down by it"
        fix = "kill " + " ".join(map(str, orphans))
    is_full = used_mib > _FULL * gpu.memory_mib
    return Reading("fail" if is_full else "warn", what, why, fix, "R5" if orphans else "")


PROBE = Probe("gpus-busy", "who holds memory on the GPUs", "gpu", "slow", look, classes=("R5",))
