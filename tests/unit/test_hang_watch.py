"""When the watch asks, says and decides: its timing, with a clock that is moved and a sampler that shows what it is told to."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from clocks import FakeClock
from rankwise.evidence.reader.notes import Frame, Stack
from rankwise.evidence.reader.rank_activity import RankActivity
from rankwise.evidence.reader.scene import Evidence, Group, Op, RankFacts, Scene
from rankwise.launcher.hang_timeout import is_hung
from rankwise.launcher.hang_watch import Bounds, HangWatch, may_stop
from rankwise.verdict.finding import JobFinding, Waiting

if TYPE_CHECKING:
    from collections.abc import Iterable

WAITS = Stack(
    frames=(
        Frame(file="/x/site-packages/torch/distributed/distributed_c10d.py", line=1, function="all_reduce"),
        Frame(file="/x/train.py", line=7, function="<module>"),
    )
)
SLEEPS = Stack(frames=(Frame(file="/x/train.py", line=9, function="<module>"),))
COMPILES = Stack(
    frames=(
        Frame(file="/x/site-packages/torch/_inductor/codecache.py", line=1, function="compile"),
        *SLEEPS.frames,
    )
)
BACKWARD = Stack(
    frames=(
        Frame(file="/x/site-packages/torch/autograd/graph.py", line=979, function="_engine_run_backward"),
        *SLEEPS.frames,
    )
)
GLOO = Evidence(groups={"default": Group(name="default", ranks=(0, 1), backend="gloo")}, has_joined=True)
ASIDE = replace(
    GLOO,
    ops=(Op(group="default", seq=1, name="all_reduce", is_over=False),),
    stacks={"MainThread": SLEEPS, "Thread-1": WAITS},
)
NCCL = Evidence(groups={"default": Group(name="default", ranks=(0, 1), backend="cpu:gloo,cuda:nccl")}, has_joined=True)
SUSPICION = JobFinding(
    kind="hang", certainty="suspicion", rule="r", culprits=(1,), message="rank 1 sleeps", key="k",
    waiting=(Waiting(rank=0, where="train.py:7", op="all_reduce"),),
)  # fmt: skip
PROOF = replace(SUSPICION, certainty="proof")
SILENT = replace(PROOF, kind="mismatch", is_stuck=False, key="silent")


@dataclass
class FakeLens:
    """Two ranks that are quiet since a moment; they answer after ``answer_s``."""

    clock: FakeClock
    quiet_since: dict[int, float] = field(default_factory=lambda: {0: 1000.0, 1: 1000.0})
    answer_s: float = 0.0
    is_busy: bool = False
    has_joined: bool = True
    stacks: dict[int, Stack | None] = field(default_factory=lambda: {0: WAITS, 1: SLEEPS})
    evidence: Evidence | None = GLOO
    asked: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    forgiven: int = 0
    reported_s: float = float("inf")

    def look(self) -> bool:
        return False

    def forgive(self) -> None:
        self.forgiven += 1
        self.quiet_since = dict.fromkeys(self.quiet_since, self.clock.now)

    def _asked_s(self, rank: int) -> float:
        return max((at for at, ranks in self.asked if rank in ranks), default=float("-inf"))

    def activities(self) -> list[RankActivity]:
        now = self.clock.now
        return [
            RankActivity(rank=rank, quiet_s=now - since, idle_s=0.0 if self.is_busy else now - since, asked_s=self._asked_s(rank),
                  is_answered=now - self._asked_s(rank) >= self.answer_s, has_joined=self.has_joined,
                  reported_s=self.reported_s if rank else float("inf"))
            for rank, since in self.quiet_since.items()
        ]  # fmt: skip

    def ask(self, ranks: Iterable[int]) -> None:
        if chosen := tuple(sorted(ranks)):
            self.asked.append((self.clock.now, chosen))

    def signal_silent(self) -> None:
        return

    def take(self) -> Scene:
        ranks = tuple(
            RankFacts(rank=rank, pid=rank + 1, evidence=self.evidence, stack=self.stacks[rank],
                      still_s=0.0 if self.is_busy and rank else self.clock.now - since)
            for rank, since in self.quiet_since.items()
        )  # fmt: skip
        return Scene(ranks=ranks, world_size=2, now_s=self.clock.now)


class Stage:
    """A watch with all that it needs; ``findings`` is what the rules see from now on."""

    def __init__(self, *findings: JobFinding, **bounds: Any) -> None:
        self.clock = FakeClock()
        self.sampler, self.told = FakeLens(self.clock), list[tuple[float, str]]()
        self.findings = findings
        self.num_judged = 0
        self.watch = HangWatch(self.sampler, self._look, Bounds(**bounds), self.clock)

    def _look(self, scene: Scene) -> tuple[JobFinding, ...]:
        self.num_judged += 1
        has_stacks = bool(self.sampler.asked) and self.clock.now >= self.sampler.asked[0][0] + self.sampler.answer_s
        return tuple(finding for finding in self.findings if has_stacks or finding.kind == "mismatch")

    def run(self, seconds: float, **options: Any) -> Stage:
        end = self.clock.now + seconds
        while self.clock.now < end and not self.watch.has_decided:
            self.clock.sleep(max(0.01, self.watch.next_in_s))
            self.told += [(self.clock.now - 1000.0, event.finding.key) for event in self.watch.poll(**options)]
        return self

    @property
    def passed_s(self) -> float:
        return self.clock.now - 1000.0


def test_ranks_are_left_alone_until_they_are_quiet() -> None:
    """Nobody is asked before two seconds of quiet; then all are, and less and less often."""
    stage = Stage()
    stage.run(1.8)
    assert stage.sampler.asked == []
    stage.run(600)
    moments = [at - 1000.0 for at, _ in stage.sampler.asked]
    assert 2.0 <= moments[0] < 2.6
    gaps = [later - at for at, later in itertools.pairwise(moments)]
    assert min(gaps) >= 1.0
    assert min(gaps[-10:]) >= 20.0


def test_ranks_that_compute_are_asked_only_after_long() -> None:
    """A step of eight seconds on all ranks is no reason to ask; quiet for longer than ten is."""
    stage = Stage()
    stage.sampler.is_busy = True
    stage.run(9.5)
    assert stage.sampler.asked == []
    stage.run(3)
    assert stage.sampler.asked


def test_before_the_first_group_there_is_patience() -> None:
    """Ranks that import are asked after five seconds at the earliest, and no rule is tried before; a rank's end makes it two."""
    stage = Stage()
    stage.sampler.has_joined = False
    stage.run(4.5)
    assert (stage.sampler.asked, stage.num_judged) == ([], 0)
    ended = Stage()
    ended.sampler.has_joined = False
    ended.run(3, has_ended=True)
    assert ended.sampler.asked


