"""The module of each kind of cluster, imported when it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.base.errors import UsageError

if TYPE_CHECKING:
    from rankwise.cluster.cluster import Cluster


def find(on: str) -> Cluster:
    """Return the cluster of a name in `job.CLUSTERS`; each is a branch, so that the type checker sees its module.

    Raises:
        UsageError: There is none.
    """
    if on == "local":
        from rankwise.cluster import local  # noqa: PLC0415 - only the one that is used

        return local
    if on == "ssh":
        from rankwise.cluster import ssh  # noqa: PLC0415 - only the one that is used

        return ssh
    if on == "kubernetes":
        from rankwise.cluster import kubernetes  # noqa: PLC0415 - only the one that is used

        return kubernetes
    if on == "ray":
        from rankwise.cluster import ray_jobs  # noqa: PLC0415 - only the one that is used

        return ray_jobs
    if on == "slurm":
        from rankwise.cluster import slurm  # noqa: PLC0415 - only the one that is used

        return slurm
    raise UsageError(f"there is no cluster {on!r}")
