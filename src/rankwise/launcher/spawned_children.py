"""Says once that a rank has started processes with process groups of their own: nobody watches those."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, final

from rankwise.evidence.reader.process_state import has_group_threads, read_process, ticks_per_second

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.evidence.reader.scene import RankFacts, Scene

#: Processes that use less than this in so long wait for something.
_IDLE_S, _USED_S = 30.0, 0.5


@final
class SpawnedChildren:
    """Looks for what ranks have started by ``torch.multiprocessing.spawn`` and the like.

    Args:
        say: Shows a line on the terminal.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._reported = say, set[int]()
        #: What each child had used, and since when no more.
        self._used: dict[int, tuple[float, int]] = {}

    def look(self, scene: Scene) -> None:
        """Say it of each rank that was not told before.

        Args:
            scene: With the children of ranks that wait.
        """
        for facts in scene.ranks:
            if facts.rank in self._reported or (facts.evidence is not None and facts.evidence.has_come):
                continue
            members = [child for child in facts.children if has_group_threads(child.pid)]
            if len(members) > 1:
                self._reported.add(facts.rank)
                self._say(
                    f"rankwise: rank {facts.rank} has started {len(members)} processes with a process group of their own: these are not watched "
                    f"for hangs\n  -> let `rankwise run --nproc-per-node {len(members)}` start them, or ask `rankwise why` what they do"
                )
            elif _waits_for_processes(facts) and (num_own := self._count_spawned(facts, scene.now_s)):
                self._reported |= {one.rank for one in scene.ranks}  # all of them do what the script says
                self._say(
                    f"rankwise: rank {facts.rank} is in no process group, and waits for {num_own} processes of its own, which have done nothing for "
                    f"{_IDLE_S:.0f} s\n  -> a script that starts its own ranks, by mp.spawn or the like, is started by `python`: below a launcher rank 0 "
                    f"of them serves no store; or let `rankwise run --nproc-per-node {num_own}` start them, without mp.spawn"
                )

    def _count_spawned(self, facts: RankFacts, now_s: float) -> int:
        """Count the children of multiprocessing, if some of them have long used no CPU time."""
        idle = spawned = 0
        for child in facts.children:
            process = read_process(child.pid)
            if process is None or not _is_spawned(child.pid):
                continue
            spawned += 1
            since_s, ticks = self._used.setdefault(child.pid, (now_s, process.ticks))
            if process.ticks - ticks > _USED_S * ticks_per_second():
                self._used[child.pid] = (now_s, process.ticks)
            elif now_s - since_s >= _IDLE_S:
                idle += 1
        return spawned if idle > 1 else 0


def _waits_for_processes(facts: RankFacts) -> bool:
    """Tell whether a rank stands in a join of multiprocessing, or of torch.multiprocessing.spawn."""
    frames = facts.stack.frames if facts.evidence is not None and facts.stack is not None else ()
    return any(frame.function == "join" and "multiprocessing" in frame.file for frame in frames)


def _is_spawned(pid: int) -> bool:
    """Tell whether multiprocessing has spawned it; its helpers wait for as long as its parent lives."""
    try:
        return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
