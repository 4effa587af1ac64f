"""What a sampler makes of what ranks record: what counts as getting on, what can wait, what is out of date."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import pytest

from clocks import FakeClock
from rankwise.evidence.reader.notes import Frame, Stack
from rankwise.evidence.reader.scene import Evidence, Op
from rankwise.launcher import rank_sampler
from rankwise.launcher.rank_end import Rank
from rankwise.launcher.rank_sampler import RankSampler

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.linux
STACK = Stack(frames=(Frame(file="/x/train.py", line=7, function="<module>"),))


@dataclass
class FakePlace:
    """A rank's records; a read takes its time."""

    clock: FakeClock
    evidence: Evidence = field(default_factory=lambda: Evidence(has_joined=True))
    version: int = 0
    is_answered: bool = True
    num_reads: int = 0
    costs_s: float = 0.0

    @property
    def mark(self) -> bytes:
        return str(self.version).encode()

    def write(self, **changes: Any) -> None:
        self.evidence = Evidence(**{"has_joined": True, **changes})
        self.version += 1

    def read(self) -> Evidence:
        self.num_reads += 1
        self.clock.sleep(self.costs_s)
        return self.evidence

    def ask(self) -> None:
        self.is_answered = False

    def wait_answer(self, clock: object, timeout_s: float) -> bool:
        return self.is_answered


class Stage:
    """Ranks that are this very process, as far as the kernel knows."""

    def __init__(self, num_ranks: int) -> None:
        self.clock = FakeClock()
        self.fd = os.memfd_create("notes")
        self.places = [FakePlace(self.clock) for _ in range(num_ranks)]
        self.ranks = [
            Rank(rank=rank, local_rank=rank, tag=str(rank), streams=cast("Any", None), notes_fd=self.fd,
                 stacks_fd=self.fd, evidence=cast("Any", place), pid=os.getpid())
            for rank, place in enumerate(self.places)
        ]  # fmt: skip
        self.sampler = RankSampler(self.ranks, num_ranks, self.clock)

    def quiet_s(self) -> list[float]:
        return [activity.quiet_s for activity in self.sampler.activities()]


@pytest.fixture
def make() -> Iterator[Any]:
    """Return what makes a stage; its file is closed at the end."""
    stages: list[Stage] = []

    def build(num_ranks: int) -> Stage:
        stages.append(Stage(num_ranks))
        return stages[-1]

    yield build
    for stage in stages:
        os.close(stage.fd)


def test_a_record_or_a_step_is_getting_on_and_an_answer_is_not(make: Any) -> None:
    """Stacks and flight recorder, told on demand, leave a rank as quiet as it was; a collective, its end or a step does not."""
    stage = make(1)
    stage.places[0].write()
    stage.sampler.look()
    stage.clock.sleep(3)
    stage.places[0].write(stacks={"MainThread": STACK}, stacks_s=stage.clock.now, dumped_s=stage.clock.now)
    assert stage.sampler.look()
    assert stage.quiet_s() == [3.0]
    op = Op(group="0", seq=1, name="all_reduce")
    for changes in (
        {"ops": (op,)},
        {"ops": (Op(group="0", seq=1, name="all_reduce", is_over=True),)},
        {"steps": 1},
    ):
        stage.clock.sleep(3)
        stage.places[0].write(**changes)
        stage.sampler.look()
        assert stage.quiet_s() == [0.0]


def test_what_has_not_changed_is_not_read_again(make: Any) -> None:
    """Ranks that stand still cost no reading."""
    stage = make(2)
    stage.places[0].write()
    stage.places[1].write()
    for _ in range(5):
        stage.sampler.look()
    assert [place.num_reads for place in stage.places] == [1, 1]
    assert not stage.sampler.look()


