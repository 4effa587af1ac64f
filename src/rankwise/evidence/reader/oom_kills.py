"""Did the kernel kill for lack of memory? The cgroups count it; a bare -9 does not say."""

from __future__ import annotations

import re
from pathlib import Path

from rankwise.base.host import own_cgroups


def count_oom_kills() -> int | None:
    """Return how often the kernel has killed for memory in our cgroup; None where it isn't told."""
    groups = own_cgroups()
    candidates = [
        Path("/sys/fs/cgroup") / groups.get("", "/").lstrip("/") / "memory.events",
        Path("/sys/fs/cgroup/memory") / groups.get("memory", "/").lstrip("/") / "memory.oom_control",
        Path("/sys/fs/cgroup/memory.events"),
        Path("/sys/fs/cgroup/memory/memory.oom_control"),
    ]
    for path in candidates:
        try:
            found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
        except OSError:
            continue
        if found:
            return int(found[1])
    # Without a limit of our own the host's counter is the one that moves.
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None
