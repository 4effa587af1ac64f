"""Some ranks of the job as a group: who is in it, and what carries its tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist

from rankwise.base.deadline import OverdueError, call_within
from rankwise.base.errors import CollectiveError, CollectiveTimeoutError
from rankwise.base.rank_names import name_ranks
from rankwise.runtime.connecting import unbound
from rankwise.runtime.context import current
from rankwise.runtime.control import Control
from rankwise.runtime.signature import agree, locate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.runtime.context import RankContext

#: Numbers the groups of this process; equal on all ranks, as all of them make every group.
_numbers = count(1)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """Ranks that call collectives together; made by ``new_group``.

    Attributes:
        ranks: The global rank of each member, ascending.
        rank: Our own global rank, whether we are a member or not.
        device: Our own device.
        timeout_s: Seconds that a collective may wait for the slowest member.
        process_group: torch's; None if we are not a member.
        control: The members' side channel; None if we are not a member.
    """

    ranks: tuple[int, ...]
    rank: int
    device: torch.device
    timeout_s: float
    process_group: dist.ProcessGroup | None = field(repr=False)
    control: Control | None = field(repr=False)

    @property
    def size(self) -> int:
        """How many ranks are in it."""
        return len(self.ranks)

    @property
    def position(self) -> int:
        """Our place among ``ranks``."""
        return self.ranks.index(self.rank)


def resolve_group(group: Group | None) -> Group:
    """Return the group, or that of all ranks if it is None.

    Raises:
        UsageError: There is no job.
        CollectiveError: We are not in the group.
    """
    if group is None:
        return group_of(current())
    if group.control is None:
        raise CollectiveError(
            f"rank {group.rank} called a collective of a group that it is not in ({name_ranks(group.ranks)})",
            rank=group.rank,
            hint="ask `ctx.rank in group.ranks` first; only members may call",
        )
    return group


def group_of(ctx: RankContext) -> Group:
    """Return the group of all ranks of a job."""
    return Group(
        ranks=ctx.control.ranks,
        rank=ctx.rank,
        device=ctx.device,
        timeout_s=ctx.timeout_s,
        process_group=ctx.group,
        control=ctx.control,
    )


def read_seconds(value: Any) -> float | None:
    """Return a timeout in seconds, which torch takes as a ``timedelta``; None if it is none."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    return float(seconds) if is_number and 0 < seconds < math.inf else None


def choose_carrier(group: Group, device_type: str) -> torch.device:
    """Return the device on which tensors of this kind travel: their own if the backend takes them, else another.

    Args:
        group: Whose backend is asked.
        device_type: ``"cpu"``, ``"cuda"``, ...

    Returns:
        A device that the backend takes for every collective.
    """
    parts = _parse_backends(dist.get_backend_config(group.process_group))
    # Gloo takes CUDA tensors for all_reduce and broadcast only, and copies them to the host for that, as we do.
    if parts.get(device_type, "gloo") != "gloo":
        return find_home(group, device_type)
    return torch.device("cpu") if not parts or parts.get("cpu") or parts.get(device_type) else group.device


@cache
def _parse_backends(config: str) -> dict[str, str]:
    """Read ``"cpu:gloo,cuda:nccl"``."""
    return dict(part.split(":") for part in config.split(",") if ":" in part)


def find_home(group: Group, device_type: str) -> torch.device:
    """Return where a tensor that was on such a device at its sender is put here."""
    return group.device if group.device.type == device_type else torch.device(device_type)


def new_group(ranks: Sequence[int], *, timeout_s: float | timedelta | None = None) -> Group:
    """Make a group of some ranks.

    Args:
        ranks: Global ranks of the members, in any order, the same on every rank of the job.
        timeout_s: Seconds that its collectives may wait; None: as long as the job's. (torch.distributed.new_group uses
            the backend's own default, not that of init_process_group.)

    Returns:
        The group; on ranks outside it, one that only knows its members.

    Raises:
        CollectiveError: The ranks gave different lists, or a list names a rank that does not exist, or one twice.
        CollectiveTimeoutError: Some rank did not call; names it.

    Collective: every rank of the job must call this, in the same order, members or not.
    """
    world = resolve_group(None)
    given_s = world.timeout_s if timeout_s is None else read_seconds(timeout_s)
    bound_s = world.timeout_s if given_s is None else given_s
    members: list[Any] = list(ranks) if hasattr(ranks, "__iter__") else [ranks]
    fault = _find_fault(members, world)
    if given_s is None:
        hint = "pass seconds above 0, or a timedelta, the same on every rank"
        fault = CollectiveError(f"timeout_s is {timeout_s!r}", hint=hint)
    must = {"ranks": str(sorted(members, key=str)), "timeout": bound_s}
    agree(world, "new_group", site=locate(), must=must, fault=fault)
    members = sorted(int(rank) for rank in members)
    number = next(_numbers)
    made, side = _make(world, members, bound_s) if world.size > 1 else (world.process_group, None)
    store = dist.PrefixStore(f"group/{number}", current().store)
    control = Control(
        side if len(members) > 1 else None, ranks=members, rank=world.rank, store=store, timeout_s=bound_s
    )
    inside = world.rank in members
    return Group(
        ranks=tuple(members),
        rank=world.rank,
        device=world.device,
        timeout_s=bound_s,
        process_group=made if inside else None,
        control=control if inside else None,
    )


def _make(world: Group, members: list[int], bound_s: float) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Make the group that carries tensors and the one for the side channel, within a bound that Gloo alone lacks."""

    def make() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        if world.device.type not in {"cpu", "meta"}:
            torch.accelerator.set_device_index(world.device.index)  # this thread's own
        timeout = timedelta(seconds=bound_s)
        group = dist.new_group(members, timeout=timeout)
        with unbound():
            return group, dist.new_group(members, timeout=timeout, backend="gloo")

    try:
        return call_within(world.timeout_s, make)
    except OverdueError:
        raise CollectiveTimeoutError(
            f"new_group({name_ranks(members)}): its members were not connected after {world.timeout_s:.0f} s",
            rank=world.rank,
            hint="a member has stopped, or a firewall lets the job's port through but not the ranks' own",
        ) from None


def _find_fault(members: list[Any], world: Group) -> CollectiveError | None:
    wrong = [rank for rank in members if not isinstance(rank, int) or isinstance(rank, bool) or rank not in world.ranks]
    if not members:
        text, hint = "no ranks", "name one member at least; ranks outside still call with the same list"
    elif wrong:
        text = f"{wrong[0]!r}, which is not a rank of this job"
        hint = f"ranks are {name_ranks(world.ranks)}"
    elif len(set(members)) < len(members):
        twice = next(rank for rank in members if members.count(rank) > 1)
        text, hint = f"rank {twice} twice", "name each member once"
    else:
        return None
    return CollectiveError(f"new_group was given {text}", rank=world.rank, hint=hint)
