"""The watch over a running attempt, off the ranks' path: who keeps the others waiting, and when that is proved.

It looks a few times a second at what the ranks have recorded, which costs them nothing. Only when ranks have been quiet for
seconds are they asked for their stacks. What the rules call a proof must hold on two looks, the second with answers that came
after the first: numbers that are read from one rank after the other are not of one moment. Then it is said, and, where that
is wanted, the attempt ends. What may still end well is noted after five seconds, and once a minute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, final

from rankwise.launcher.patience import is_hung

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from rankwise.base.clock import Clock
    from rankwise.evidence.facts import Scene
    from rankwise.launcher.camera import Pulse
    from rankwise.launcher.spec import OnHang
    from rankwise.verdict.sight import Sight

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


class Lens(Protocol):
    """What the watch looks through: a ``Camera``."""

    def look(self) -> bool:
        """See what has moved; tell whether anything is new."""

    def forgive(self) -> None:
        """Count all waiting from now on."""

    def pulses(self) -> list[Pulse]:
        """Return how each living rank seems."""

    def ask(self, ranks: Iterable[int]) -> None:
        """Ask ranks for their stacks and their flight recorder."""

    def signal_silent(self) -> None:
        """Take the stacks of those that do not answer, where that can't disturb them."""

    def take(self) -> Scene:
        """Return all ranks as they are."""


class Teller(Protocol):
    """Who is told what is seen."""

    def tell(self, sight: Sight, scene: Scene, *, waited_s: float) -> None:
        """Take something that was seen, to be said now."""


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
class HangWatch:
    """Watches one attempt.

    Args:
        lens: What to look through.
        look: The rules: from a scene to what can be said of it, the cause first.
        teller: Who is told.
        bounds: What the user wants.
        clock: Where the time comes from.
        is_led: Whether somebody who sees more judges which ranks hang; then only wrong pairs that went through are told.

    Attributes:
        has_decided: Whether the attempt is to end as hung.
        sights: What was proved, and what decided, in the order of time.
    """

    def __init__(
        self,
        lens: Lens,
        look: Callable[[Scene], tuple[Sight, ...]],
        teller: Teller,
        bounds: Bounds,
        clock: Clock,
        *,
        is_led: Callable[[], bool] = bool,
    ) -> None:
        self._lens, self._look, self._teller, self._bounds, self._clock = lens, look, teller, bounds, clock
        self._is_led = is_led
        self.has_decided = False
        self.sights: tuple[Sight, ...] = ()
        self._due_s = clock.monotonic() + _EVERY_S
        self._judged_s = float("-inf")
        self._since: dict[str, float] = {}
        self._is_pending = False
        self._hung_s: float | None = None
        self._said: dict[tuple[str, ...], float] = {}

    @property
    def next_in_s(self) -> float:
        """Return after how many seconds it wants to be polled."""
        return max(0.0, self._due_s - self._clock.monotonic())

    def poll(self, *, has_ended: bool = False) -> None:
        """Look, if it is time to.

        Args:
            has_ended: Whether a rank has ended: then the others are asked sooner.
        """
        now = self._clock.monotonic()
        if self.has_decided or now < self._due_s:
            return
        if now - self._due_s > _LATE_S:
            self._lens.forgive()
        news = self._lens.look()
        pulses = self._lens.pulses()
        self._ask(pulses, now, has_ended=has_ended)
        self._lens.signal_silent()
        if self._is_worth_judging(pulses, now, news=news):
            self._judged_s = now
            self._judge(pulses)
        at_rest = bool(pulses) and all(pulse.quiet_s >= _QUIET_S for pulse in pulses)
        cost_s = self._clock.monotonic() - now
        pause_s = min(_LONGEST_PAUSE_S, cost_s / (_SHARE_AT_REST if at_rest else _SHARE_AT_WORK))
        self._due_s = now + max(_SOON_S if self._is_pending else _EVERY_S, pause_s)

    # ----------------------------------------------------------------- asking

    def _ask(self, pulses: list[Pulse], now: float, *, has_ended: bool) -> None:
        somebody_met = any(pulse.has_joined for pulse in pulses) or has_ended
        somebody_waits = any(pulse.idle_s >= _QUIET_S / 2 and pulse.quiet_s >= _QUIET_S for pulse in pulses)
        due = [
            pulse.rank
            for pulse in pulses
            if pulse.is_answered
            and now - pulse.asked_s >= _pause_s(pulse)
            and pulse.quiet_s >= (_QUIET_S if somebody_met else _QUIET_BEFORE_S)
            and (somebody_waits or pulse.quiet_s >= _QUIET_BUSY_S)
        ]
        self._lens.ask(due)

    def _is_worth_judging(self, pulses: list[Pulse], now: float, *, news: bool) -> bool:
        was_asked = any(pulse.asked_s > float("-inf") for pulse in pulses)
        if not was_asked and not any(pulse.has_joined for pulse in pulses):
            return False  # still importing: there is nothing to compare
        return news or self._is_pending or (was_asked and now - self._judged_s >= 1.0)

    # ---------------------------------------------------------------- judging

    def _judge(self, pulses: list[Pulse]) -> None:
        scene = self._lens.take()
        is_led = self._is_led()
        sights = tuple(
            sight
            for sight in self._look(scene)
            if not is_led or (sight.kind == "mismatch" and not sight.is_stuck)
        )
        now = scene.now_s
        self._since = {sight.key: self._since.get(sight.key, now) for sight in sights}
        by_rank = {pulse.rank: pulse for pulse in pulses}
        for sight in sights:
            if sight.is_proof:
                self._follow_proof(sight, scene, by_rank)
            else:
                self._follow_suspicion(sight, scene)
            if self.has_decided:
                return
        if not is_led:
            self._judge_patience(sights, scene, pulses)
        self._is_pending = self._hung_s is not None or any(
            sight.is_proof and not self._is_said(sight) for sight in sights
        )

    def _judge_patience(self, sights: tuple[Sight, ...], scene: Scene, pulses: list[Pulse]) -> None:
        quiet_s = {pulse.rank: pulse.quiet_s for pulse in pulses}
        is_over = is_hung(scene, quiet_s, timeout_s=self._bounds.timeout_s)
        if self._bounds.on_hang == "report" or not is_over:
            self._hung_s = None
        elif self._hung_s is None:
            self._hung_s = scene.now_s
            self._lens.ask(quiet_s)
        elif all(pulse.asked_s >= self._hung_s and pulse.is_answered for pulse in pulses):
            self._decide(next((sight for sight in sights if sight.is_stuck), None))

    def _follow_proof(self, sight: Sight, scene: Scene, pulses: Mapping[int, Pulse]) -> None:
        first_s = self._since[sight.key]
        if self._is_said(sight):
            self._say(sight, scene)
            return
        if scene.now_s - first_s < _LOOK_AGAIN_S:
            if scene.now_s == first_s and sight.is_stuck:
                self._lens.ask(_involved(sight) & pulses.keys())
            return
        if sight.is_stuck and not all(
            pulses[rank].asked_s >= first_s and pulses[rank].is_answered
            for rank in _involved(sight) & pulses.keys()
        ):
            return
        if may_stop(sight, scene, self._bounds.on_hang):
            self._decide(sight)
            return
        self._say(sight, scene)

    def _follow_suspicion(self, sight: Sight, scene: Scene) -> None:
        if self._waited_s(sight, scene) >= _NOTE_AFTER_S:
            self._say(sight, scene)

    def _say(self, sight: Sight, scene: Scene) -> None:
        """Say something once; what may yet change, once a minute."""
        last_s = self._said.get(_topic(sight))
        if last_s is not None and (not sight.is_stuck or scene.now_s - last_s < _NOTE_EVERY_S):
            return
        self._said[_topic(sight)] = scene.now_s
        if sight.is_proof and last_s is None:
            self.sights = (*self.sights, sight)
        self._teller.tell(sight, scene, waited_s=self._waited_s(sight, scene))

    def _is_said(self, sight: Sight) -> bool:
        return _topic(sight) in self._said

    def _waited_s(self, sight: Sight, scene: Scene) -> float:
        since_s = self._since[sight.key] if sight.since_s is None else sight.since_s
        return max(0.0, scene.now_s - since_s)

    def _decide(self, sight: Sight | None) -> None:
        self.has_decided = True
        if sight is not None:
            self.sights = (*(one for one in self.sights if one.key != sight.key), sight)


