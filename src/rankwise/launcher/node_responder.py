"""What a node that does not judge does for the one that does: says that its ranks wait, and answers what it is asked."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, final

from rankwise.evidence.reader.multi_node_scene import NodeScene, count_ops, pack

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.base.clock import Clock
    from rankwise.evidence.reader.rank_activity import RankActivity
    from rankwise.launcher.node_link import NodeLink
    from rankwise.launcher.rank_sampler import RankSampler

#: So long our ranks may take to answer before we tell what is known of them without; as long as a sampler waits before
#: it looks for itself.
_ANSWER_S = 2.5
#: So long after ours wait the judge must have asked something, now and then; else we judge for ourselves.
_SILENT_S, _SELDOM_S = 10.0, 45.0
#: And so long after nothing was asked we tell it again.
_AGAIN_S = 25.0
_SOON_S, _EVERY_S = 0.1, 0.4


@final
class NodeResponder:
    """Tells the judge of our ranks.

    Args:
        sampler: Of our ranks.
        link: To the other nodes.
        clock: Where the time comes from.
        find_host_problems: Tells what is wrong with this host.
    """

    def __init__(
        self,
        sampler: RankSampler,
        link: NodeLink,
        clock: Clock,
        find_host_problems: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        self._sampler, self._link, self._clock, self._find_host_problems = sampler, link, clock, find_host_problems
        self._question, self._question_s = 0, float("-inf")
        self._is_due = self._is_late = self._is_over = False
        self._raised_s: float | None = None
        self._heard_s = self._reported_s = float("-inf")

    @property
    def next_in_s(self) -> float:
        """Return after how many seconds it wants to be polled."""
        return _SOON_S if self._is_due else _EVERY_S

    @property
    def has_judge(self) -> bool:
        """Whether another node judges what our ranks do; not if it does not ask though we have told that they wait."""
        if self._link.lost is not None:
            return False
        now = self._clock.monotonic()
        begin = max(self._heard_s + _SELDOM_S, (self._raised_s or now) + _SILENT_S)
        return self._raised_s is None or now < begin

    def poll(self) -> None:
        """Say that our ranks wait, if they do; hear what is asked, ask our ranks, and tell when they have answered."""
        if self._is_over:
            return
        now = self._clock.monotonic()
        self._link.note_questions()
        asked, activities = self._link.asked, self._sampler.activities()
        if asked > self._question:
            self._question, self._question_s, self._is_due = asked, now, True
            if asked not in self._link.questions:
                self._heard_s = now
            self._sampler.ask(activity.rank for activity in activities)
            self._sampler.signal_silent()
            return
        self._raise_if_waiting(activities, now)
        if self._is_due:
            self._sampler.look()
            self._sampler.signal_silent()
            self._answer(self._sampler.activities(), now)

    def stop(self) -> None:
        """Answer no more: what has been told of our ranks' end is all."""
        self._is_due, self._is_over = False, True

    def _raise_if_waiting(self, activities: list[RankActivity], now: float) -> None:
        if not any(activity.seems_to_wait for activity in activities):
            self._raised_s = None
        elif self._raised_s is None or now - max(self._reported_s, self._heard_s) >= _AGAIN_S:
            self._raised_s, self._reported_s = self._raised_s or now, now
            self._link.ask(now)

    def _answer(self, activities: list[RankActivity], now: float) -> None:
        have_answered = all(map(self._has_answered, activities))
        is_late = now - self._question_s >= _ANSWER_S
        if not have_answered and (not is_late or self._is_late):
            return
        # Those that answer later are told of once more, all together.
        self._is_due, self._is_late = not have_answered, is_late and not have_answered
        scene = self._sampler.take()
        own = NodeScene(
            scene=scene, activities=tuple(replace(one, is_answered=self._has_answered(one)) for one in activities),
            question=self._question, host_problems=self._find_host_problems(),
        )  # fmt: skip
        self._link.publish(pack(own, most_ops=count_ops(scene.world_size)))

    def _has_answered(self, activity: RankActivity) -> bool:
        return activity.asked_s >= self._question_s and activity.is_answered
