"""Who saves and loads together: the job that ``rankwise.init()`` has joined, torch's own group, or this process alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache, lru_cache
from itertools import count
from typing import TYPE_CHECKING, final

import torch.distributed as dist

from rankwise.runtime.context import find_current
from rankwise.runtime.control import Control

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.runtime.context import RankContext

#: A script that made its groups by itself has not told us how long collectives may take; this is torch's default.
_TIMEOUT_S = 1800.0


@final
@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """The ranks of a job.

    Attributes:
        rank: This one.
        world_size: How many.
        control: Compares and exchanges small things.
        store: The job's store, for what happens in the background.
        timeout_s: Seconds to wait for the slowest rank.
        members: Those that write into one folder with this one: all, or those of this host for copies in its memory.
        mains: The first rank of each folder.
        has_blank: Whether some rank has no folder.
        numbers: Numbers what the ranks do together, equal on all of them.
    """

    rank: int
    world_size: int
    control: Control
    store: dist.Store
    timeout_s: float
    members: tuple[int, ...]
    mains: tuple[int, ...] = (0,)
    has_blank: bool = False
    numbers: Iterator[int] = field(default_factory=count)

    @property
    def main(self) -> int:
        """The rank that commits what the members write."""
        return self.members[0]

    @property
    def is_main(self) -> bool:
        """Whether this is it."""
        return self.rank == self.main

    def of_folder(self, folder: str) -> Ranks:
        """Return the same ranks, parted by the folder that each writes into.

        Collective: every rank.
        """
        folders = self.control.exchange(folder, what="checkpoint.save (in whose memory?)")
        members = tuple(rank for rank, other in enumerate(folders) if other == folder)
        mains = tuple(sorted({folders.index(one) for one in folders}))
        return replace(self, members=members, mains=mains, has_blank="" in folders)


def find_ranks(ctx: RankContext | None = None) -> Ranks:
    """Find out who saves and loads together.

    Args:
        ctx: The job; None: the one that ``init()`` joined, or torch's default group, or this process.

    Collective: every rank, where torch's default group is met for the first time.
    """
    ctx = ctx or find_current()
    if ctx is not None:
        return _of_context(ctx)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return _of_torch(dist.group.WORLD)
    return find_alone()


@cache
def find_alone() -> Ranks:
    """Return this process as a job of its own."""
    store = dist.HashStore()
    control = Control(None, ranks=[0], rank=0, store=store, timeout_s=_TIMEOUT_S)
    return Ranks(0, 1, control, store, _TIMEOUT_S, (0,))


# One job at a time: the groups of an earlier one are gone.
@lru_cache(maxsize=1)
def _of_context(ctx: RankContext) -> Ranks:
    store = dist.PrefixStore("checkpoint", ctx.store) if ctx.world_size > 1 else dist.HashStore()
    return Ranks(ctx.rank, ctx.world_size, ctx.control, store, ctx.timeout_s, tuple(range(ctx.world_size)))


@lru_cache(maxsize=1)
def _of_torch(_group: dist.ProcessGroup | None) -> Ranks:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # Gloo, whatever the user's backend is, and a group of its own, so that nothing of the user's is paired with it.
    own = dist.new_group(backend="gloo", timeout=timedelta(seconds=_TIMEOUT_S))
    store = dist.PrefixStore("rankwise/checkpoint", dist.distributed_c10d._get_default_store())
    control = Control(own, ranks=range(world_size), rank=rank, store=store, timeout_s=_TIMEOUT_S)
    return Ranks(rank, world_size, control, store, _TIMEOUT_S, tuple(range(world_size)))