def test_a_proof_needs_a_second_look_with_new_answers() -> None:
    """Seen once it decides nothing; only when all that are involved have answered again, and it is seen again, it does."""
    stage = Stage(PROOF)
    stage.sampler.answer_s = 1.5
    stage.run(30)
    assert stage.watch.has_decided
    first, second = stage.sampler.asked[:2]
    assert stage.passed_s >= second[0] - 1000.0 + 1.5
    assert second[0] >= first[0] + 1.5
    assert stage.watch.findings == (PROOF,)
    assert stage.told == []


def test_a_proof_is_acted_on_within_five_seconds() -> None:
    """From the last thing that moved to the decision: two seconds of quiet, two looks, and some."""
    assert Stage(PROOF).run(30).passed_s <= 5.0


def test_a_proof_that_is_not_seen_again_is_none() -> None:
    """What the second look does not show is forgotten, and is new when it comes back."""
    stage = Stage(PROOF)
    stage.run(2.3)
    stage.findings = ()
    stage.run(20)
    assert (stage.watch.has_decided, stage.watch.findings, stage.told) == (False, (), [])


def test_a_suspicion_is_noted_after_five_seconds_and_then_every_minute() -> None:
    """It is never acted on by itself; a rank that is slow at another line a minute later is the same to the user."""
    stage = Stage(SUSPICION)
    stage.run(90)
    stage.findings = (replace(SUSPICION, key="another line"),)
    stage.run(60)
    moments = [at for at, _ in stage.told]
    assert not stage.watch.has_decided
    assert len(moments) == 3
    assert 5.0 <= moments[0] <= 9.0
    assert all(60.0 <= later - at <= 66.0 for at, later in itertools.pairwise(moments))


def test_what_was_told_of_another_node_is_not_thought_to_last() -> None:
    """A rank that another node told of waited for three seconds then, which says nothing of now; when it is told anew, the wait counts up to there."""
    stage = Stage(replace(SUSPICION, since_s=1000.0))
    stage.sampler.reported_s = 1003.0
    assert not stage.run(60).told
    stage.sampler.reported_s = 1055.0
    assert [key for _, key in stage.run(5).told] == ["k"]


