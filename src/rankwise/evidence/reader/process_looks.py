"""Ranks that nobody watches, looked at twice: what the kernel tells of them, and what has not moved in between."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

from rankwise.evidence.reader.kernel_wait import find_wait
from rankwise.evidence.reader.process_state import (
    ProcessFacts,
    read_children,
    read_core_wait,
    read_process,
    reads_terminal,
    ticks_per_second,
)
from rankwise.evidence.reader.scene import Child, RankFacts

if TYPE_CHECKING:
    from collections.abc import Collection

    from rankwise.base.clock import Clock

#: Between the two looks: what has not moved for so long counts as still.
BETWEEN_LOOKS_S = 1.2
#: Who wakes from a sleep waits less than this for a core; who computes waits longer, for each time it rests.
_WAKING_S = 0.1


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLook:
    """A process at one moment.

    Attributes:
        at_s: The moment, monotonic.
        process: What the kernel tells; None if it has ended.
        core_wait: For how long it was ready to run and had no core, and how often it has let go of its own.
        children: What it has started.
    """

    at_s: float
    process: ProcessFacts | None
    core_wait: tuple[float, int] | None
    children: tuple[Child, ...] = ()


def look_at(pids: Collection[int], clock: Clock) -> dict[int, ProcessLook]:
    """Look at processes once."""
    children = read_children(pids)
    return {
        pid: ProcessLook(
            at_s=clock.monotonic(),
            process=read_process(pid),
            core_wait=read_core_wait(pid),
            children=children.get(pid, ()),
        )
        for pid in pids
    }


def find_share(was: ProcessLook, now: ProcessLook) -> float | None:
    """Return which share of a core a process has used, or would have used on a host with a core left for it."""
    if was.process is None or now.process is None or now.at_s <= was.at_s:
        return None
    used_s = (now.process.ticks - was.process.ticks) / ticks_per_second()
    if was.core_wait is not None and now.core_wait is not None:
        waited_s, num_rests = (after - before for before, after in zip(was.core_wait, now.core_wait, strict=True))
        if waited_s > _WAKING_S * num_rests:
            used_s += waited_s
    return used_s / (now.at_s - was.at_s)


def describe_rank(rank: int, pid: int, was: ProcessLook, now: ProcessLook, *, is_still: bool) -> RankFacts:
    """Return what two looks tell of a rank, apart from its evidence and its stack.

    Args:
        rank: Its number.
        pid: Its process.
        was: The first look.
        now: The second one.
        is_still: Whether it did nothing in between.
    """
    return RankFacts(
        rank=rank,
        pid=pid,
        state=now.process.state if now.process is not None else "ended",
        still_s=now.at_s - was.at_s if is_still and now.process is not None else 0.0,
        cpu_share=find_share(was, now),
        children=tuple(
            replace(child, still_s=now.at_s - was.at_s if child in was.children else 0.0) for child in now.children
        ),
        reads_terminal=(now.process is not None and now.process.is_traced) or reads_terminal(pid),
        awaits=find_wait(pid) if is_still else "",
    )
