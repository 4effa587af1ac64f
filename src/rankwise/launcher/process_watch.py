"""Watches what ranks have started themselves: whether it uses the CPU, and where it stands once it and its rank do nothing."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, final

from rankwise.evidence.reader.own_processes import list_asked, put_stacks, take_stacks
from rankwise.evidence.reader.process_state import (
    IDLE_SHARE,
    read_children,
    read_polling_ticks,
    ticks_per_second,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from rankwise.evidence.reader.pyspy import SpyDump
    from rankwise.evidence.reader.scene import Child, Scene

#: Over so long at least whether a process is at work is measured.
_BUSY_S = 0.9
#: Without CPU time for so long, ranks and their processes wait for something.
_IDLE_S = 5.0


@final
class ProcessWatch:
    """What is known of the processes below the ranks of one attempt."""

    def __init__(self) -> None:
        #: By process: when its CPU time was compared last, what it was, and since when it has used none.
        self._used: dict[int, tuple[float, int, float]] = {}
        #: By process: what its polling has used.
        self._polling: dict[int, int] = {}
        #: By process: when it was asked, and what was seen.
        self._dumps: dict[int, tuple[float, SpyDump | str]] = {}
        self._asking: threading.Thread | None = None

    def read_children(self, ranks: Collection[int], now_s: float) -> dict[int, tuple[Child, ...]]:
        """Return what ranks have started, with the time for which each has done nothing."""
        found = read_children(ranks)
        living = {child.pid for children in found.values() for child in children}
        self._used = {pid: used for pid, used in self._used.items() if pid in living}
        return {
            rank: tuple(replace(child, still_s=self._find_still(child, now_s)) for child in children)
            for rank, children in found.items()
        }

    def _find_still(self, child: Child, now_s: float) -> float:
        at_s, ticks, since_s = self._used.setdefault(child.pid, (now_s, child.ticks, now_s))
        if now_s - at_s >= _BUSY_S:
            least = IDLE_SHARE * ticks_per_second() * (now_s - at_s)
            used = child.ticks - ticks
            if used > least and (polling := read_polling_ticks(child.pid)):
                used -= polling - self._polling.get(child.pid, polling)
                self._polling[child.pid] = polling
            since_s = now_s if used > least else since_s
            self._used[child.pid] = (now_s, child.ticks, since_s)
        return now_s - since_s

    def add_stacks(self, scene: Scene) -> Scene:
        """Return a scene with the stacks that are known; those that are not are asked for meanwhile, once for as long as a process does nothing."""
        still = {facts.pid: facts.still_s for facts in scene.ranks}
        still |= {child.pid: child.still_s for facts in scene.ranks for child in facts.children}
        asked = [pid for pid in list_asked(scene, idle_s=_IDLE_S) if still[pid] > _IDLE_S]
        since = {pid: scene.now_s - still[pid] for pid in asked}
        dumps = {pid: self._dumps[pid] for pid in asked if pid in self._dumps}
        known = {pid: dump for pid, (at_s, dump) in dumps.items() if at_s >= since[pid]}
        missing = [pid for pid in asked if pid not in known]
        if missing and (self._asking is None or not self._asking.is_alive()):
            self._asking = threading.Thread(
                target=self._ask, args=(missing, scene.now_s), name="rankwise-stacks", daemon=True
            )
            self._asking.start()
        return put_stacks(scene, known)

    def _ask(self, asked: Collection[int], now_s: float) -> None:
        found = take_stacks(asked)
        self._dumps = {**self._dumps, **{pid: (now_s, dump) for pid, dump in found.items()}}
