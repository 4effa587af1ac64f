"""The limits of a process that break jobs: open files, processes, locked memory, and time.

**Why it matters.** A `DataLoader` with workers passes each tensor as an open file: `Too many open files`, or `received 0 items of ancdata`. A
container that allows few processes ends in `can't start new thread`. NCCL over InfiniBand locks its buffers in memory:
`ibv_reg_mr failed with error Cannot allocate memory`. Login nodes often limit the processor time, or the size of a file: the kernel kills the rank
without a message from Python.

**How it is checked.** `/proc/self/limits`, the control group's limit of processes, and whether there is an InfiniBand card. A rank gets the limits
of the shell, the batch system or the container that starts it.

**What to do.** `ulimit` in the shell that starts the job, `/etc/security/limits.conf` for good, `docker run --ulimit`, or your batch system's setting.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator

from rankwise.doctor.host import Host
from rankwise.doctor.limits.cgroups import find_process_room
from rankwise.doctor.limits.ulimits import (
    MORE_PROCESSES,
    Limit,
    has_capability,
    is_among_all_users,
    raise_limit,
    read_limits,
)
from rankwise.doctor.probe import Probe, Reading, ok, skipped, warn
from rankwise.doctor.units import format_bytes

_GIB = 1 << 30
#: What any Linux allows; a worker's batch of many tensors takes some hundreds.
_FEW_FILES, _MANY_WORKERS = 1024, 8
#: A rank of torch has some ten threads of its own; a worker has about five, and its own of Gloo and NCCL come with each
#: peer.
_RANK_THREADS, _WORKER_THREADS = 30, 5
_CAP_IPC_LOCK = 14


def look(host: Host) -> Iterator[Reading]:
    limits = read_limits(host.read("/proc/self/limits"))
    if not limits:
        yield skipped("this system does not report its limits", "there is no /proc/self/limits")
        return
    checks = (_check_files, _check_processes, _check_memory, _check_kills)
    files, processes = (_describe(limits.get(name, Limit()).soft) for name in ("Max open files", "Max processes"))
    locked = _describe_bytes(limits.get("Max locked memory", Limit()).soft)
    fine = ok(f"{files} open files, {processes} processes, {locked} of locked memory")
    yield from [one for check in checks for one in check(host, limits)] or [fine]


def _check_files(host: Host, limits: dict[str, Limit]) -> Iterator[Reading]:
    files = limits.get("Max open files", Limit()).soft
    workers = host.job.num_workers or 0
    if files < _FEW_FILES or (files <= _FEW_FILES and workers >= _MANY_WORKERS):
        beside = f", and {workers} workers of each rank" if workers else ""
        yield warn(
            f"a process may open {_describe(files)} files{beside}",
            "data-loading workers pass each tensor as an open file: `Too many open files`, or `received 0 items of ancdata`",
            raise_limit(host, limits, "Max open files", least=_FEW_FILES + 1)
        )  # fmt: skip


def _check_processes(host: Host, limits: dict[str, Limit]) -> Iterator[Reading]:
    need = (host.job.num_ranks or 1) * (_RANK_THREADS + _WORKER_THREADS * (host.job.num_workers or 0))
    limit, left = find_process_room(host)
    why = "`can't start new thread`, `Resource temporarily unavailable`, or `pthread_create failed`"
    if left < need:
        yield Reading(
            "fail" if left < need / 3 else "warn",
            f"this container or session allows {_describe(limit)} processes and threads, {_describe(left)} more than now; the ranks take about {need}",
            why, MORE_PROCESSES
        )  # fmt: skip
    allowed = limits.get("Max processes", Limit()).soft
    found = re.search(r"^Uid:\s*\d+\s+(\d+)", host.read("/proc/self/status"), re.MULTILINE)
    user = found[1] if found else str(getattr(os, "geteuid", lambda: 1)())
    # Root has no such limit, but root of a user namespace does.
    if allowed < need and not (user == "0" and is_among_all_users(host)):
        yield warn(
            f"your user may run {_describe(allowed)} processes and threads; the ranks take about {need}", why,
            raise_limit(host, limits, "Max processes", least=need)
        )  # fmt: skip


def _check_memory(host: Host, limits: dict[str, Limit]) -> Iterator[Reading]:
    locked = limits.get("Max locked memory", Limit()).soft
    has_card = any(name.startswith("uverbs") for name in host.names("/dev/infiniband"))
    if has_card and locked < _GIB and host.job.backend != "gloo" and not has_capability(host, _CAP_IPC_LOCK):
        is_sure = host.job.backend == "nccl" and host.job.num_nodes > 1
        yield Reading(
            "fail" if is_sure else "warn", f"a process may lock {_describe_bytes(locked)} of memory, and this host has an InfiniBand card",
            "NCCL can't register its buffers with the card: `ibv_reg_mr failed with error Cannot allocate memory`, `unhandled system error`",
            raise_limit(host, limits, "Max locked memory", least=_GIB)
        )  # fmt: skip
    space = limits.get("Max address space", Limit()).soft
    if not math.isinf(space):
        yield warn(
            f"a process may use {space / _GIB:.0f} GiB of addresses",
            "CUDA reserves more addresses than the host has memory, and torch maps large files: `Cannot allocate memory` with memory free",
            raise_limit(host, limits, "Max address space")
        )  # fmt: skip


def _check_kills(host: Host, limits: dict[str, Limit]) -> Iterator[Reading]:
    time, size = limits.get("Max cpu time", Limit()).soft, limits.get("Max file size", Limit()).soft
    if not math.isinf(time):
        fix = f"# on a login node: start the job through the batch system; elsewhere:\n{raise_limit(host, limits, 'Max cpu time')}"
        yield warn(
            f"a process may use {time / 60:.0f} min of processor time, as on a login node",
            "the kernel kills a rank that has used it up: SIGXCPU or SIGKILL, with no message from Python", fix, "R3"
        )  # fmt: skip
    if not math.isinf(size):
        what = f"a process may write files of {size / (1 << 20):.0f} MiB"
        why = "a larger checkpoint ends in `File too large`, or in SIGXFSZ"
        yield warn(what, why, raise_limit(host, limits, "Max file size"))


def _describe(limit: float) -> str:
    return "any number of" if math.isinf(limit) else f"{limit:.0f}"


def _describe_bytes(limit: float) -> str:
    return "any amount" if math.isinf(limit) else format_bytes(int(limit))


PROBE = Probe("limits", "limits of a process", "resources", "instant", look, classes=("R3",))
