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
    raise UsageError(f"there is no cluster {on!r}")
