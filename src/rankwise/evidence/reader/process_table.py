"""The processes of this host as /proc lists them: what each is called, whether it runs, who has started it. Nothing where there is no /proc."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The kernel's letters for a process that has ended.
DEAD = frozenset({"Z", "X"})


class ProcessStat(NamedTuple):
    """A process, or one of its threads, at one moment; the ``fields`` of /proc/PID/stat are those from the state on."""

    name: str
    state: str
    fields: list[bytes]

    @property
    def parent(self) -> int:
        """Its parent's number."""
        return int(self.fields[1])

    @property
    def ticks(self) -> int:
        """The CPU time that it has used, in clock ticks."""
        return int(self.fields[11]) + int(self.fields[12])


def read_stat(pid: int, thread: str | None = None) -> ProcessStat | None:
    """Return what the kernel tells of a process, or of a thread of it; None if it is gone or can't be seen."""
    at = pid if thread is None else f"{pid}/task/{thread}"
    try:
        with open(f"/proc/{at}/stat", "rb") as file:  # noqa: PTH123 - hot: thousands of files on a big host
            text = file.read()
    except OSError:
        return None
    # The name may hold anything, brackets and blanks too.
    head, _, rest = text.rpartition(b")")
    fields = rest.split()
    if not fields:
        return None
    name = head.partition(b"(")[2].decode("utf-8", "replace")
    return ProcessStat(name, fields[0].decode("ascii", "replace"), fields)


def list_processes() -> dict[int, ProcessStat]:
    """Return all processes that can be seen."""
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - hot, and /proc
    except OSError:
        return {}
    return {pid: stat for pid in pids if (stat := read_stat(pid)) is not None}


def list_below(pid: int, parents: Mapping[int, int]) -> list[int]:
    """Return all that a process has started, and what that has started, parents before children."""
    children: dict[int, list[int]] = {}
    for child, parent in parents.items():
        children.setdefault(parent, []).append(child)
    below = [pid]
    for one in below:
        below += children.pop(one, ())
    return below[1:]
