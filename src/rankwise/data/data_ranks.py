"""Among how many ranks the data is dealt out, and which of them this process is, if nobody says."""

from __future__ import annotations

import torch.distributed as dist

from rankwise.base.environ import environ
from rankwise.base.errors import UsageError
from rankwise.base.identity import read_identity
from rankwise.runtime.context import find_current


def find_world(num_replicas: int | None = None, rank: int | None = None) -> tuple[int, int]:
    """Return how many ranks share the data, and which one this is: as given, else as the job says.

    Args:
        num_replicas: How many; None: as many shares of a batch as the job has that was joined by ``init()`` or by
            torch.distributed.
        rank: Which; None: the job's.

    Returns:
        Both numbers; 1 and 0 without a job.

    Raises:
        UsageError: The numbers don't fit, or the environment tells of several ranks and no job was joined: each
            of them would take every sample.
    """
    if num_replicas is None or rank is None:
        joined = _find_joined()
        if joined is None:
            joined = (1, 0)
            if num_replicas not in {None, 1} or rank not in {None, 0}:
                raise UsageError(
                    f"num_replicas={num_replicas} and rank={rank}, but there is no job that gives the other",
                    hint="give both, or call `rankwise.init()` first",
                )
            if num_replicas is None and rank is None:
                _check_alone()
        num_replicas = joined[0] if num_replicas is None else num_replicas
        rank = joined[1] if rank is None else rank
    if not 0 <= rank < num_replicas:
        raise UsageError(
            f"rank={rank} of num_replicas={num_replicas}",
            hint="ranks are 0 to num_replicas - 1; leave both out to have the job's",
        )
    return num_replicas, rank


def _find_joined() -> tuple[int, int] | None:
    context = find_current()
    if context is not None:
        return context.data_size, context.data_rank
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return None


def _check_alone() -> None:
    identity = read_identity(environ())
    if identity is not None and identity.world_size > 1:
        raise UsageError(
            f"{identity.names[1]}={identity.world_size} in the environment, and this process has joined no process group:"
            f" each of the {identity.world_size} ranks would take every sample",
            rank=identity.rank,
            hint="call `rankwise.init()` before you make the sampler, or give num_replicas and rank",
        )
