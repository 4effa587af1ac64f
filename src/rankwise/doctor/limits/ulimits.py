"""The limits of a process (``ulimit``) and of its control group, and how each is raised."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from rankwise.doctor.host import Host

_CAP_SYS_RESOURCE, _MANY_FILES = 24, 65536
#: By the name in /proc/self/limits: the shell's option, and the name for PAM, Docker and, in capitals, systemd.
_NAMES = {
    "Max open files": ("n", "nofile"),
    "Max processes": ("u", "nproc"),
    "Max locked memory": ("l", "memlock"),
    "Max address space": ("v", "as"),
    "Max cpu time": ("t", "cpu"),
    "Max file size": ("f", "fsize"),
}


@final
@dataclass(frozen=True, slots=True)
class Limit:
    """A limit, infinity for none: ``soft`` counts, and up to ``hard`` anybody may raise it."""

    soft: float = math.inf
    hard: float = math.inf


def read_limits(text: str) -> dict[str, Limit]:
    """Read /proc/self/limits: the limits by name."""
    found = {}
    for line in text.splitlines():
        cells = re.split(r"\s{2,}", line.strip())
        if len(cells) > 2 and all(cell.isdigit() or cell == "unlimited" for cell in cells[1:3]):
            found[cells[0]] = Limit(*(float(cell.replace("unlimited", "inf")) for cell in cells[1:3]))
    return found


def raise_limit(host: Host, limits: Mapping[str, Limit], name: str, *, least: float = math.inf) -> str:
    """Return what raises a limit of /proc/self/limits to ``least``, or away, for a fix."""
    option, word = _NAMES[name]
    hard = limits.get(name, Limit()).hard
    # Programs that close all files that could be open would be busy for minutes with a limit of a billion.
    if word == "nofile" and hard >= _MANY_FILES:
        return f"ulimit -Sn {_MANY_FILES}"
    if hard >= least:
        return f"ulimit -{option} unlimited" if math.isinf(hard) else f'ulimit -{option} "$(ulimit -H{option})"'
    if has_capability(host, _CAP_SYS_RESOURCE):
        most = _MANY_FILES if word == "nofile" else "unlimited"  # open files can't be unlimited
        return f"ulimit -{option} {most}  # root may go beyond the hard limit"
    return (
        f"# ulimit -{option} can't go beyond the hard limit. It is raised where it is set: {word} in /etc/security/limits.conf, Limit{word.upper()}= of the "
        f"service (of slurmd under Slurm, of containerd under Kubernetes), docker run --ulimit {word}=…"
    )


def has_capability(host: Host, number: int) -> bool:
    """Return whether this process may do what root may, as far as one capability goes."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", host.read("/proc/self/status"), re.MULTILINE)
    return bool(found and int(found[1], 16) >> number & 1) and is_among_all_users(host)


def is_among_all_users(host: Host) -> bool:
    """Return whether this process sees the users of the whole host: root of a user namespace is nobody where the kernel's limits count."""
    # A kernel without such namespaces has no such file.
    return host.read("/proc/self/uid_map").split() in ([], ["0", "0", "4294967295"])


#: How a limit of the control group is raised.
MORE_MEMORY = "# fewer ranks or workers, or more memory: sbatch --mem=…, docker run --memory=…, resources.limits.memory of Kubernetes, MemoryMax= of systemd"
MORE_PROCESSES = "# fewer ranks or workers, or more processes: docker run --pids-limit=-1, podPidsLimit of Kubernetes, TasksMax= of systemd"
