"""The control groups that this process stands in: their limits and counters, of both versions of Linux's interface."""

from __future__ import annotations

import math

from rankwise.base.host import list_cgroups, own_cgroups
from rankwise.doctor.host import Host


def list_groups(host: Host, controller: str) -> list[str]:
    """Return the folders of our group of a controller (``cpu``, ``memory``, ``pids``) and of those around it, ours first: any may set a limit."""
    return [f"/{one.relative_to(host.root)}" for one in list_cgroups(controller, host.root)]


def read_number(host: Host, path: str) -> float:
    """Return a file's number; infinity if it says ``max``, or is none, or so large that it means no limit."""
    text = host.read(path)
    number = float(text) if text.isdigit() else math.inf
    return number if number < 1 << 60 else math.inf


def read_counters(host: Host, path: str) -> dict[str, int]:
    """Return a file of names and numbers, one pair a line."""
    pairs = (line.split() for line in host.read(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def find_memory_room(host: Host) -> tuple[float, float]:
    """Return the tightest group's memory limit, and what it leaves, in bytes; infinity without a limit.

    The page cache that the kernel gives back when it is needed counts as left.
    """
    found = (math.inf, math.inf)
    is_first = "memory" in own_cgroups(host.root)
    top, used = ("limit_in_bytes", "usage_in_bytes") if is_first else ("max", "current")
    for folder in list_groups(host, "memory"):
        limit = read_number(host, f"{folder}/memory.{top}")
        if math.isinf(limit):
            continue
        counters = read_counters(host, f"{folder}/memory.stat")
        cache = counters.get("total_inactive_file" if is_first else "inactive_file", 0)
        left = limit - read_number(host, f"{folder}/memory.{used}") + cache
        if not math.isinf(left):
            found = min(found, (limit, left), key=lambda one: one[1])
    return found


def count_oom_kills(host: Host) -> int:
    """Count the processes of our own group that the kernel has killed for lack of memory; those of the whole host don't count."""
    own, groups = own_cgroups(host.root).get("memory"), list_groups(host, "memory")
    # The root of version 1 is the whole host's; that of version 2 has no such file, but in a container.
    if not groups or own == "/":
        return 0
    name = f"memory.{'oom_control' if own else 'events'}"
    return read_counters(host, f"{groups[0]}/{name}").get("oom_kill", 0)


def find_process_room(host: Host) -> tuple[float, float]:
    """Return the tightest group's limit of processes and threads, and how many more it allows; infinity without a limit."""
    found = (math.inf, math.inf)
    for folder in list_groups(host, "pids"):
        limit, used = read_number(host, f"{folder}/pids.max"), read_number(host, f"{folder}/pids.current")
        if not math.isinf(limit) and not math.isinf(used):
            found = min(found, (limit, limit - used), key=lambda one: one[1])
    return found
