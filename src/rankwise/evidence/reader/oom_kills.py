"""Did the kernel kill for lack of memory? The cgroups count it; a bare -9 does not say."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from rankwise.base.host import list_cgroups


def count_oom_kills() -> int | None:
    """Return how often the kernel has killed for memory in our cgroup; None where it isn't told."""
    counters = [one / f"memory.{name}" for one in list_cgroups("memory") for name in ("events", "oom_control")]
    # Without a limit of our own the host's counter is the one that moves.
    for path in (*counters, Path("/proc/vmstat")):
        with suppress(OSError):
            if found := re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE):
                return int(found[1])
    return None
