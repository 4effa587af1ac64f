"""What keeps a process from being a warm server: tracers, threads, devices, names that the script has too.

It stands alone, as ``server.py`` does, and is loaded by path.
"""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel", "/dev/davinci", "/dev/neuron")
#: What in a sitecustomize would be another thing in the server than in a rank: Debian's and Ubuntu's has none of it.
_PER_PROCESS = re.compile(r"environ|getenv|getpid|getppid|print\(|open\(|write\(|logging|Thread|socket|time\.")
# jemalloc (in pyarrow, so in pandas and datasets) is made for this: a forked child cleans up in the foreground.
_FORK_SAFE = frozenset({"jemalloc_bg_thd"})


def find_watcher() -> str:
    """Tell what traces this process since its start: it would see the server, and only one of the ranks."""
    monitoring = getattr(sys, "monitoring", None)
    tools = [monitoring.get_tool(number) for number in range(6)] if monitoring else []
    if tool := next((tool for tool in tools if tool), None):
        return f"{tool} watches every Python from its start"
    for name in ("ddtrace", "debugpy", "pydevd"):
        if name in sys.modules:
            return f"{name} is loaded into every Python at its start"
    if sys.gettrace() is not None or sys.getprofile() is not None:
        return "a tracer watches every Python from its start"
    return ""


def list_importable(folder: str, names: Container[str]) -> Iterator[tuple[str, str]]:
    """Give name and path of each module or package of one of these names that lies directly in a folder."""
    import importlib.machinery

    suffixes = tuple(importlib.machinery.all_suffixes())
    try:
        entries = sorted(os.listdir(folder or "."))
    except OSError:
        return
    for entry in entries:
        path = os.path.join(folder, entry)
        if entry.endswith(suffixes):
            suffix = max((suffix for suffix in suffixes if entry.endswith(suffix)), key=len)
            if (name := entry[: -len(suffix)]) in names:
                yield name, path
        elif entry in names:
            for suffix in suffixes:
                if os.path.isfile(os.path.join(path, f"__init__{suffix}")):
                    yield entry, os.path.join(path, f"__init__{suffix}")
                    break


def list_threads() -> list[str] | None:
    """Return the names of this process's threads, the main one first; None if the system hides them."""
    try:
        tasks = sorted(os.listdir("/proc/self/task"), key=int)
    except OSError:
        return None
    names = []
    for task in tasks:
        try:
            with open(f"/proc/self/task/{task}/comm") as file:
                names.append(file.read().strip())
        except OSError:
            continue
    return names or None


def count_threads() -> int:
    """Return the number of this process's threads; 0 if the system hides them."""
    return len(list_threads() or ())


def _list_descriptors() -> Iterator[tuple[str, str]]:
    for fd in os.listdir("/proc/self/fd"):
        try:
            yield fd, os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue


def find_bad_fork() -> str:
    """Tell, in a forked child, which device library was set up before the fork; it would refuse to work here."""
    torch = sys.modules.get("torch")
    for name in ("cuda", "xpu", "mtia", "mps"):
        is_bad = getattr(getattr(torch, name, None), "_is_in_bad_fork", None)
        if callable(is_bad) and is_bad():
            return f"an import set up torch.{name}, which a forked process can't use"
    return ""


def find_thread_or_device(owners: str) -> str:
    """Tell which thread or device this process has that a forked child would lack; empty if none.

    Args:
        owners: The imports that started threads.
    """
    threads = list_threads()
    if threads is None:
        return "the threads of a process can't be counted: /proc does not show them"
    if lost := sorted(set(threads[1:]) - _FORK_SAFE):
        return f"{owners} started threads ({', '.join(lost)}), and a fork would lose them"
    for fd, target in _list_descriptors():
        if target.startswith(_DEVICES):
            return f"an import opened {target} (descriptor {fd}), and a fork can't share a device"
    return ""


def find_site_obstacle() -> str:
    """Tell what in a sitecustomize of the environment's own acts for each process; empty if there is nothing."""
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec("sitecustomize")
    if spec is None or spec.origin is None:
        return ""
    try:
        with open(spec.origin, encoding="utf-8", errors="replace") as file:
            found = _PER_PROCESS.search(file.read())
    except OSError:
        return ""
    return f"{spec.origin} acts for each process: {found[0]}" if found else ""
