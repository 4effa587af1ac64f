"""Says once that a rank has started processes with process groups of their own: nobody watches those."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from rankwise.evidence.reader.process_state import has_group_threads

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.evidence.reader.scene import Scene


@final
class SpawnedChildren:
    """Looks for what ranks have started by ``torch.multiprocessing.spawn`` and the like.

    Args:
        say: Shows a line on the terminal.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._reported = say, set[int]()

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
