"""No rank waits for another one, and none does anything: each waits for a thread, a process or a lock of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.evidence.reader.scene import STILL_S
from rankwise.verdict.explain import explain_away
from rankwise.verdict.finding import JobFinding
from rankwise.verdict.own_processes import find_still

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.verdict.scene_view import SceneView

RULE = "local_wait"


def find(view: SceneView) -> Iterator[JobFinding]:
    """Yield the finding of it."""
    living = {facts.rank: facts for facts in view.scene.ranks if facts.state != "ended"}
    waits = [view.local_waits[rank] for rank in living if rank in view.local_waits]
    still_s = min(map(find_still, living.values()), default=0.0)
    # While one of their processes is at work, it may be what they wait for.
    if not view.scene.is_whole or still_s < STILL_S or len(waits) < len(living) or not all(wait.own for wait in waits):
        return
    yield JobFinding(
        kind="hang",
        certainty="suspicion",
        rule=RULE,
        culprits=tuple(living),
        where=view.rank_states[next(iter(living))].where,
        message=explain_away(view, tuple(living)),
        fix=next((wait.advice for wait in waits if wait.advice), ""),
        key=f"own wait of {len(living)} ranks",
        doing="asleep",
        since_s=view.scene.now_s - still_s,
    )