def test_reading_many_ranks_is_spread_over_looks(make: Any) -> None:
    """A look ends when its time is over; the others' turn comes next, and until then they count as getting on."""
    stage = make(8)
    for place in stage.places:
        place.costs_s = 0.04
        place.write()
    stage.sampler.look(budget_s=0.1)
    assert [place.num_reads for place in stage.places] == [1, 1, 1, 0, 0, 0, 0, 0]
    for _ in range(2):
        stage.sampler.look(budget_s=0.1)
    assert [place.num_reads for place in stage.places] == [1] * 8


def test_an_answer_is_seen_only_when_it_has_been_read(make: Any) -> None:
    """A rank has answered when what it wrote is in the scene, and not before; then it has a stack there."""
    stage = make(1)
    stage.places[0].write()
    stage.sampler.look()
    stage.sampler.ask([0])
    assert [activity.is_answered for activity in stage.sampler.activities()] == [False]
    stage.clock.sleep(0.1)
    stage.places[0].write(stacks={"MainThread": STACK}, stacks_s=stage.clock.now)
    stage.places[0].is_answered = True
    assert [activity.is_answered for activity in stage.sampler.activities()] == [False]
    stage.sampler.look()
    assert [activity.is_answered for activity in stage.sampler.activities()] == [True]
    assert stage.sampler.take().ranks[0].stack == STACK


def test_a_rank_that_a_signal_might_disturb_is_left_alone(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not answer, and is in no wait that a signal leaves alone, has no stack, and nobody waits for it."""
    # The rank is this very process, whose other threads may be at work or not.
    monkeypatch.setattr(rank_sampler, "has_busy_threads", lambda _pid: False)
    stage = make(1)
    stage.places[0].write()
    stage.sampler.look()
    stage.sampler.ask([0])
    stage.sampler.signal_silent()
    assert [activity.is_answered for activity in stage.sampler.activities()] == [False]
    stage.clock.sleep(3)
    stage.sampler.signal_silent()
    assert [activity.is_answered for activity in stage.sampler.activities()] == [True]
    assert stage.sampler.take().ranks[0].stack is None


def test_a_rank_that_has_not_come_stands_nowhere_that_is_known(make: Any) -> None:
    """Before init_process_group nobody in it answers: it has a stack without a line, and is not waited for."""
    stage = make(1)
    stage.places[0].write(has_joined=False)
    stage.sampler.look()
    stage.sampler.ask([0])
    stage.sampler.signal_silent()
    assert [activity.is_answered for activity in stage.sampler.activities()] == [True]
    assert stage.sampler.take().ranks[0].stack == Stack()
    stage.clock.sleep(9)
    stage.places[0].write(has_joined=False, has_come=True)
    stage.sampler.look()
    assert stage.quiet_s() == [0.0]
    assert stage.sampler.take().ranks[0].stack is None


def test_a_stack_of_before_is_not_the_stack_of_now(make: Any) -> None:
    """A rank that has got on since it was asked, seconds ago, has no stack until it is asked again."""
    stage = make(1)
    stage.places[0].write(stacks={"MainThread": STACK}, stacks_s=stage.clock.now)
    stage.sampler.look()
    stage.clock.sleep(10)
    stage.places[0].write(stacks={"MainThread": STACK}, stacks_s=1000.0, steps=1)
    stage.sampler.look()
    assert stage.sampler.take().ranks[0].stack is None


def test_what_a_rank_wrote_last_is_read_after_its_end(make: Any) -> None:
    """A rank that has ended is told as ended, with the records that it left, and is not looked at again."""
    stage = make(2)
    stage.places[0].write(steps=7)
    stage.ranks[0].code, stage.ranks[0].ended_s = 0, 1000.5
    assert stage.sampler.look()
    facts = stage.sampler.take().ranks[0]
    assert (facts.state, facts.code, facts.ended_s, facts.stack) == ("ended", 0, 1000.5, None)
    assert facts.evidence is not None
    assert facts.evidence.steps == 7
    stage.places[0].write(steps=8)
    stage.sampler.look()
    assert stage.places[0].num_reads == 1
    assert [activity.rank for activity in stage.sampler.activities()] == [1]
