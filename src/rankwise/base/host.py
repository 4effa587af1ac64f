"""What this host offers, read without torch: cores allowed to us, GPUs, who holds a port."""

from __future__ import annotations

import math
import os
import socket
from contextlib import suppress
from pathlib import Path

from rankwise.base.environ import get

_ROOT = Path("/")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def own_cgroups(root: Path | None = None) -> dict[str, str]:
    """Return this process's cgroup path by controller; the unified hierarchy stands under ''.

    Args:
        root: Where the host's files are; ``/`` without.
    """
    found = {}
    for line in _read((root or _ROOT) / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        for controller in controllers.split(","):
            found[controller] = path or "/"
    return found


def list_cgroups(controller: str, root: Path | None = None) -> list[Path]:
    """List the folders of our group of a controller (``cpu``, ``memory``, ``pids``) and of those around it, ours first: any may set a limit.

    ``root`` is where the host's files are. In a container the path may be that of the host outside: what is seen of it
    is the root.
    """
    groups, top, found = own_cgroups(root), (root or _ROOT) / "sys/fs/cgroup", list[Path]()
    for base, path in ((top / controller, groups.get(controller, "/")), (top, groups.get("", "/"))):
        here = base / path.lstrip("/")
        found += [one for one in (here, *here.parents) if one.is_relative_to(base) and one.is_dir()]
    return found


def find_cpu_quota(root: Path | None = None) -> float:
    """Return the CPUs' worth of time that the cgroups allow us; infinity without a limit.

    ``root`` is where the host's files are.
    """
    quotas = [math.inf]
    for folder in list_cgroups("cpu", root):
        first = f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"
        limit = (_read(folder / "cpu.max") or first).split()
        if len(limit) == 2 and all(one.isdigit() for one in limit) and int(limit[1]):
            quotas.append(int(limit[0]) / int(limit[1]))
    return min(quotas)


def count_cores() -> int:
    """Count the cores that this job may use: affinity and cgroup quota counted, hyper-threads not."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores, quota = count_cores_of(cpus), find_cpu_quota()
    return cores if math.isinf(quota) else max(1, min(cores, math.ceil(quota)))


def count_cores_of(cpus: set[int] | list[int], root: Path | None = None) -> int:
    """Count the cores that processors belong to; ``root`` is where the host's files are.

    Two threads of one core share its arithmetic units: a second compute thread there gains nothing.
    """
    topology = (root or _ROOT) / "sys/devices/system/cpu"
    return len({_read(topology / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus})


def share_cores(num_ranks: int) -> int | None:
    """Return how many threads each rank of this host should compute with; None: as many as libraries take by themselves.

    A rank that is alone is left to them, as torchrun does, unless a cgroup gives it fewer cores than they would see.
    """
    if num_ranks == 1 and math.isinf(find_cpu_quota()):
        return None
    return max(1, count_cores() // num_ranks)


def count_gpus() -> int:
    """Count the NVIDIA GPUs that a rank would see, without waking a driver; 0 where that can't be told."""
    # A container without GPUs sees those of its host in /proc, and has no devices.
    if not Path("/dev/nvidiactl").exists():
        return 0
    present = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    visible = get("CUDA_VISIBLE_DEVICES", "all")
    if visible == "all":
        return present
    counted = 0
    for name in (name.strip() for name in visible.split(",")):
        # CUDA stops reading at the first entry that names no device.
        if not (name.startswith(("GPU-", "MIG-")) or (name.isdecimal() and int(name) < present)):
            break
        counted += 1
    return counted


def is_loopback(host: str) -> bool:
    """Tell whether a host name can only mean this very host, without asking a name server."""
    name = host.strip("[]").lower()
    return name in {"localhost", "::1", "0:0:0:0:0:0:0:1", "ip6-localhost"} or name.startswith("127.")


def is_unspecified(host: str) -> bool:
    """Tell whether a host name is the address that means all of a host's own: to connect there is to connect to oneself."""
    return host.strip("[]") in {"0.0.0.0", "0", "::", "0:0:0:0:0:0:0:0"}


def find_port_holder(port: int, *, proc: Path = Path("/proc")) -> str:
    """Say who listens on a TCP port: ``"pid 123 (python train.py)"``; empty if nobody does.

    Args:
        port: The port.
        proc: Where the kernel tells of its processes.
    """
    inodes = set()
    for table in ("net/tcp", "net/tcp6"):
        for line in _read(proc / table).splitlines()[1:]:
            field = line.split()
            if field[3] == "0A" and int(field[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(f"socket:[{field[9]}]")
    if not inodes:
        return ""
    for process in proc.glob("[0-9]*"):
        if inodes.intersection(_list_open(process)):
            command = " ".join(_read(process / "cmdline").replace("\0", " ").split())
            return f"pid {process.name} ({command[:80]})"
    return "a process of another user"


def _list_open(process: Path) -> list[str]:
    links = []
    with suppress(OSError):  # gone, or another user's
        for fd in (process / "fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                links.append(str(fd.readlink()))
    return links


def listen_tcp(host: str, port: int) -> socket.socket:
    """Bind and listen, so that early clients wait in the queue instead of being refused.

    Args:
        host: ``"127.0.0.1"`` for this host only; an empty string for all its addresses, IPv6 included.
        port: The port; 0 lets the system choose.

    Raises:
        OSError: The port is taken, or the address is not ours.
    """
    if not host and socket.has_dualstack_ipv6():
        # A port that is held on one family only fails here: the plain attempt below tells the truth.
        with suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=2048, dualstack_ipv6=True)
    return socket.create_server((host, port), backlog=2048)
