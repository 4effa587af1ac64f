"""What a node does for the one that judges: it says once that its ranks wait, answers when they have, and judges alone if nobody asks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from clocks import FakeClock
from rankwise.evidence.reader.multi_node_scene import NodeScene, open_message, read_message
from rankwise.evidence.reader.rank_activity import RankActivity
from rankwise.launcher.node_responder import NodeResponder
from scenes import rank, scene

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rankwise.evidence.reader.scene import Scene


@dataclass
class FakeCamera:
    """Rank 1, which answers after ``answer_s``."""

    clock: FakeClock
    quiet_s: float = 0.0
    answer_s: float = 0.3
    has_joined: bool = True
    asked_s: float = float("-inf")

    def look(self) -> bool:
        return False

    def activities(self) -> list[RankActivity]:
        return [
            RankActivity(
                rank=1, quiet_s=self.quiet_s, idle_s=self.quiet_s, asked_s=self.asked_s,
                is_answered=self.clock.now - self.asked_s >= self.answer_s, has_joined=self.has_joined,
            )
        ]  # fmt: skip

    def ask(self, ranks: Iterable[int]) -> None:
        assert list(ranks) == [1]
        self.asked_s = self.clock.now

    def signal_silent(self) -> None:
        return

    def take(self) -> Scene:
        return scene(rank(1), world_size=2, now_s=self.clock.now, is_whole=False)


@dataclass
class FakeLink:
    asked: int = 0
    lost: str | None = None
    questions: dict[int, float] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)

    def note_questions(self) -> None:
        return

    def ask(self, now_s: float) -> None:
        self.asked += 1
        self.questions[self.asked] = now_s

    def publish(self, text: str) -> None:
        self.texts.append(text)

    @property
    def told(self) -> list[NodeScene]:
        return [read_message(open_message(text), later_s=0.0) for text in self.texts]


class Stage:
    def __init__(self, **sampler: Any) -> None:
        self.clock, self.link = FakeClock(), FakeLink()
        self.sampler = FakeCamera(self.clock, **sampler)
        self.answers = NodeResponder(cast("Any", self.sampler), cast("Any", self.link), cast("Any", self.clock))

    def run(self, seconds: float) -> Stage:
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.sleep(self.answers.next_in_s)
            self.answers.poll()
        return self


def test_nothing_is_told_while_all_is_well() -> None:
    """Ranks that are at work: no question, no letter."""
    stage = Stage(quiet_s=1.9).run(600)
    assert (stage.link.asked, stage.link.texts) == (0, [])


def test_ranks_that_wait_are_told_of_once() -> None:
    """They wait: one question, to which this node is the first to answer. When they have gone on and wait again, one more."""
    stage = Stage(quiet_s=2.5).run(5)
    assert stage.link.asked == 1
    assert [told.question for told in stage.link.told] == [1]
    stage.sampler.quiet_s = 0.0
    stage.run(1)
    stage.sampler.quiet_s = 2.5
    assert stage.run(1).link.asked == 2


def test_ranks_that_have_no_group_yet_are_given_longer() -> None:
    """Before init_process_group a rank imports: five seconds, not two."""
    assert Stage(quiet_s=4.5, has_joined=False).run(5).link.asked == 0
    assert Stage(quiet_s=5.5, has_joined=False).run(5).link.asked == 1


def test_a_question_is_answered_when_the_ranks_have() -> None:
    """The judge asks: this rank is asked then, and what is told bears the number, and that it has answered."""
    stage = Stage()
    stage.link.asked = 7
    stage.run(0.5)
    assert stage.link.texts == []
    stage.run(0.5)
    (told,) = stage.link.told
    assert (told.question, told.is_last) == (7, False)
    (activity,) = told.activities
    assert (activity.rank, told.question, activity.is_answered) == (1, 7, True)
    assert stage.run(60).link.told == [told]


def test_a_rank_that_does_not_answer_does_not_keep_the_node_from_it() -> None:
    """After 2.5 s what is known is told, with the rank as silent; once more when it has answered."""
    stage = Stage(answer_s=20.0)
    stage.link.asked = 1
    stage.run(10)
    assert [told.activities[0].is_answered for told in stage.link.told] == [False]
    stage.run(15)
    assert [told.activities[0].is_answered for told in stage.link.told] == [False, True]


def test_a_node_that_nobody_asks_judges_for_itself() -> None:
    """Ten seconds after it has told that its ranks wait; not if it is asked, and at once if the link is lost."""
    stage = Stage(quiet_s=3.0).run(9)
    assert stage.answers.has_judge
    assert not stage.run(3).answers.has_judge
    asked = Stage(quiet_s=3.0).run(2)
    asked.link.asked += 1
    assert asked.run(30).answers.has_judge
    asked.link.lost = "the store has gone"
    assert not asked.answers.has_judge


def test_nothing_is_told_after_the_end() -> None:
    """All ranks have ended, and that was told: a later question does not overwrite it by a letter that says less."""
    stage = Stage()
    stage.answers.stop()
    stage.link.asked = 3
    assert stage.run(30).link.texts == []
