"""One scene out of those of several nodes: what a node tells of its ranks, kept small, and set to the clock of who reads it.

The monotonic clocks of two hosts have nothing to do with each other. A message says what its sender's clock showed when it was
written, and the reader knows when it came: the difference is the clocks' and the way's. The way takes a different time for each
message, so the smallest difference that was ever seen is the best. What is set by it may be too late by the shortest way, never too early: what
waits seems to wait for less long than it does.
"""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

from rankwise.evidence.in_rank.ring import find_spans
from rankwise.evidence.reader import scene_file
from rankwise.evidence.reader.rank_activity import RankActivity
from rankwise.evidence.reader.size_limits import expand_runs, inflate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rankwise.evidence.reader.scene import Op, RankFacts, Scene

#: What a message may be long, in bytes.
MOST_BYTES = 256 << 10
#: What it may hold, unpacked.
_MOST_BYTES = 64 << 20
#: With fewer operations a reader would think that a rank never had more (``GroupSequence``), so no rank is cut below.
FEWEST_OPS, MOST_OPS = 200, 1024
#: Of each group, and of each peer's messages, so many are kept beside.
_LAST_OF_EACH = 8
#: What is sent of a living rank: when it was asked means nothing on another clock.
_SENT = ("rank", "quiet_s", "idle_s", "is_answered", "has_joined")
#: Operations that the reader has to read, of all ranks together: 13 microseconds each.
_OPS_IN_ALL = 40_000


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NodeScene:
    """All that one node tells of its ranks.

    Attributes:
        scene: Its ranks, when it was written.
        activities: How those that live seemed, and whether they had answered the question.
        question: The last that was asked before; 0 for none.
        is_last: Whether all its ranks have ended, and nothing will follow.
        stopped: Those that it has stopped itself.
        host_problems: What is wrong with its host, as sentences.
    """

    scene: Scene
    activities: tuple[RankActivity, ...]
    question: int
    is_last: bool = False
    stopped: tuple[int, ...] = ()
    host_problems: tuple[str, ...] = ()

    @property
    def unstopped(self) -> Scene:
        """The scene without the ranks that were stopped: why these have ended says nothing of the script."""
        ranks = tuple(facts for facts in self.scene.ranks if facts.rank not in self.stopped)
        return replace(self.scene, ranks=ranks, is_whole=self.scene.is_whole and not self.stopped)


def count_ops(world_size: int) -> int:
    """Return how many operations of each rank are told, so that whoever reads them all can."""
    return min(MOST_OPS, max(FEWEST_OPS, _OPS_IN_ALL // world_size))


def pack(value: NodeScene, *, most_ops: int = MOST_OPS) -> str:
    """Return what a node tells as one line of text, of no more than ``MOST_BYTES`` where that can be.

    Args:
        value: What it tells.
        most_ops: How many operations of each rank at most; the last ones.
    """
    while True:
        text = _pack(value, most_ops)
        if len(text) <= MOST_BYTES or most_ops <= FEWEST_OPS:
            return text
        most_ops = max(FEWEST_OPS, most_ops // 2)


def _pack(value: NodeScene, most_ops: int) -> str:
    scene = replace(value.scene, ranks=tuple(_cut(facts, most_ops) for facts in value.scene.ranks), sources={})
    body = scene_file.to_json(scene)
    for rank in body["ranks"]:
        for group in rank["evidence"]["groups"].values() if rank["evidence"] else ():
            group["ranks"] = find_spans(group["ranks"])  # every rank of a job tells of all of them
    message = {
        "scene": body,
        "signs": [[getattr(activity, name) for name in _SENT] for activity in value.activities],
        "question": value.question,
        "is_last": value.is_last,
        "stopped": value.stopped,
        "ailments": value.host_problems,
    }
    raw = json.dumps(message, separators=(",", ":")).encode()
    return base64.b64encode(zlib.compress(raw, 1)).decode()


def _cut(facts: RankFacts, most_ops: int) -> RankFacts:
    evidence = facts.evidence
    if evidence is None or len(evidence.ops) <= most_ops:
        return facts
    seen: dict[tuple[str, str, int | None], int] = {}
    kept: list[Op] = []
    for age, op in enumerate(reversed(evidence.ops)):
        kind = (op.group, op.name if op.is_message else "", op.peer)
        seen[kind] = seen.get(kind, 0) + 1
        if age < most_ops or seen[kind] <= _LAST_OF_EACH:
            kept.append(op)
    return replace(facts, evidence=replace(evidence, ops=tuple(reversed(kept))))


def open_message(text: str) -> dict[str, Any]:
    """Return what a message says, as JSON has it, on its sender's clock.

    Raises:
        ValueError: It is none, or of another version.
    """
    try:
        message = json.loads(inflate(base64.b64decode(text, validate=True), _MOST_BYTES))
        message["scene"]["now_s"] = float(message["scene"]["now_s"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"not a message from another node: {error!r}") from error
    return dict(message)


def read_message(message: dict[str, Any], *, later_s: float) -> NodeScene:
    """Return what a message says, on our clock.

    Args:
        message: As ``open_message`` gives it; is changed.
        later_s: By how much our clock is ahead of the sender's.

    Raises:
        ValueError: It is of another version.
    """
    body = message["scene"]
    for rank in body["ranks"]:
        for group in rank["evidence"]["groups"].values() if rank["evidence"] else ():
            group["ranks"] = expand_runs(group["ranks"])
    with scene_file.checked(body, "scene"):
        scene = scene_file.shift(scene_file.from_json(body), later_s)
    return NodeScene(
        scene=scene,
        activities=tuple(RankActivity(**dict(zip(_SENT, values, strict=True))) for values in message["signs"]),
        question=int(message["question"]),
        is_last=bool(message["is_last"]),
        stopped=tuple(message["stopped"]),
        host_problems=tuple(map(str, message.get("ailments", ()))),
    )


def join(own: Scene, others: Iterable[Scene]) -> Scene:
    """Return one scene of all ranks that can be seen."""
    ranks = {facts.rank: facts for scene in (*others, own) for facts in scene.ranks}
    return replace(own, ranks=tuple(facts for _, facts in sorted(ranks.items())), is_whole=len(ranks) == own.world_size)
