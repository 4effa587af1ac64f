"""Processes and files that earlier jobs have left.

**Why it matters.** A launcher that was killed leaves its ranks and their data-loading workers: they hold GPUs, memory and ports
(`CUDA out of memory`, `address already in use`), and take cores from the next job. Batches that they were passing stay in `/dev/shm` until somebody
removes them.

**How it is looked at.** A process counts if process 1 has adopted it and it is a rank that torchrun or rankwise has started, a worker of a `DataLoader`,
or a child of `multiprocessing`; services and what you have sent to the background do not. A file in `/dev/shm` counts if it has the name that torch or NCCL
give theirs, is yours, and no process has it open. Other users' processes and files can't be judged, except by root.

**What to do.** Kill the processes by number, remove the files. Jobs of `rankwise run` leave none: their ranks end with the launcher.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from rankwise.doctor.limits.processes import is_left_over, list_processes
from rankwise.doctor.probe import Probe
from rankwise.doctor.reading import Reading, ok

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rankwise.doctor.host import Host

_MIB = 1 << 20
#: What is less is no reason to look.
_MUCH_BYTES = 256 * _MIB
_MOST_NAMES = 20
#: torch, NCCL, Python's shared memory.
_NAMES = re.compile(r"(torch_\d+_\d+_\d+|nccl-\w{6}|psm_[0-9a-f]{8})")
#: The kernel's own number of the first namespace of processes: elsewhere other containers may use a file, and can't be seen.
_FIRST_NAMESPACE = "pid:[4026531836]"


def look(host: Host) -> Iterator[Reading]:
    """Tell which processes and files are left over."""
    left = [one for one in list_processes(host, parent=1) if is_left_over(host, one)]
    if left:
        shown = "; ".join(map(str, left[:4])) + (f"; and {len(left) - 4} more" if len(left) > 4 else "")
        stuck = sum(one.state == "D" for one in left)
        note = f"\n# {stuck} are stuck in the kernel (state D) until a reboot" if stuck else ""
        yield Reading(
            verdict="warn", what=f"{len(left)} processes of jobs whose launcher is gone: {shown}", class_id="R5",
            why="they hold GPUs, memory and ports: `CUDA out of memory`, `address already in use`",
            fix=f"kill {' '.join(str(one.pid) for one in left[:_MOST_NAMES])}{note}",
        )  # fmt: skip
    files = _list_dead_files(host)
    size = sum(files.values())
    if size >= _MUCH_BYTES:
        names = sorted(files, key=lambda name: -files[name])[:_MOST_NAMES]
        yield Reading(
            verdict="warn", what=f"{len(files)} files in /dev/shm that no process has open, {size // _MIB} MiB", class_id="R5",
            why="they take memory, and room that workers and NCCL need: a full /dev/shm kills them with SIGBUS (exit code -7)",
            fix="rm " + " ".join(f"/dev/shm/{name}" for name in names) + _warn_of_others(host),
        )  # fmt: skip
    elif not left:
        yield ok(
            "no processes of jobs whose launcher is gone"
            + (f"; {len(files)} forgotten files in /dev/shm, {size // 1024} KiB" if files else "")
        )


def _list_dead_files(host: Host) -> dict[str, int]:
    """Return the files of dead processes in /dev/shm by name, with their sizes in bytes."""
    own = getattr(os, "getuid", lambda: -1)()
    found: dict[str, int] = {}
    for name in host.names("/dev/shm"):
        if not _NAMES.fullmatch(name):
            continue
        try:
            told = host.path(f"/dev/shm/{name}").lstat()
        except OSError:
            continue
        if told.st_uid == own:
            found[name] = told.st_blocks * 512
    if sum(found.values()) < _MUCH_BYTES:
        return {
            name: size
            for name, size in found.items()
            if name.startswith("torch_") and not host.has(f"/proc/{name.split('_')[1]}")
        }
    used = _list_used(host)
    return {name: size for name, size in found.items() if name not in used}


def _list_used(host: Host) -> set[str]:
    """Return the names of files in /dev/shm that a process has open, or mapped."""
    used: set[str] = set()
    for pid in host.names("/proc"):
        if not pid.isdecimal():
            continue
        used.update(re.findall(r" /dev/shm/(\S+)$", _read_maps(host.path(f"/proc/{pid}/maps")), re.MULTILINE))
        for fd in host.names(f"/proc/{pid}/fd"):
            try:
                target = str(host.path(f"/proc/{pid}/fd/{fd}").readlink())
            except OSError:
                continue
            if "/dev/shm/" in target:
                used.add(target.rpartition("/dev/shm/")[2])
    return used


def _read_maps(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _warn_of_others(host: Host) -> str:
    try:
        is_first = str(host.path("/proc/self/ns/pid").readlink()) == _FIRST_NAMESPACE
    except OSError:
        is_first = False
    return "" if is_first else "  # if no other container shares this /dev/shm"


PROBE = Probe(
    id="leftovers",
    title="processes and files of earlier jobs",
    topic="limits",
    speed="quick",
    look=look,
    classes=("R5", "I9", "X16"),
)
