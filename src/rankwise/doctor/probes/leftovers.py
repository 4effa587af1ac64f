"""Processes and files that earlier jobs left behind.

**Why it matters.** A launcher that was killed leaves its ranks and their data-loading workers: they hold GPUs, memory and ports
(`CUDA out of memory`, `address already in use`), and take cores from the next job. Batches that they were passing stay in `/dev/shm` until they
are removed.

**How it is checked.** A process counts if process 1 has adopted it and it is a rank that torchrun or rankwise has started, a worker of a `DataLoader`,
or a child of `multiprocessing`; services and what you have sent to the background do not, nor does what a rank of a living job has started: its
launcher is there, with the same job id and rendezvous in its ranks' variables. Where process 1 is a shell or Python, as in a
container, it may have started such processes itself: nothing is known of them. A file in `/dev/shm` counts if it has the name that torch or NCCL
give theirs, is yours, and no process has it open. Other users' processes and files can't be judged, except by root.

**What to do.** Kill the processes by PID, remove the files. Jobs of `rankwise run` leave none: their ranks end with the launcher.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress

from rankwise.doctor.host import Host
from rankwise.doctor.limits.processes import (
    Process,
    find_holdings,
    find_possible_launcher,
    list_left_over,
    list_suspects,
)
from rankwise.doctor.probe import Probe, Reading, ok, skipped, warn
from rankwise.doctor.units import format_count

_MIB = 1 << 20
#: What is less is no reason to look.
_MUCH_BYTES = 256 * _MIB
_MOST_NAMES = 20
#: torch, NCCL, Python's shared memory.
_NAMES = re.compile(r"(torch_\d+_\d+_\d+|nccl-\w{6}|psm_[0-9a-f]{8})")


def look(host: Host) -> Iterator[Reading]:
    suspects = list_suspects(host)
    left = list_left_over(host, suspects)
    if left:
        yield _report_left(host, left)
    files = _list_dead_files(host)
    size = sum(files.values())
    if size >= _MUCH_BYTES:
        names = sorted(files, key=lambda name: -files[name])[:_MOST_NAMES]
        yield warn(
            f"{format_count(len(files), 'file')} in /dev/shm that no process has open, {size // _MIB} MiB",
            "they take memory, and space that workers and NCCL need: a full /dev/shm kills them with SIGBUS (exit code -7)",
            "rm " + " ".join(f"/dev/shm/{name}" for name in names) + "  # if no other container shares this /dev/shm", "R5"
        )  # fmt: skip
    elif not left:
        first = find_possible_launcher(host)
        if suspects and first:
            yield skipped(
                f"{format_count(len(suspects), 'process', 'processes')} of jobs may be left over, or not: {_show(suspects)}",
                f"process 1 is {first}, which may have started them itself; a container that is started with --init tells them apart",
            )
        else:
            yield ok("no processes of jobs whose launcher is gone")


def _report_left(host: Host, left: list[Process]) -> Reading:
    stuck = sum(one.is_stuck for one in left)
    fix = f"kill {' '.join(str(one.pid) for one in left[:_MOST_NAMES])}"
    if stuck:
        fix += f"\n# {stuck} {'is' if stuck == 1 else 'are'} stuck in the kernel (state D) until a reboot"
    what = f"{format_count(len(left), 'process', 'processes')} of jobs whose launcher is gone: {_show(left)}"
    has_gpus, memory_bytes, ports = find_holdings(host, left)
    info = ["GPUs (`CUDA out of memory`)"] * has_gpus
    info += [f"{memory_bytes / (1 << 30):.1f} GiB of memory"] * (memory_bytes >= _MUCH_BYTES)
    noun = "port" if len(ports) == 1 else "ports"
    info += [f"{noun} {', '.join(map(str, ports[:4]))} (`address already in use`)"] * bool(ports)
    unseen = "no GPU, no port and little memory of theirs can be seen; they may still take cores from the next job"
    return warn(what, f"they hold {', '.join(info)}" if info else unseen, fix, "R5")


def _show(processes: list[Process]) -> str:
    more = f"; and {len(processes) - 4} more" if len(processes) > 4 else ""
    return "; ".join(map(str, processes[:4])) + more


def _list_dead_files(host: Host) -> dict[str, int]:
    """Return the files of dead processes in /dev/shm by name, with their sizes in bytes; none where they are small."""
    own = getattr(os, "getuid", lambda: -1)()
    found: dict[str, int] = {}
    for name in filter(_NAMES.fullmatch, host.names("/dev/shm")):
        with suppress(OSError):
            info = host.path(f"/dev/shm/{name}").lstat()
            found |= {name: info.st_blocks * 512} if info.st_uid == own else {}
    if sum(found.values()) < _MUCH_BYTES:
        return {}
    used = _list_used(host)
    return {name: size for name, size in found.items() if name not in used}


def _list_used(host: Host) -> set[str]:
    """Return the names of files in /dev/shm that a process has open, or mapped."""
    used: set[str] = set()
    for pid in filter(str.isdecimal, host.names("/proc")):
        maps = ""
        with suppress(OSError):
            maps = host.path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
        used.update(re.findall(r" /dev/shm/(\S+)$", maps, re.MULTILINE))
        for fd in host.names(f"/proc/{pid}/fd"):
            with suppress(OSError):
                used.add(str(host.path(f"/proc/{pid}/fd/{fd}").readlink()).partition("/dev/shm/")[2])
    return used


PROBE = Probe(
    "leftovers", "processes and files of earlier jobs", "resources", "quick", look, classes=("R5", "I9", "X16")
)
