"""Huge pages for the process that `rankwise.testing.run_ranks` forks ranks from: see `rankwise.warm.huge_pages`, which the resident servers do by themselves."""

from __future__ import annotations

import sys

from rankwise.warm.huge_pages import gather

_gathered: set[int] = set()


def gather_forkserver() -> None:
    """Gather the memory of that process, once it is there."""
    module = sys.modules.get("multiprocessing.forkserver")
    pid = getattr(getattr(module, "_forkserver", None), "_forkserver_pid", None)
    if pid is not None and pid not in _gathered:
        _gathered.add(pid)
        gather(pid)