def test_wrong_pairs_are_said_once_and_the_job_goes_on() -> None:
    """A silent mismatch is told when seen, kept for the end, and stops nothing, even with --on-hang stop."""
    stage = Stage(SILENT, on_hang="stop")
    stage.run(200)
    assert (stage.watch.has_decided, stage.watch.findings) == (False, (SILENT,))
    assert len(stage.told) == 1


def test_report_only_never_stops() -> None:
    """--on-hang report says a proof, and again every minute, and outlasts any bound."""
    stage = Stage(PROOF, on_hang="report", timeout_s=10.0)
    stage.run(100)
    assert not stage.watch.has_decided
    assert [round(at / 60) for at, _ in stage.told] == [0, 1]
    assert stage.watch.findings == (PROOF,)


def test_the_users_bound_ends_what_is_only_suspected() -> None:
    """With --hang-timeout 10 a job in which one rank sleeps and the other waits ends at ten seconds and a little."""
    stage = Stage(SUSPICION, timeout_s=10.0)
    stage.run(60)
    assert stage.watch.has_decided
    assert 10.0 <= stage.passed_s <= 12.0
    assert stage.watch.findings == (SUSPICION,)


def test_after_a_sleep_of_our_own_waiting_counts_anew() -> None:
    """Stopped with Ctrl-Z for an hour, together with its ranks, the launcher does not think that they waited for an hour."""
    stage = Stage(SUSPICION, timeout_s=10.0)
    stage.run(3)
    stage.clock.sleep(3600)
    stage.run(5)
    assert (stage.watch.has_decided, stage.sampler.forgiven) == (False, 1)


def test_dear_looks_become_rare_while_ranks_work() -> None:
    """Rules that take a second are tried once a minute at most at work: two per cent of a core, ten seconds at the longest apart."""
    stage = Stage()

    def look(scene: Scene) -> tuple[JobFinding, ...]:
        stage.num_judged += 1
        stage.clock.sleep(1.0)
        return ()

    watch = HangWatch(stage.sampler, look, Bounds(), stage.clock)
    stage.watch = watch
    stage.sampler.asked.append((stage.clock.now, (0, 1)))
    for _ in range(400):
        stage.clock.sleep(0.1)
        stage.sampler.quiet_since = {0: stage.clock.now, 1: stage.clock.now}  # they move all the time
        watch.poll()
    assert 2 <= stage.num_judged <= 6


@pytest.mark.parametrize(
    ("finding", "evidence", "on_hang", "expected"),
    [
        (PROOF, GLOO, None, True),
        (PROOF, None, None, True),
        (PROOF, NCCL, None, False),
        (PROOF, NCCL, "stop", True),
        (PROOF, NCCL, "restart", True),
        (PROOF, GLOO, "report", False),
        (SILENT, GLOO, "stop", False),
        (replace(PROOF, doing="stopped"), GLOO, "stop", False),
        (replace(PROOF, doing="debugged"), GLOO, "restart", False),
    ],
)
def test_what_a_proof_may_end(finding: JobFinding, evidence: Evidence | None, on_hang: Any, expected: bool) -> None:
    """On Gloo by default; elsewhere if the user says so; never what somebody else has stopped, nor what went through."""
    scene = Scene(ranks=(RankFacts(rank=0, evidence=evidence), RankFacts(rank=1)), world_size=2, now_s=0.0)
    assert may_stop(finding, scene, on_hang) is expected


def _rank(rank: int, stack: Stack | None = WAITS, **facts: Any) -> RankFacts:
    return RankFacts(**{"rank": rank, "pid": rank + 1, "stack": stack, "still_s": 5000.0, **facts})


