"""Ask living ranks what they are doing, at the moment when another one has failed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.base.files import read_all
from rankwise.base.os_calls import STACK_SIGNAL, STACKS_FD, listens_to
from rankwise.evidence.reader.notes import Stack, parse_stack, split_crash

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwise.base.clock import Clock


def listens(pid: int) -> bool:
    """Tell whether a process catches our signal: one that does not would die of it."""
    return listens_to(pid, STACK_SIGNAL)


def _still_holds(pid: int, fd: int) -> bool:
    """Tell whether the rank's descriptor is still our file: a script may have closed it, and opened its own there."""
    try:
        return os.path.samestat(os.fstat(fd), Path(f"/proc/{pid}/fd/{STACKS_FD}").stat())
    except OSError:
        return False


def take_stacks(ranks: Mapping[int, tuple[int, int]], clock: Clock, timeout_s: float = 0.2) -> dict[int, Stack]:
    """Ask ranks for their stacks, all at once.

    Args:
        ranks: By global rank: (pid, descriptor of its stack file). The pid must not be reaped yet.
        clock: Where the time comes from.
        timeout_s: When to stop waiting; a rank that is stopped or swapped out does not answer.

    Returns:
        The main thread's stack of each rank that answered.
    """
    before, stacks = {}, {}
    for rank, (pid, fd) in ranks.items():
        if STACK_SIGNAL is None or not listens(pid) or not _still_holds(pid, fd):
            continue
        before[rank] = len(read_all(fd))
        try:
            os.kill(pid, STACK_SIGNAL)
        except OSError:
            del before[rank]
    end, size = clock.monotonic() + timeout_s, dict.fromkeys(before, -1)
    while size and clock.monotonic() < end:
        clock.sleep(0.004)
        for rank in list(size):
            text, _ = split_crash(read_all(ranks[rank][1])[before[rank] :])
            # The text comes in many small writes and has no end mark: take it when it has stopped growing.
            if text.endswith("\n") and len(text) == size[rank]:
                del size[rank]
            else:
                size[rank] = len(text)
            if stack := parse_stack(text):
                stacks[rank] = stack
    return stacks
