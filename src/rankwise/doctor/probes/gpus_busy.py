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
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwise.doctor.gpu.nvidia import run_smi, to_int
from rankwise.doctor.limits.processes import is_inside, is_left_over, read_process
from rankwise.doctor.probe import Probe, Reading, ok
from rankwise.doctor.units import format_count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.doctor.gpu.nvidia import Gpu
    from rankwise.doctor.host import Host
    from rankwise.doctor.limits.processes import Process

#: A driver, a display and a monitor hold less.
_SMALL_MIB = 1024
#: With so much of the memory taken a job can hardly start.
_FULL = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holder:
    pid: int
    used_mib: int
    process: Process | None


def look(host: Host) -> Iterator[Reading]:
    """Report which processes hold memory on which GPU."""
    cards = host.cards
    if not cards.gpus:
        yield cards.skip()
        return
    holders = _list_holders(host)
    is_quiet = True
    for gpu in cards.gpus:
        own = holders.get(gpu.uuid, [])
        ours = sum(one.used_mib for one in own if is_inside(host, one.pid, os.getpid()))
        others = [
            one
            for one in own
            if one.used_mib >= _SMALL_MIB // 2 and not is_inside(host, one.pid, os.getpid())
        ]
        orphans = [one for one in others if one.process is not None and is_left_over(host, one.process)]
        if orphans or gpu.used_mib - ours >= max(_SMALL_MIB, gpu.memory_mib // 20):
            is_quiet = False
            yield _report(gpu, others, orphans, gpu.used_mib - ours)
    if is_quiet:
        yield ok(f"no other process holds memory on {format_count(len(cards.gpus), 'GPU')}")


def _report(gpu: Gpu, others: list[_Holder], orphans: list[_Holder], used_mib: int) -> Reading:
    held = "; ".join(f"{one.process or f'pid {one.pid}'}: {one.used_mib} MiB" for one in others)
    who = held or "by processes that can't be seen from here: another container's, or another user's"
    is_full = used_mib > _FULL * gpu.memory_mib
    what = f"GPU {gpu.index}: {used_mib} of {gpu.memory_mib} MiB are taken: {who}"
    if orphans:
        return Reading(
            verdict="fail" if is_full else "warn", what=f"{what}; the launcher of {len(orphans)} of them is gone", class_id="R5",
            why="left over from an earlier job: a new one ends with `CUDA out of memory`, or is slowed down by it",
            fix="kill " + " ".join(str(one.pid) for one in orphans),
        )  # fmt: skip
    return Reading(
        verdict="fail" if is_full else "warn", what=what, why="a rank there ends with `CUDA out of memory`, or is slower than the others, and all wait for it",
        fix="nvidia-smi  # whose it is; or choose other GPUs: CUDA_VISIBLE_DEVICES=… rankwise run …",
    )  # fmt: skip


def _list_holders(host: Host) -> dict[str, list[_Holder]]:
    ran = run_smi(host, "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits")
    found: dict[str, list[_Holder]] = {}
    for line in ran.out.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 3 and cells[1].isdigit():
            pid = int(cells[1])
            found.setdefault(cells[0], []).append(
                _Holder(pid=pid, used_mib=to_int(cells[2]), process=read_process(host, pid))
            )
    return found


PROBE = Probe("gpus-busy", "who holds memory on the GPUs", "gpu", "slow", look, classes=("R5",))