HUNG_CASES: dict[str, tuple[list[RankFacts], float | None, bool]] = {
    "one sleeps": ([_rank(0), _rank(1, SLEEPS)], None, True),
    "one computes": ([_rank(0), _rank(1, SLEEPS, still_s=0.0)], None, False),
    "one computes, and the user has set a bound": ([_rank(0), _rank(1, SLEEPS, still_s=0.0)], 10.0, True),
    "one compiles": ([_rank(0), _rank(1, COMPILES)], None, False),
    "one is stopped": ([_rank(0), _rank(1, None, state="stopped")], None, False),
    "one is stopped, and the user has set a bound": ([_rank(0), _rank(1, None, state="stopped")], 10.0, True),
    "one is in a debugger": ([_rank(0), _rank(1, SLEEPS, reads_terminal=True)], 10.0, False),
    "none waits": ([_rank(0, SLEEPS), _rank(1, SLEEPS)], 10.0, False),
    "all compute their gradients, and the user has set a bound": (
        [_rank(0, BACKWARD, still_s=0.0), _rank(1, BACKWARD, still_s=0.0)],
        10.0,
        False,
    ),
    "one waits in its backward pass for one that computes, and the user has set a bound": (
        [_rank(0, BACKWARD), _rank(1, BACKWARD, still_s=0.0)],
        10.0,
        True,
    ),
    "all wait": ([_rank(0), _rank(1)], None, True),
    "all are stopped": ([_rank(0, state="stopped"), _rank(1, state="stopped")], 10.0, False),
    "one can't be asked": ([_rank(0), _rank(1, None)], None, False),
    "one has not come, and nobody knows where it stands": ([_rank(0), _rank(1, Stack())], None, False),
    "one has not come, and the user has set a bound": ([_rank(0), _rank(1, Stack())], 10.0, True),
    "a thread waits aside": ([_rank(0, SLEEPS, evidence=ASIDE), _rank(1, SLEEPS)], None, False),
    "a thread waits aside, and the user has set a bound": (
        [_rank(0, SLEEPS, evidence=ASIDE), _rank(1, SLEEPS)],
        10.0,
        True,
    ),
    "a thread waits beside one that works": (
        [_rank(0, SLEEPS, evidence=ASIDE, still_s=0.0), _rank(1, SLEEPS)],
        10.0,
        False,
    ),
    "never": ([_rank(0), _rank(1, SLEEPS)], float("inf"), False),
}


@pytest.mark.parametrize(("ranks", "timeout_s", "expected"), HUNG_CASES.values(), ids=HUNG_CASES)
def test_what_counts_as_hung_after_long(ranks: list[RankFacts], timeout_s: float | None, expected: bool) -> None:
    """After more than half an hour without a record: what is idle; with a bound of the user's own also what is busy."""
    scene = Scene(ranks=tuple(ranks), world_size=2, now_s=9000.0)
    assert is_hung(scene, {0: 4000.0, 1: 4000.0}, timeout_s=timeout_s) is expected


@pytest.mark.parametrize(("quiet_s", "expected"), [(59.0, False), (61.0, True)])
def test_ranks_left_behind_wait_for_a_minute_by_default(quiet_s: float, expected: bool) -> None:
    """Those that all wait, idle, after one has left without an error need not wait for the long bound."""
    gone = RankFacts(rank=1, state="ended", code=0)
    scene = Scene(ranks=(_rank(0, still_s=quiet_s), gone), world_size=2, now_s=9000.0)
    assert is_hung(scene, {0: quiet_s}, timeout_s=None) is expected
    assert not is_hung(scene, {0: quiet_s}, timeout_s=float("inf"))
    failed = replace(gone, code=1)
    scene = replace(scene, ranks=(scene.ranks[0], failed))
    assert not is_hung(scene, {0: quiet_s}, timeout_s=None)


def test_ranks_of_other_nodes_are_thought_to_be_at_work() -> None:
    """Where not all ranks can be seen, only the user's own bound counts, and only if all that can be seen wait."""
    scene = Scene(ranks=(_rank(0), _rank(1)), world_size=4, now_s=9000.0, is_whole=False)
    assert not is_hung(scene, {0: 4000.0, 1: 4000.0}, timeout_s=None)
    assert is_hung(scene, {0: 4000.0, 1: 4000.0}, timeout_s=10.0)
    one_works = replace(scene, ranks=(_rank(0), _rank(1, SLEEPS)))
    assert not is_hung(one_works, {0: 4000.0, 1: 4000.0}, timeout_s=10.0)


def test_who_is_led_tells_only_what_went_through() -> None:
    """While another node judges for all, a hang is neither said nor decided here, also at the user's bound; wrong pairs that went through are."""
    stage = Stage(PROOF, SILENT, timeout_s=5.0)
    stage.run(60, is_led=True)
    assert not stage.watch.has_decided
    assert [key for _, key in stage.told] == ["silent"]


def test_a_suspected_drift_and_a_slow_rank_are_two_things() -> None:
    """Of the same ranks both are said: the drift once, the rank that is slow once a minute; and neither is kept as a proof."""
    drift = replace(SUSPICION, kind="mismatch", rule="drift", is_stuck=False, key="drift")
    stage = Stage(drift, SUSPICION, on_hang="report").run(70.0)
    told = [key for _, key in stage.told]
    assert (told.count("drift"), told.count("k")) == (1, 2)
    assert stage.watch.findings == ()
