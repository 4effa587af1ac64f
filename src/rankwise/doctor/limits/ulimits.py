"""The limits of a process (``ulimit``), who sets them, and how each is raised: in the shell up to the hard limit, and beyond by whoever set that."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, final

from rankwise.doctor.host import Host

_CAP_SYS_RESOURCE = 24
_MANY_FILES = 65536
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
    """Return what raises a limit of /proc/self/limits to ``least``, or away, to be typed."""
    option, word = _NAMES[name]
    hard = limits.get(name, Limit()).hard
    if math.isinf(hard) and word != "nofile":
        return f"ulimit -{option} unlimited"
    if word == "nofile" and hard >= _MANY_FILES:
        # Programs that close all files that could be open would be busy for minutes with a hard limit of a billion.
        return f"ulimit -Sn {_MANY_FILES}"
    if hard >= least:
        return f'ulimit -{option} "$(ulimit -H{option})"'
    # Open files can't be unlimited; the kernel's own bound is above this number on any system.
    most = str(_MANY_FILES) if word == "nofile" else "unlimited"
    if has_capability(host, _CAP_SYS_RESOURCE):
        return f"ulimit -{option} {most}  # root may go beyond the hard limit"
    return _raise_beyond(host, option, word, most)


def _raise_beyond(host: Host, option: str, word: str, most: str) -> str:
    """Return what raises a hard limit, which only whoever has set it can do."""
    owner = find_limit_owner(host)
    unit = f"Limit{word.upper()}={most.replace('unlimited', 'infinity')}"
    beyond = f"# ulimit -{option} can't go beyond the hard limit"
    if owner == "kubernetes" or (owner in {"docker", "podman"} and word == "as"):
        return f"{beyond}, which is that of the container's runtime: {unit} of its service (containerd, docker) on the node"
    if owner == "apptainer":
        return f"{beyond}, which is that of the host outside: raise it there, before the container starts ({unit} of a service, or /etc/security/limits.conf)"
    if owner in {"docker", "podman"}:
        most = most.replace("unlimited", "-1")
        return f"{owner} run --ulimit {word}={most}:{most} …"
    if owner == "slurm":
        return f"{beyond}, which is that of Slurm: {unit} of slurmd's service on the nodes, and ulimit -{option} in the shell that calls sbatch"
    return (
        f'echo "$(id -un) - {word} {most}" | sudo tee -a /etc/security/limits.conf'
        f"  # and log in again; of a service: {unit}; of a container: docker run --ulimit"
    )


def has_capability(host: Host, number: int) -> bool:
    """Return whether this process may do what root may, as far as one capability goes."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", host.read("/proc/self/status"), re.MULTILINE)
    return bool(found and int(found[1], 16) >> number & 1) and is_among_all_users(host)


def is_among_all_users(host: Host) -> bool:
    """Return whether this process sees the users of the whole host: root of a user namespace is nobody where the kernel's limits count."""
    # A kernel without such namespaces has no such file.
    return host.read("/proc/self/uid_map").split() in ([], ["0", "0", "4294967295"])


def find_limit_owner(host: Host) -> str:
    """Return who holds this process to its limits: ``slurm``, whatever container it is in; a kind of container; ``systemd``; empty if none of them.

    Apptainer sets none itself: those of the host outside count, where they are raised, too.
    """
    if "SLURM_JOB_ID" in host.env:
        return "slurm"
    if host.container:
        return host.container
    is_unit = re.search(r"\.(service|scope|slice)\b", host.read("/proc/self/cgroup"))
    return "systemd" if is_unit else ""


#: How a limit of the control group is raised, by who holds this process to it; under the empty name where nobody tells.
_MORE = {
    "memory": {
        "slurm": "sbatch --mem=… …  # or #SBATCH --mem=… in the job's script; or fewer ranks or workers",
        "docker": "docker run --memory=… …  # or fewer ranks or workers",
        "podman": "podman run --memory=… …  # or fewer ranks or workers",
        "kubernetes": "# more in resources.limits.memory of the pod, or fewer ranks or workers",
        "systemd": "systemctl status $$  # names the service or session whose MemoryMax= is to be raised; or fewer ranks or workers",
        "": "# fewer ranks or workers, or more memory: sbatch --mem=…, docker run --memory=…, resources.limits.memory of Kubernetes",
    },
    "processes": {
        "docker": "docker run --pids-limit=-1 …",
        "podman": "podman run --pids-limit=-1 …",
        "kubernetes": "# podPidsLimit of the kubelet's configuration on the node, or fewer ranks or workers",
        "systemd": "systemctl status $$  # names the service or session whose TasksMax= is to be raised; or fewer ranks or workers",
        "": "# fewer ranks or workers, or more processes: TasksMax= of systemd, docker run --pids-limit=-1, podPidsLimit of Kubernetes",
    },
}


def suggest_more(host: Host, what: Literal["memory", "processes"]) -> str:
    """Return how the group's limit of memory, or of processes and threads, is raised here."""
    return _MORE[what].get(find_limit_owner(host), _MORE[what][""])
