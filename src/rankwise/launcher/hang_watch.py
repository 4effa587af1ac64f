"""The watch over a running attempt, off the ranks' path: who keeps the others waiting, and when that is proved.

It looks a few times a second at what the ranks have recorded, which costs them nothing. Only when ranks have been quiet for
seconds are they asked for their stacks. What the rules call a proof must hold on two looks, the second with answers that came
after the first: numbers that are read from one rank after the other are not of one moment. Then it is said, and, where that
is wanted, the attempt ends. What may still end well is noted after five seconds, and once a minute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, final

from rankwise.launcher.hang_timeout import is_hung

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from rankwise.base.clock import Clock
    from rankwise.evidence.reader.rank_activity import RankActivity
    from rankwise.evidence.reader.scene import Scene
    from rankwise.launcher.spec import OnHang
    from rankwise.verdict.finding import JobFinding

_EVERY_S = 0.4
_SOON_S = 0.1
#: Of one core, while the ranks are at work; while they wait, they don't need it.
_SHARE_AT_WORK, _SHARE_AT_REST = 0.02, 0.25
_LONGEST_PAUSE_S = 10.0
#: Late by more than this, we have slept ourselves, and so may the ranks.
_LATE_S = 5.0
_QUIET_S = 2.0
#: Before the first process group a rank imports, and seldom has anything to tell.
_QUIET_BEFORE_S = 5.0
#: So long a rank that uses the CPU is left alone if no other waits.
_QUIET_BUSY_S = 10.0
_LOOK_AGAIN_S = 0.3
_NOTE_AFTER_S, _NOTE_EVERY_S = 5.0, 60.0
#: Of ranks that wait for something of their own, and keep no other one waiting.
_NOTE_LOCAL_AFTER_S = 30.0


class Sampler(Protocol):
    """What the watch looks through: a ``RankSampler``."""

    def look(self) -> bool:
        """See what has moved; tell whether anything is new."""

    def forgive(self) -> None:
        """Count all waiting from now on."""

    def activities(self) -> list[RankActivity]:
        """Return how each living rank seems."""

    def ask(self, ranks: Iterable[int]) -> None:
        """Ask ranks for their stacks and their flight recorder."""

    def signal_silent(self) -> None:
        """Take the stacks of those that do not answer, where that can't disturb them."""

    def take(self) -> Scene:
        """Return all ranks as they are."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What the user wants of the watch.

    Attributes:
        timeout_s: How long ranks may wait; infinite for ever, None for the default.
        on_hang: What a hang leads to; None for proofs only, and on Gloo only.
    """

    timeout_s: float | None = None
    on_hang: OnHang | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that is to be said now.

    Attributes:
        finding: What was seen.
        scene: Where.
        waited_s: For how long it has been so.
    """

    finding: JobFinding
    scene: Scene
    waited_s: float


@final
class HangWatch:
    """Watches one attempt.

    Args:
        sampler: What to look through.
        rules: From a scene to what can be said of it, the cause first.
        bounds: What the user wants.
        clock: Where the time comes from.

    Attributes:
        has_decided: Whether the attempt is to end as hung.
        findings: What was proved, and what decided, in the order of time.
        scene: The last one that was judged; None before.
        current: What the rules said of it.
    """

    def __init__(
        self, sampler: Sampler, rules: Callable[[Scene], tuple[JobFinding, ...]], bounds: Bounds, clock: Clock
    ) -> None:
        self._sampler, self._rules, self._bounds, self._clock = sampler, rules, bounds, clock
        self.scene: Scene | None = None
        self.current: tuple[JobFinding, ...] = ()
        self._events: list[Event] = []
        self.has_decided = False
        self.findings: tuple[JobFinding, ...] = ()
        self._due_s = clock.monotonic() + _EVERY_S
        self._judged_s = float("-inf")
        self._since: dict[str, float] = {}
        self._reported_s: dict[int, float] = {}
        self._is_pending = False
        self._hung_s: float | None = None
        self._reported: dict[tuple[str, ...], float] = {}

    @property
    def next_in_s(self) -> float:
        """Return after how many seconds it wants to be polled."""
        return max(0.0, self._due_s - self._clock.monotonic())

    def poll(self, *, has_ended: bool = False, is_led: bool = False) -> list[Event]:
        """Look, if it is time to.

        Args:
            has_ended: Whether a rank has ended: then the others are asked sooner.
            is_led: Whether somebody who sees more judges which ranks hang; then only wrong pairs that went through are
                said.

        Returns:
            What is to be said now.
        """
        now = self._clock.monotonic()
        if self.has_decided or now < self._due_s:
            return []
        if now - self._due_s > _LATE_S:
            self._sampler.forgive()
        news = self._sampler.look()
        activities = self._sampler.activities()
        self._ask(activities, now, has_ended=has_ended)
        self._sampler.signal_silent()
        if self._is_worth_judging(activities, now, news=news):
            self._judged_s = now
            self._judge(activities, is_led=is_led)
        at_rest = bool(activities) and all(activity.quiet_s >= _QUIET_S for activity in activities)
        cost_s = self._clock.monotonic() - now
        pause_s = min(_LONGEST_PAUSE_S, cost_s / (_SHARE_AT_REST if at_rest else _SHARE_AT_WORK))
        self._due_s = now + max(_SOON_S if self._is_pending else _EVERY_S, pause_s)
        events, self._events = self._events, []
        return events

    # ----------------------------------------------------------------- asking

    def _ask(self, activities: list[RankActivity], now: float, *, has_ended: bool) -> None:
        somebody_met = any(activity.has_joined for activity in activities) or has_ended
        somebody_waits = any(
            activity.idle_s >= _QUIET_S / 2 and activity.quiet_s >= _QUIET_S for activity in activities
        )
        due = [
            activity.rank
            for activity in activities
            if activity.is_answered
            and now - activity.asked_s >= _pause_s(activity)
            and activity.quiet_s >= (_QUIET_S if somebody_met else _QUIET_BEFORE_S)
            and (somebody_waits or activity.quiet_s >= _QUIET_BUSY_S)
        ]
        self._sampler.ask(due)

    def _is_worth_judging(self, activities: list[RankActivity], now: float, *, news: bool) -> bool:
        was_asked = any(activity.asked_s > float("-inf") for activity in activities)
        if not was_asked and not any(activity.has_joined for activity in activities):
            return False  # still importing: there is nothing to compare
        return news or self._is_pending or (was_asked and now - self._judged_s >= 1.0)

    # ---------------------------------------------------------------- judging

    def _judge(self, activities: list[RankActivity], *, is_led: bool) -> None:
        self.scene = scene = self._sampler.take()
        self.current = self._rules(scene)
        findings = tuple(
            finding for finding in self.current if not is_led or (finding.kind == "mismatch" and not finding.is_stuck)
        )
        now = scene.now_s
        self._since = {finding.key: self._since.get(finding.key, now) for finding in findings}
        by_rank = {activity.rank: activity for activity in activities}
        self._reported_s = {activity.rank: activity.reported_s for activity in activities}
        for finding in findings:
            if finding.is_proof:
                self._follow_proof(finding, scene, by_rank)
            else:
                self._follow_suspicion(finding, scene)
            if self.has_decided:
                return
        if not is_led:
            self._judge_timeout(findings, scene, activities)
        self._is_pending = self._hung_s is not None or any(
            finding.is_proof and not self._is_reported(finding) for finding in findings
        )

    def _judge_timeout(self, findings: tuple[JobFinding, ...], scene: Scene, activities: list[RankActivity]) -> None:
        quiet_s = {activity.rank: activity.quiet_s for activity in activities}
        timeout_s = self._bounds.timeout_s
        is_over = is_hung(scene, quiet_s, timeout_s=timeout_s) or any(
            timeout_s is not None and self._waited_s(finding, scene) >= timeout_s
            for finding in findings
            if finding.is_local
        )
        if self._bounds.on_hang == "report" or not is_over:
            self._hung_s = None
        elif self._hung_s is None:
            self._hung_s = scene.now_s
            self._sampler.ask(quiet_s)
        elif all(activity.asked_s >= self._hung_s and activity.is_answered for activity in activities):
            self._decide(next((finding for finding in findings if finding.is_stuck), None))

    def _follow_proof(self, finding: JobFinding, scene: Scene, activities: Mapping[int, RankActivity]) -> None:
        first_s = self._since[finding.key]
        if self._is_reported(finding):
            self._say(finding, scene)
            return
        if scene.now_s - first_s < _LOOK_AGAIN_S:
            if scene.now_s == first_s and finding.is_stuck:
                self._sampler.ask(_involved(finding) & activities.keys())
            return
        if finding.is_stuck and not all(
            activities[rank].asked_s >= first_s and activities[rank].is_answered
            for rank in _involved(finding) & activities.keys()
        ):
            return
        if may_stop(finding, scene, self._bounds.on_hang):
            self._decide(finding)
            return
        self._say(finding, scene)

    def _follow_suspicion(self, finding: JobFinding, scene: Scene) -> None:
        after_s = _NOTE_LOCAL_AFTER_S if finding.is_local else _NOTE_AFTER_S
        if self._waited_s(finding, scene) >= after_s:
            self._say(finding, scene)

    def _say(self, finding: JobFinding, scene: Scene) -> None:
        """Say something once; what may yet change, once a minute."""
        last_s = self._reported.get(_topic(finding))
        if last_s is not None and (not finding.is_stuck or scene.now_s - last_s < _NOTE_EVERY_S):
            return
        self._reported[_topic(finding)] = scene.now_s
        if finding.is_proof and last_s is None:
            self.findings = (*self.findings, finding)
        self._events.append(Event(finding=finding, scene=scene, waited_s=self._waited_s(finding, scene)))

    def _is_reported(self, finding: JobFinding) -> bool:
        return _topic(finding) in self._reported

    def _waited_s(self, finding: JobFinding, scene: Scene) -> float:
        since_s = self._since[finding.key] if finding.since_s is None else finding.since_s
        # What was reported of ranks elsewhere may have changed since.
        until_s = [self._reported_s.get(rank, scene.now_s) for rank in _involved(finding)]
        return max(0.0, min([scene.now_s, *until_s]) - since_s)

    def _decide(self, finding: JobFinding | None) -> None:
        self.has_decided = True
        if finding is not None:
            self.findings = (*(one for one in self.findings if one.key != finding.key), finding)


def may_stop(finding: JobFinding, scene: Scene, on_hang: OnHang | None) -> bool:
    """Decide whether what is proved ends the attempt. Pure.

    Args:
        finding: A proof.
        scene: Where it was seen.
        on_hang: What the user wants; None: on Gloo only, until NCCL has been measured as well.
    """
    if not finding.is_stuck or on_hang == "report":
        return False
    if finding.doing in {"stopped", "debugged"} or any(facts.reads_terminal for facts in scene.ranks):
        return False  # somebody did that, and may undo it
    if any(facts.state == "stopped" for facts in scene.ranks if facts.rank in finding.culprits):
        return False
    backends = {group.backend for facts in scene.ranks if facts.evidence for group in facts.evidence.groups.values()}
    parts = {part.rpartition(":")[2] for backend in backends for part in backend.split(",")}
    return on_hang is not None or parts <= {"", "gloo"}


def _pause_s(activity: RankActivity) -> float:
    """Return how long a rank is left alone after it was asked: the longer it waits, the less it has to tell."""
    if not activity.has_joined:
        return 10.0 if activity.quiet_s < 60 else 60.0
    return 1.0 if activity.quiet_s < 8 else 5.0 if activity.quiet_s < 60 else 20.0


def _involved(finding: JobFinding) -> set[int]:
    return {*finding.culprits, *(one.rank for one in finding.waiting)}


def _topic(finding: JobFinding) -> tuple[str, ...]:
    """Return what makes two findings one to the user: a slow rank is slow at another line each time."""
    if finding.is_proof or finding.is_drift:
        return (finding.key,)
    return ("suspicion", *map(str, finding.culprits))
