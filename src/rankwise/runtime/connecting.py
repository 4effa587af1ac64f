"""Make the process groups of a job, with a bound, and say who is in the way if that fails."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rankwise.base.deadline import OverdueError, call_within
from rankwise.base.errors import RendezvousError
from rankwise.base.log import get_logger
from rankwise.base.rank_names import name_ranks
from rankwise.evidence.in_rank.rendezvous_registry import Record, RendezvousRegistry, is_gone

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.base.identity import Identity
    from rankwise.runtime.stores import Place

_LOGGER = get_logger(__name__)

#: A peer may be a process that has just been started: connecting takes its time even where nothing is wrong.
_CONNECT_S = 60.0
_GRACE_S = 15.0
#: So many seconds are given before we look whether a peer has gone.
_CALM_S = 3
_ABANDON_S = 5.0
#: Where ranks say that they leave because of a peer.
_LEFT = "left for a peer"


def connect(
    it: Identity,
    place: Place,
    backend: str,
    device: torch.device,
    *,
    store: dist.Store,
    registry: dist.Store,
    timeout_s: float,
) -> dist.ProcessGroup | None:
    """Make the group of all ranks, and that of the side channel.

    Args:
        it: Who we are.
        place: Where we met, for errors.
        backend: As torch names it.
        device: Ours.
        store: Where the groups keep their addresses.
        registry: Where the registry of the rendezvous is.
        timeout_s: Of the groups.

    Returns:
        The side channel's group; None in a world of one.

    Raises:
        RendezvousError: The ranks could not connect; names those that have gone meanwhile.
    """
    timeout, is_late = timedelta(seconds=timeout_s), False
    # Bound to the device, NCCL connects here and now. To Gloo it is nothing, and torch would look for NCCL's methods
    # there.
    is_bound = device.type != "cpu" and find_carrier(backend, device.type) != "gloo"
    options: dict[str, Any] = {"device_id": device} if is_bound else {}

    def make() -> dist.ProcessGroup | None:
        if device.type != "cpu":
            torch.accelerator.set_device_index(device)  # the current device is a thread's own
        dist.init_process_group(
            backend, store=store, rank=it.rank, world_size=it.world_size, timeout=timeout, **options
        )
        side = dist.new_group(backend="gloo", timeout=timeout) if it.world_size > 1 else None
        if is_late:
            dist.destroy_process_group()  # nobody waits for it any more
        return side

    # Gloo's own connecting has no bound.
    bound_s = min(timeout_s, _CONNECT_S) + _GRACE_S
    peers = _Peers(registry, it.rank, clone=place.kind == "tcp")
    try:
        return call_within(bound_s, make, find_reason=peers.find_gone)
    except OverdueError as error:
        is_late = True
        reason = str(error) if peers.gone else f"did not all connect within {round(bound_s, 1):g} s"
    except RuntimeError as error:
        is_theirs = any(word in str(error).lower() for word in ("gloo", "connect"))
        if not isinstance(error, dist.DistError) and not is_theirs:
            _abandon()
            raise
        reason = peers.find_gone(at_once=True) or f"could not all connect: {str(error).splitlines()[0]}"
    peers.give_up()
    _abandon()
    hint = f"look at the output of {name_ranks(peers.gone)}" if peers.gone else (
        "a rank ended in between, a firewall keeps the ranks' own ports shut, or they listen on the wrong interface: "
        "set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the one that the hosts share"
    )  # fmt: skip
    raise RendezvousError(f"the {it.world_size} ranks joined at {place}, but {reason}", rank=it.rank, hint=hint)


def find_carrier(backend: str, device_type: str) -> str:
    """Return who carries a device's tensors: ``nccl`` in ``cpu:gloo,cuda:nccl``, and in ``nccl``."""
    parts = {part.rpartition(":")[0]: part.rpartition(":")[2] for part in backend.split(",")}
    return parts.get(device_type) or parts.get("", "gloo")


@contextmanager
def unbound() -> Iterator[None]:
    """Let a Gloo group of some ranks be made beside NCCL.

    Where the job's group is bound to a device, torch has the ranks outside a new group split NCCL's communicator,
    whatever carries the new one; its members do that for NCCL only, and are waited for in vain (pytorch#145376, torch
    2.5 to 2.13).
    """
    world: Any = dist.group.WORLD
    bound = getattr(world, "bound_device_id", None)
    if bound is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound


class _Peers:
    """The ranks that came to the rendezvous; looks which of them have ended, as far as that can be seen from here."""

    def __init__(self, registry: dist.Store, rank: int, *, clone: bool) -> None:
        self._registry, self._rank, self._clone = registry, rank, clone
        self._glances, self._records = 0, list[Record]()
        self.gone: list[int] = []

    def find_gone(self, *, at_once: bool = False) -> str:
        """Say who has gone; empty while nobody has."""
        self._glances += 1
        if self._glances < _CALM_S and not at_once:
            return ""
        with suppress(OverdueError, RuntimeError):
            self._records = self._records or call_within(_ABANDON_S, self._read)
        gone = [one["rank"] for one in self._records if one["rank"] != self._rank and is_gone(one)]
        # Who has left because of somebody else is not the one to look at.
        with suppress(OverdueError, RuntimeError):
            left = call_within(_ABANDON_S, partial(self._find_left, gone)) if len(gone) > 1 else set()
            gone = [rank for rank in gone if rank not in left] or gone
        self.gone = sorted(gone)
        return f"{name_ranks(self.gone)} ended before all were connected" if gone else ""

    def give_up(self) -> None:
        """Tell the others that this rank leaves because of a peer, before it does."""
        with suppress(OverdueError, RuntimeError):
            call_within(_ABANDON_S, lambda: self._open().set(f"{_LEFT}/{self._rank}", ""))

    def _find_left(self, ranks: list[int]) -> set[int]:
        store = self._open()
        return {rank for rank in ranks if store.check([f"{_LEFT}/{rank}"])}

    def _read(self) -> list[Record]:
        return RendezvousRegistry(self._open(), {}).read()

    def _open(self) -> dist.Store:
        # A connection of its own: while torch waits in one for a peer, nobody else gets a word in.
        return self._registry.clone() if self._clone else self._registry


def _abandon() -> None:
    """Leave nothing half made behind: the process may want to join again."""
    if not dist.is_initialized():
        return
    try:
        call_within(_ABANDON_S, dist.destroy_process_group)
    except (OverdueError, RuntimeError) as error:
        _LOGGER.warning(f"what was left of a process group could not be closed: {error}")
