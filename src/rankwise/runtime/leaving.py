"""What a rank waits for when it leaves its job: its background work, and the other ranks, with a bound."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import torch.distributed as dist

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.errors import RankwiseError
from rankwise.evidence.in_rank.rank_exit import let_threads_settle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.distributed import ProcessGroup, Store

#: The rank that serves the store waits so long for those that may still need it.
_LEAVE_S, _CONNECT_S, _POLL_S = 5.0, 2.0, 0.01


def finish_background(waits: Iterable[Callable[[], None]]) -> list[RankwiseError]:
    """Wait for what goes on in the background; return what went wrong there, the first with notes of the others."""
    troubles: list[RankwiseError] = []
    for wait in waits:
        try:
            wait()
        except RankwiseError as error:
            troubles.append(error)
    for other in troubles[1:]:
        # Python 3.10 has no notes.
        getattr(troubles[0], "add_note", sys.stderr.write)(f"and {type(other).__name__}: {other}\n")
    return troubles


def destroy_groups(store: Store, group: ProcessGroup | None, bound_s: float, *, awaited: int) -> None:
    """Destroy torch's groups once ``awaited`` ranks have made theirs: to a peer that still connects, a closed one is an error."""
    # A group goes when nobody holds it any more, and waits there for the work that is pending; that may be a DDP model
    # that goes after us, and waits with the interpreter's lock in hand.
    let_threads_settle(bound_s / 4)
    end = SYSTEM_CLOCK.monotonic() + _CONNECT_S
    with suppress(RuntimeError):
        while awaited and store.add("connected", 0) < awaited and SYSTEM_CLOCK.monotonic() < end:
            SYSTEM_CLOCK.sleep(_POLL_S)
    if dist.is_initialized() and dist.group.WORLD is group:
        dist.destroy_process_group()


def keep_for_ever(*objects: object) -> None:
    """Keep what must never be destroyed here: a group's destructor would wait for threads that a forked child has not got."""
    for one in objects:
        if one is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


def leave_store(store: Store, world_size: int, *, serves: bool) -> None:
    """Count ourselves out; whoever serves the store keeps it until the others are out too, or for some seconds."""
    with suppress(RuntimeError):
        store.add("left", 1)
        end = SYSTEM_CLOCK.monotonic() + _LEAVE_S
        while serves and store.add("left", 0) < world_size and SYSTEM_CLOCK.monotonic() < end:
            SYSTEM_CLOCK.sleep(_POLL_S)