def may_stop(sight: Sight, scene: Scene, on_hang: OnHang | None) -> bool:
    """Decide whether what is proved ends the attempt. Pure.

    Args:
        sight: A proof.
        scene: Where it was seen.
        on_hang: What the user wants; None: on Gloo only, until NCCL has been measured as well.
    """
    if not sight.is_stuck or on_hang == "report":
        return False
    if sight.doing in {"stopped", "debugged"} or any(facts.reads_terminal for facts in scene.ranks):
        return False  # somebody did that, and may undo it
    if any(facts.state == "stopped" for facts in scene.ranks if facts.rank in sight.culprits):
        return False
    backends = {
        group.backend for facts in scene.ranks if facts.evidence for group in facts.evidence.groups.values()
    }
    parts = {part.rpartition(":")[2] for backend in backends for part in backend.split(",")}
    return on_hang is not None or parts <= {"", "gloo"}


def _pause_s(pulse: Pulse) -> float:
    """Return how long a rank is left alone after it was asked: the longer it waits, the less it has to tell."""
    if not pulse.has_joined:
        return 10.0 if pulse.quiet_s < 60 else 60.0
    return 1.0 if pulse.quiet_s < 8 else 5.0 if pulse.quiet_s < 60 else 20.0


def _involved(sight: Sight) -> set[int]:
    return {*sight.culprits, *(one.rank for one in sight.waiting)}


def _topic(sight: Sight) -> tuple[str, ...]:
    """Return what makes two sights one to the user: a slow rank is slow at another line each time."""
    if sight.is_proof or sight.is_drift:
        return (sight.key,)
    return ("suspicion", *map(str, sight.culprits))
