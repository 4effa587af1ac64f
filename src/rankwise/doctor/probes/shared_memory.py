"""Room in /dev/shm, through which data-loading workers and NCCL pass their data.

**Why it matters.** The workers of a `DataLoader` hand each batch to the training process in a file in `/dev/shm`, and NCCL keeps the
buffers of ranks on one host there. Where it is full, a worker or a rank is killed by SIGBUS (exit code -7), without an exception.
Docker gives a container 64 MiB.

**How it is looked at.** The size of the file system, and what is free in it.

**What to do.** Give the container more: `docker run --shm-size=16g` or `--ipc=host`; in Kubernetes an `emptyDir` with `medium: Memory` at
`/dev/shm`. Files that dead processes have left can be removed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.doctor.probe import Probe
from rankwise.doctor.reading import Reading, ok, skipped

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.doctor.host import Host

_MIB = 1 << 20
#: A rank of NCCL takes some 10 MiB for each peer on its host, a worker twice a batch; below this jobs die.
_TIGHT_BYTES, _FULL_BYTES = 1024 * _MIB, 64 * _MIB


def look(host: Host) -> Iterator[Reading]:
    """Tell the size of /dev/shm and what is free in it."""
    usage = host.usage("/dev/shm")
    if usage is None:
        yield skipped("there is no /dev/shm", "this system passes shared memory in another way")
        return
    size, free = usage
    told = f"/dev/shm has {size // _MIB} MiB, {free // _MIB} MiB of it free"
    if free < _FULL_BYTES:
        is_small = size < _TIGHT_BYTES
        yield Reading(
            verdict="fail" if not is_small or free < size // 2 else "warn", what=told, class_id="X16",
            why="data-loading workers, and NCCL between ranks of one host, die there with SIGBUS (exit code -7)",
            fix="docker run --shm-size=16g …  # or --ipc=host" if is_small else "ls -lt /dev/shm  # and remove what dead processes have left",
            facts={"size": size, "free": free},
        )  # fmt: skip
    elif size < _TIGHT_BYTES:
        yield Reading(
            verdict="warn", what=told, class_id="X16", why="workers that hand over large batches fill it, and die with SIGBUS (exit code -7)",
            fix="docker run --shm-size=16g …  # or --ipc=host", facts={"size": size, "free": free},
        )  # fmt: skip
    else:
        yield ok(told, size=size, free=free)


PROBE = Probe(
    id="shared-memory", title="room in /dev/shm", topic="limits", speed="instant", look=look, classes=("X16",)
)
