"""Space in /dev/shm, through which data-loading workers and NCCL pass their data.

**Why it matters.** The workers of a `DataLoader` hand each batch to the training process in a file in `/dev/shm`, and NCCL keeps the
buffers of ranks on one host there. Where it is full, a worker or a rank is killed by SIGBUS (exit code -7), without an exception.
Docker gives a container 64 MiB.

**How it is checked.** The size of the file system, what is free in it, and whether your user may write to it. Where it is full, the sizes of
its files are summed up; nothing is written.

**What to do.** Where files fill it, remove those that dead processes have left. Where it is small, give it more: `docker run --shm-size=16g` or
`--ipc=host`; in Kubernetes an `emptyDir` with `medium: Memory` at `/dev/shm`; elsewhere `mount -o remount,size=16g /dev/shm`.
Never more than half of the host's memory: beyond that, the kernel kills processes instead (SIGKILL).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

from rankwise.doctor.host import Host
from rankwise.doctor.probe import Probe, Reading, fail, ok, skipped, warn
from rankwise.doctor.storage.mounts import find_mount

_SHM = "/dev/shm"
_MIB = 1 << 20
#: A rank of NCCL takes some 10 MiB for each peer on its host, a worker twice a batch; below this jobs die.
_TIGHT_BYTES, _FULL_BYTES = 1024 * _MIB, 64 * _MIB
#: Emptied, it still would be next to full.
_TINY_BYTES = 2 * _FULL_BYTES
#: What is enough for any job, where the memory is there.
_AMPLE_BYTES = 16 * 1024 * _MIB
#: The probe runs before each start: of more files the rest is not looked at.
_MOST_FILES, _MOST_NAMES = 5000, 3
#: What a launcher of rankwise keeps there, and removes itself.
_OWN = "rankwise-"
_REMOVED_BY_US = "# what is called rankwise-… belongs to a running job, and is removed with its launcher, or when the next one starts"
#: Apptainer and Singularity mostly bind it from the host.
_OUTSIDE = "/dev/shm is usually the host's, outside the container; there"
_WHO_HAS_IT = r"find /proc/[0-9]*/fd /proc/[0-9]*/map_files -lname '/dev/shm/*' -printf '%h %l\n' 2>/dev/null | sort -u  # who has what open there"


def look(host: Host) -> Iterator[Reading]:
    usage = host.usage(_SHM)
    if usage is None:
        yield skipped("there is no /dev/shm", "this system does shared memory differently")
        return
    if host.has(_SHM) and not host.may_write(_SHM):
        yield _report_closed(host)
        return
    size, free = usage
    if not size:
        yield ok("/dev/shm has no limit of its own", size=size, free=free)
        return
    info = f"/dev/shm has {size // _MIB} MiB, {free // _MIB} MiB of it free"
    more = _describe_more(host, size) if size < _TIGHT_BYTES else ""
    if free < _FULL_BYTES and (more or free < size // 2):
        yield _report_full(host, info, size, free, more)
    elif more:
        yield warn(
            info, "workers that pass large batches fill it, and die with SIGBUS (exit code -7)", more, "X16", facts={"size": size, "free": free}
        )  # fmt: skip
    else:
        yield ok(info, size=size, free=free)


def _report_closed(host: Host) -> Reading:
    mount, container = find_mount(host, _SHM), host.container
    what, says = "/dev/shm can't be written to by your user", "Permission denied"
    fix = "sudo chmod 1777 /dev/shm"
    if mount is not None and mount.point == _SHM and mount.is_read_only:
        what, says = "/dev/shm is mounted read-only", "Read-only file system"
        fix = "sudo mount -o remount,rw /dev/shm"
    if container == "apptainer":
        fix = f"# {_OUTSIDE}: {fix}"
    elif container:
        fix += "  # or start the container without a volume of its own at /dev/shm"
    why = f"data-loading workers, locks of multiprocessing, and NCCL between ranks of one host end with `{says}`"
    return fail(what, why, fix, "X16")


def _report_full(host: Host, info: str, size: int, free: int, more: str) -> Reading:
    what, fix, is_used_up = info, [more], free < size // 2
    if is_used_up:
        held, clear = _describe_held(host, size - free)
        what = f"{info}; {held}" if held else info
        later = [f"# or more space: {more.removeprefix('# ')}"] if more else []
        fix = [more, *clear] if size < _TINY_BYTES else [*clear, *later]
    return Reading(
        "fail" if is_used_up else "warn", what, "data-loading workers, and NCCL between ranks of one host, die there with SIGBUS (exit code -7)",
        "\n".join(line for line in fix if line), "X16", facts={"size": size, "free": free}
    )  # fmt: skip


def _describe_held(host: Host, used: int) -> tuple[str, list[str]]:
    """Describe what fills it, and how it can be emptied: what can be removed in remarks, as nobody here knows whether it is needed."""
    sizes, is_all = _measure(host)
    by_size = sorted(sizes, key=lambda name: -sizes[name])[:_MOST_NAMES]
    large = [name for name in by_size if sizes[name] >= used // 10]
    info = [f"{ascii(name)[1:-1]} takes {sizes[name] // _MIB} MiB" for name in large]
    nameless = used - sum(sizes.values())
    if is_all and nameless > used // 2:
        # torch's workers remove the names of their files at once.
        freed = "which are freed when the processes that have them open end"
        info.append(f"{nameless // _MIB} MiB are in files without a name, {freed}")
    folders = {name for name in large if host.path(f"{_SHM}/{name}").is_dir()}
    sudo = "" if getattr(os, "geteuid", lambda: 0)() == 0 else "sudo "
    fix = ["ls -lhS /dev/shm | head  # the largest, and whose they are"] * bool(large)
    fix = [*(["du -ah /dev/shm | sort -h | tail  # the largest"] if folders else fix), sudo + _WHO_HAS_IT]
    own = [name for name in large if name.startswith(_OWN)]
    # Another name could be more than a name to a shell.
    plain = [name for name in large if name not in own and re.fullmatch(r"\w[\w.+=@-]*", name, re.ASCII)]
    if plain:
        rm, paths = "rm -r" if folders & set(plain) else "rm", " ".join(f"{_SHM}/{name}" for name in plain)
        fix.append(f"# what no process has open or needs can be deleted: {rm} {paths}")
    if own:
        fix.append(_REMOVED_BY_US)
    return ", ".join(info), fix


def _measure(host: Host) -> tuple[dict[str, int], bool]:
    """Return the bytes of files and folders there by name, and whether everything has been seen."""
    top = host.path(_SHM)
    sizes: dict[str, int] = {}
    unread: list[OSError] = []
    seen = 0
    for folder, _, files in os.walk(top, onerror=unread.append):
        inside = Path(folder).relative_to(top).parts
        for file in files:
            if seen >= _MOST_FILES:
                return sizes, False
            seen += 1
            try:
                info = Path(folder, file).lstat()
            except OSError:
                continue
            name = inside[0] if inside else file
            # A file of two names is counted twice: that is rare, and the order stays.
            sizes[name] = sizes.get(name, 0) + getattr(info, "st_blocks", 0) * 512
    return sizes, not unread


def _describe_more(host: Host, size: int) -> str:
    """Return how it gets more room than it has; empty where there is no memory for more."""
    from rankwise.doctor.limits.cgroups import find_memory_room  # noqa: PLC0415 - asked before each start, where mostly all is well

    found = re.search(r"^MemTotal:\s+(\d+) kB", host.read("/proc/meminfo"), re.MULTILINE)
    memory = min(int(found[1]) * 1024 if found else math.inf, find_memory_room(host)[0])
    # Files of more than the memory would have the kernel kill processes. Half of it is what a plain host gives from the
    # start, or next to that.
    most = int(min(_AMPLE_BYTES, memory / 2))
    if most <= size * 1.1:
        return ""
    number, unit = (most >> 30, "g") if most >= 1 << 30 else (most // _MIB, "m")
    container = host.container
    if container == "kubernetes":
        return f"# a volume at /dev/shm in the pod's spec: emptyDir: {{medium: Memory, sizeLimit: {number}{unit.upper()}i}}"
    grow = f"sudo mount -o remount,size={number}{unit} /dev/shm"
    if container == "apptainer":
        return f"# {_OUTSIDE}: {grow}"
    if container:
        return f"{container} run --shm-size={number}{unit} …  # or --ipc=host"
    return f"{grow}  # in a container: docker run --shm-size={number}{unit} …"


PROBE = Probe("shared-memory", "space in /dev/shm", "resources", "instant", look, classes=("X16",))
