"""What a process has from whoever started it, and can't give itself: two with the same facts may stand in for each other."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

_STATUS = (
    "Uid:", "Gid:", "Groups:", "NoNewPrivs:", "Seccomp:", "Seccomp_filters:", "Speculation_Store_Bypass:", "CapInh:", "CapPrm:", "CapEff:", "CapBnd:",
    "CapAmb:", "Cpus_allowed:", "Mems_allowed:", "THP_enabled:",
)  # fmt: skip
_FILES = (
    "cgroup",
    "oom_score_adj",
    "personality",
    "coredump_filter",
    "attr/current",
    "timerslack_ns",
    "loginuid",
    "sessionid",
)
#: The C library reads it at the start, for the stacks of threads.
_STACK = "Max stack size"
#: Fields of /proc/PID/stat, numbered as in proc(5): the policy of the scheduler and its priority.
_POLICY = (40, 41)

#: Python itself ignores two of these, and each side of ours sets the others as the ranks are to have them.
_OUR_SIGNALS = sum(
    1 << getattr(signal, name) - 1
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGPIPE", "SIGXFSZ")
    if hasattr(signal, name)
)


def read_process_facts(pid: int | str) -> dict[str, str]:
    """Return what a fork can't be given: user, capabilities, cgroup, namespaces, CPUs, scheduling; by name.

    Args:
        pid: The process; what it does not show is left out.
    """
    folder, facts = Path(f"/proc/{pid}"), dict[str, str]()
    for line in _read(folder / "status").splitlines():
        name, _, value = line.partition("\t")
        if name in _STATUS:
            facts[name.rstrip(":")] = value.strip()
        elif name in {"SigIgn:", "SigBlk:"}:
            facts[name.rstrip(":")] = hex(int(value, 16) & ~_OUR_SIGNALS)
    for name in _FILES:
        facts[name] = _read(folder / name).strip()
    for line in _read(folder / "limits").splitlines():
        if line.startswith(_STACK):
            facts["stack"] = " ".join(line.split()[3:5])
    fields = _read(folder / "stat").rpartition(")")[2].split()
    if fields:
        facts["scheduling"] = " ".join(fields[number - 3] for number in _POLICY)
    # The first part of the memory has the policy of the process, as `numactl --interleave` sets it.
    with suppress(OSError), (folder / "numa_maps").open("rb", buffering=0) as file:
        facts["memory"] = " ".join(file.read(200).decode().partition("\n")[0].split(" ")[1:2])
    for name in ("root", *(f"ns/{one}" for one in _list_namespaces(folder))):
        with suppress(OSError):
            facts[name] = str((folder / name).readlink())
    return facts


def read_tracer() -> int:
    """Return the pid of who traces this process, as strace and debuggers do; 0 if nobody does."""
    lines = _read(Path("/proc/self/status")).splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("TracerPid:")), 0)


def _list_namespaces(folder: Path) -> list[str]:
    with suppress(OSError):
        # What children of it get: `for_children` names a change that has not happened to the process itself.
        return sorted(name for name in os.listdir(folder / "ns") if not name.endswith("_for_children"))  # noqa: PTH208 - names
    return []


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
