"""Space in /dev/shm, through which data-loading workers and NCCL pass their data.

**Why it matters.** The workers of a `DataLoader` hand each batch to the training process in a file in `/dev/shm`, and NCCL keeps the
buffers of ranks on one host there. Where it is full, a worker or a rank is killed by SIGBUS (exit code -7), without an exception.
Docker gives a container 64 MiB.

**How it is checked.** The size of the file system, what is free in it, and whether your user may write to it. Nothing is
written.

**What to do.** Where files fill it, remove those that dead processes have left. Where it is small, give it more: `docker run --shm-size=16g` or
`--ipc=host`; in Kubernetes an `emptyDir` with `medium: Memory` at `/dev/shm`; elsewhere `mount -o remount,size=16g /dev/shm`.
Never more than half of the host's memory: beyond that, the kernel kills processes instead (SIGKILL).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

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
_LOOK = (
    "du -ah /dev/shm | sort -h | tail  # the largest files: remove what dead processes have left",
    "# rankwise-… belongs to a running job, and is removed with its launcher; files without a name end with the processes that have them open",
)


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
        yield _report_full(info, size, free, more)
    elif more:
        yield warn(
            info, "workers that pass large batches fill it, and die with SIGBUS (exit code -7)", more, "X16", facts={"size": size, "free": free}
        )  # fmt: skip
    else:
        yield ok(info, size=size, free=free)


def _report_closed(host: Host) -> Reading:
    mount = find_mount(host, _SHM)
    what, says = "/dev/shm can't be written to by your user", "Permission denied"
    fix = "sudo chmod 1777 /dev/shm"
    if mount is not None and mount.point == _SHM and mount.is_read_only:
        what, says = "/dev/shm is mounted read-only", "Read-only file system"
        fix = "sudo mount -o remount,rw /dev/shm"
    if host.is_container:
        fix += "  # on the host, for Apptainer; or start the container without a volume of its own at /dev/shm"
    why = f"data-loading workers, locks of multiprocessing, and NCCL between ranks of one host end with `{says}`"
    return fail(what, why, fix, "X16")


def _report_full(info: str, size: int, free: int, more: str) -> Reading:
    is_used_up = free < size // 2
    fix = [more, *_LOOK] if is_used_up and size < _TINY_BYTES else [*(_LOOK if is_used_up else ()), more]
    return Reading(
        "fail" if is_used_up else "warn", info, "data-loading workers, and NCCL between ranks of one host, die there with SIGBUS (exit code -7)",
        "\n".join(line for line in fix if line), "X16", facts={"size": size, "free": free}
    )  # fmt: skip


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
    grow = f"sudo mount -o remount,size={number}{unit} /dev/shm"
    if not host.is_container:
        return grow
    if host.is_pod:
        return f"# a volume at /dev/shm in the pod's spec: emptyDir: {{medium: Memory, sizeLimit: {number}{unit.upper()}i}}"
    return f"docker run --shm-size={number}{unit} …  # or --ipc=host; for Apptainer, on the host: {grow}"


PROBE = Probe("shared-memory", "space in /dev/shm", "resources", "instant", look, classes=("X16",))
