"""Collectives on anything: nested containers of tensors, numbers and objects, compared between the ranks before data moves.

Objects are pickled. They travel only between the ranks of the job, which run the same code anyway, over the connections
that torch.distributed made for them; nothing is ever unpickled that came from a file or from outside the job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rankwise.base.errors import UsageError
from rankwise.runtime.data_movement import all_gather, broadcast, broadcast_, gather
from rankwise.runtime.differentiable import all_gather_with_grad, all_reduce_with_grad
from rankwise.runtime.eager import eager
from rankwise.runtime.groups import Group, new_group, read_seconds, resolve_group
from rankwise.runtime.preallocated import all_gather_into, gather_into
from rankwise.runtime.reductions import all_reduce, all_reduce_, reduce, reduce_scatter
from rankwise.runtime.scattering import all_to_all, scatter
from rankwise.runtime.signature import agree, locate, set_checking

if TYPE_CHECKING:
    from datetime import timedelta

__all__ = [
    "Group",
    "all_gather",
    "all_gather_into",
    "all_gather_with_grad",
    "all_reduce",
    "all_reduce_",
    "all_reduce_with_grad",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_",
    "gather",
    "gather_into",
    "new_group",
    "reduce",
    "reduce_scatter",
    "scatter",
    "set_checking",
]


@eager
def barrier(name: str | None = None, *, timeout_s: float | timedelta | None = None, group: Group | None = None) -> None:
    """Wait until every rank has arrived, and the earlier work of the device is done.

    The line of the call is not compared: ranks rightly reach it from different lines, as in "rank 0 downloads first".

    Args:
        name: The name of the barrier; ranks with different names raise.
        timeout_s: Seconds to wait for the slowest rank; None: the group's.
        group: The group; None: all ranks.

    Raises:
        CollectiveError: A rank is in another collective, or in a barrier of another name.
        CollectiveTimeoutError: Some rank did not arrive; names it. The same call may be made again, and continues to
            wait.
        UsageError: ``timeout_s`` is not a time.

    Collective: every rank of the group must call this, in the same order.
    """
    members = resolve_group(group)
    given_s = None if timeout_s is None else read_seconds(timeout_s)
    if timeout_s is not None and given_s is None:
        raise UsageError(
            f"barrier: timeout_s is {timeout_s!r}",
            rank=members.rank,
            hint="pass seconds above 0, or a timedelta",
        )
    if members.device.type not in {"cpu", "meta"}:
        torch.accelerator.synchronize()
    must = {"name": None if name is None else str(name)}
    # `may` is there so that a barrier is one too where comparing is off.
    agree(members, "barrier", site=locate(), must=must, may="", timeout_s=given_s)
