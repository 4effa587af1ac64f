"""Who a process is in its job, read from the variables of whatever started it.

torchrun's names win, as whoever sets them stands nearest to the process. After them come mpirun (Open MPI, MPICH, Intel MPI, MVAPICH2),
an srun step, Flux, other process managers that speak PMI, TF_CONFIG, SageMaker, an indexed Kubernetes job and SkyPilot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.base.errors import UsageError
from rankwise.base.identity_clusters import (
    read_kubernetes,
    read_sagemaker,
    read_skypilot,
    read_tf_config,
)
from rankwise.base.identity_facts import Identity, read_int
from rankwise.base.identity_launchers import (
    read_flux,
    read_hydra,
    read_mvapich,
    read_open_mpi,
    read_pmi,
    read_slurm,
    read_torch,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["Identity", "read_all", "read_identity", "read_int"]

#: From the nearest to the farthest.
_READERS = (
    read_torch, read_open_mpi, read_hydra, read_mvapich, read_slurm, read_flux, read_pmi, read_tf_config, read_sagemaker, read_kubernetes, read_skypilot,
)  # fmt: skip


def read_identity(env: Mapping[str, str]) -> Identity | None:
    """Return who this process is, as the first launcher tells that has left complete traces in ``env``.

    Args:
        env: The environment.

    Returns:
        The identity; None if no variable says that this process is one of several.

    Raises:
        UsageError: Variables are incomplete, contradict each other, or are no numbers.
    """
    for reader in _READERS:
        identity = reader(env)
        if identity is not None:
            _check(identity)
            return identity
    return None


def read_all(env: Mapping[str, str]) -> Iterator[Identity | UsageError]:
    """Yield what each launcher tells that has left traces in ``env``, the winner first; what can't be read is the error."""
    for reader in _READERS:
        try:
            identity = reader(env)
        except UsageError as error:
            yield error
        else:
            if identity is not None:
                yield identity


def _check(it: Identity) -> None:
    rank, world = it.names
    if it.world_size < 1:
        raise UsageError(
            f"{world}={it.world_size}: a job has at least one rank",
            hint=f"set {world} to the number of processes",
        )
    if it.rank < 0:
        raise UsageError(
            f"{rank}={it.rank}: ranks are 0 to {it.world_size - 1}", hint=f"give each process its own {rank}"
        )
    if it.local_rank is not None and it.local_world_size is not None and not 0 <= it.local_rank < it.local_world_size:
        raise UsageError(
            f"[{it.source}] local rank {it.local_rank} with {it.local_world_size} rank{'s' * (it.local_world_size != 1)} on this host",
            rank=it.rank,
            hint=f"LOCAL_RANK is 0 to LOCAL_WORLD_SIZE - 1 ({it.local_world_size - 1})",
        )
    if it.local_world_size is not None and it.local_world_size > it.world_size:
        raise UsageError(
            f"LOCAL_WORLD_SIZE={it.local_world_size} is more than {world}={it.world_size}",
            rank=it.rank,
            hint="LOCAL_WORLD_SIZE counts the ranks of this host, and WORLD_SIZE those of all hosts",
        )
