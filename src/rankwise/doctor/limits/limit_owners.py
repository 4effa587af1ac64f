"""Who sets the limits of this process: a container, Kubernetes, Slurm, or systemd. There they are raised, and nowhere else."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from rankwise.doctor.host import Host

#: Empty: a plain host, or a container that does not tell.
Container: TypeAlias = Literal["kubernetes", "apptainer", "docker", "podman", ""]
LimitOwner: TypeAlias = Literal["kubernetes", "apptainer", "docker", "podman", "slurm", "systemd", ""]
_APPTAINER = ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")


def find_container(host: Host) -> Container:
    """Return what kind of container this is, as far as it tells."""
    if "KUBERNETES_SERVICE_HOST" in host.env or host.has("/var/run/secrets/kubernetes.io"):
        return "kubernetes"
    if any(name in host.env for name in _APPTAINER) or host.has("/.singularity.d"):
        return "apptainer"
    if host.has("/run/.containerenv"):
        return "podman"
    return "docker" if host.has("/.dockerenv") else ""


def find_limit_owner(host: Host) -> LimitOwner:
    """Return who holds this process to its limits; of a job of Slurm it is Slurm, whatever container it is in.

    Apptainer sets none itself: those of the host outside count, where they are raised, too.
    """
    if "SLURM_JOB_ID" in host.env:
        return "slurm"
    inside = find_container(host)
    if inside:
        return inside
    is_unit = re.search(r"\.(service|scope|slice)\b", host.read("/proc/self/cgroup"))
    return "systemd" if is_unit else ""


def suggest_more_memory(host: Host) -> str:
    """Return how the limit of memory is raised here."""
    owner = find_limit_owner(host)
    if owner == "slurm":
        return "sbatch --mem=… …  # or #SBATCH --mem=… in the job's script; or fewer ranks or workers"
    if owner in {"docker", "podman"}:
        return f"{owner} run --memory=… …  # or fewer ranks or workers"
    if owner == "kubernetes":
        return "# more in resources.limits.memory of the pod, or fewer ranks or workers"
    if owner == "systemd":
        return "systemctl status $$  # names the service or session whose MemoryMax= is to be raised; or fewer ranks or workers"
    return "# fewer ranks or workers, or more memory: sbatch --mem=…, docker run --memory=…, resources.limits.memory of Kubernetes"


def suggest_more_processes(host: Host) -> str:
    """Return how the group's limit of processes and threads is raised here."""
    owner = find_limit_owner(host)
    if owner in {"docker", "podman"}:
        return f"{owner} run --pids-limit=-1 …"
    if owner == "kubernetes":
        return "# podPidsLimit of the kubelet's configuration on the node, or fewer ranks or workers"
    if owner == "systemd":
        return "systemctl status $$  # names the service or session whose TasksMax= is to be raised; or fewer ranks or workers"
    return "# fewer ranks or workers, or more processes: TasksMax= of systemd, docker run --pids-limit=-1, podPidsLimit of Kubernetes"
