"""What the judge sees of other nodes: only what answers its last question, on its own clock, and nothing is asked while all is well."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from clocks import FakeClock
from rankwise.evidence.reader.multi_node_scene import NodeScene, pack, read_message
from rankwise.evidence.reader.rank_activity import RankActivity
from rankwise.launcher import all_nodes_sampler
from rankwise.launcher.all_nodes_sampler import AllNodesSampler
from rankwise.launcher.node_link import Node, NodeMessage
from scenes import ended, op, rank, scene

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pytest

    from rankwise.evidence.reader.scene import RankFacts, Scene


@dataclass
class FakeCamera:
    """Rank 0, which has been quiet for ``quiet_s``."""

    clock: FakeClock
    quiet_s: float = 0.0
    asked: list[float] = field(default_factory=list)

    def look(self) -> bool:
        return False

    def forgive(self) -> None:
        self.quiet_s = 0.0

    def activities(self) -> list[RankActivity]:
        return [RankActivity(rank=0, quiet_s=self.quiet_s, idle_s=self.quiet_s)]

    def ask(self, ranks: Iterable[int]) -> None:
        self.asked += [self.clock.now for _ in ranks]

    def signal_silent(self) -> None:
        return

    def take(self) -> Scene:
        return scene(rank(0), world_size=2, now_s=self.clock.now, is_whole=False)


@dataclass
class FakeLink:
    """Rank 1 is on node 1, whose clock is 500 s behind; questions are numbered at once."""

    clock: FakeClock
    node_rank: int = 0
    asked: int = 0
    questions: dict[int, float] = field(default_factory=dict)
    messages: list[NodeMessage] = field(default_factory=list)
    nodes: dict[int, Node] = field(
        default_factory=lambda: {
            0: Node(host="a", base_rank=0, num_ranks=1),
            1: Node(host="b", base_rank=1, num_ranks=1),
        }
    )

    def note_questions(self) -> None:
        return

    def ask(self, now_s: float) -> None:
        self.asked += 1
        self.questions[self.asked] = now_s

    def take_messages(self) -> list[NodeMessage]:
        messages, self.messages = self.messages, []
        return messages

    def post(
        self,
        *ranks: RankFacts,
        way_s: float = 0.0,
        is_last: bool = False,
        stopped: tuple[int, ...] = (),
        **sign: Any,
    ) -> None:
        """Node 1 answers the last question."""
        then = scene(*ranks, world_size=2, now_s=self.clock.now - 500 - way_s, is_whole=False)
        facts = {"quiet_s": 0.1, "idle_s": 0.1, "is_answered": True, "has_joined": True, **sign}
        activities = () if is_last else (RankActivity(rank=1, **facts),)
        told = NodeScene(scene=then, activities=activities, question=self.asked, is_last=is_last, stopped=stopped)
        self.messages.append(NodeMessage(node=1, at_s=self.clock.now, text=pack(told)))


class Stage:
    def __init__(self, quiet_s: float = 0.0) -> None:
        self.clock, self.said = FakeClock(), list[str]()
        self.sampler, self.link = FakeCamera(self.clock, quiet_s), FakeLink(self.clock)
        self.all_nodes = AllNodesSampler(
            cast("Any", self.sampler), cast("Any", self.link), self.said.append, cast("Any", self.clock)
        )

    def run(self, seconds: float, *, answers: bool = False, **sign: Any) -> Stage:
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.sleep(0.25)
            seen = self.link.asked
            self.all_nodes.look()
            if answers and self.link.asked > seen:
                self.link.post(rank(1), **sign)
        return self

    @property
    def ranks(self) -> list[int]:
        return [facts.rank for facts in self.all_nodes.take().ranks]


def test_nobody_is_asked_while_all_is_well() -> None:
    """Ranks that are quiet for less than two seconds are no reason to ask other nodes."""
    assert Stage(quiet_s=1.9).run(600).link.asked == 0


def test_ranks_that_wait_have_all_nodes_asked_less_and_less_often() -> None:
    """Once a second for ten seconds, every five up to a minute, then every twenty."""
    stage = Stage(quiet_s=3.0)
    counts = []
    for seconds in (10, 50, 60):
        before = stage.link.asked
        stage.run(seconds, answers=True)
        counts.append(stage.link.asked - before)
    assert counts[0] in range(8, 12)
    assert counts[1] in range(9, 12)
    assert counts[2] in range(2, 5)


def test_what_another_node_says_wakes_the_judge() -> None:
    """Node 1's number grows: our ranks are asked, and all nodes are, though ours wait for nobody."""
    stage = Stage()
    stage.link.asked = 1
    stage.run(0.25)
    assert (stage.link.asked, len(stage.sampler.asked)) == (2, 1)


def test_ranks_of_other_nodes_are_seen_while_their_node_answers() -> None:
    """Answered: the scene is whole, and the activity bears the question's moment. A late answer: seen no more, and nobody is accused."""
    stage = Stage(quiet_s=3.0)
    stage.run(0.25, answers=True, quiet_s=7.0)
    stage.clock.sleep(0.25)
    stage.all_nodes.look()
    assert stage.ranks == [0, 1]
    assert stage.all_nodes.take().is_whole
    activity = stage.all_nodes.activities()[1]
    assert (activity.rank, activity.quiet_s, activity.is_answered) == (1, 7.0, True)
    assert activity.asked_s == stage.link.questions[1]
    stage.all_nodes.ask([1])
    stage.run(0.5)
    assert stage.link.asked == 2
    assert [activity.is_answered for activity in stage.all_nodes.activities()] == [True, False]
    stage.run(5)
    assert stage.ranks == [0]
    assert not stage.all_nodes.take().is_whole


def test_ranks_that_have_ended_are_seen_for_ever() -> None:
    """The last letter of a node stays true: its ranks have ended, whether it answers or not."""
    stage = Stage(quiet_s=3.0).run(0.25)
    stage.link.post(ended(1), is_last=True)
    stage.run(100)
    assert stage.ranks == [0, 1]
    assert not stage.said


def test_ranks_that_their_launcher_has_stopped_are_not_seen() -> None:
    """A node that goes on without another one, or is stopped, ends its ranks: that they left is no mistake of the script, and proves no hang."""
    stage = Stage(quiet_s=3.0).run(0.25)
    stage.link.post(ended(1), is_last=True, stopped=(1,))
    stage.run(5)
    assert stage.ranks == [0]
    assert not stage.all_nodes.take().is_whole


def test_a_node_that_does_not_answer_is_named_once() -> None:
    """After ten seconds without an answer: its number, its host, its ranks; once, and never of one that answers."""
    stage = Stage(quiet_s=3.0).run(120)
    assert len(stage.said) == 1
    assert "s from node 1 (b): rank 1 can't be seen" in stage.said[0]
    assert not Stage(quiet_s=3.0).run(120, answers=True).said


def test_answers_that_are_not_read_yet_are_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty nodes answer at once, and it takes the judge half a minute to read that: it asks nothing meanwhile, sees who has answered, and calls nobody silent."""
    stage = Stage(quiet_s=3.0)
    stage.link.nodes = {node: Node(host=f"h{node}", base_rank=node, num_ranks=1) for node in range(41)}
    stage.run(0.25)
    stage.link.post(rank(1))
    stage.link.messages = [replace(stage.link.messages[0], node=node) for node in range(1, 41)]

    def read_slowly(body: dict[str, Any], *, later_s: float) -> NodeScene:
        stage.clock.sleep(0.5)
        return read_message(body, later_s=later_s)

    monkeypatch.setattr(all_nodes_sampler, "read_message", read_slowly)
    stage.run(29)
    assert (stage.link.asked, stage.said, stage.ranks) == (1, [], [0, 1])


def test_nodes_that_do_not_answer_are_named_together() -> None:
    """One line for all that have become silent, however many, with some of their hosts."""
    stage = Stage(quiet_s=3.0)
    stage.link.nodes = {node: Node(host=f"h{node}", base_rank=8 * node, num_ranks=8) for node in range(41)}
    said = stage.run(120).said
    assert len(said) == 1
    assert "s from nodes 1-40 (h1, h2, h3, h4, …): ranks 8-327 can't be seen" in said[0]


def test_moments_are_set_by_the_quickest_letter() -> None:
    """The clocks differ by 500 s. One letter takes 3 s and one nothing: after that, also a slow one's moments are right to the moment."""
    stage, entered = Stage(), []
    for way_s in (3.0, 0.0, 2.0):
        stage.link.post(ended(1, op(entered_s=100.0)), way_s=way_s, is_last=True)
        stage.all_nodes.look()
        evidence = stage.all_nodes.take().ranks[1].evidence
        entered += [one.entered_s for one in evidence.ops] if evidence is not None else []
    assert entered == [603.0, 600.0, 600.0]


def test_a_letter_that_cannot_be_read_is_told() -> None:
    """Another version's letter: its ranks are not seen, one line says why, and the watch goes on."""
    stage = Stage(quiet_s=3.0).run(0.25)
    stage.link.messages.append(NodeMessage(node=1, at_s=stage.clock.now, text="something else"))
    stage.run(0.25)
    assert stage.ranks == [0]
    assert "the records of node 1's ranks can't be read" in stage.said[0]


def test_what_was_told_before_we_slept_is_asked_again() -> None:
    """When this host has slept, others' facts are of before: they count no more until they are told anew."""
    stage = Stage(quiet_s=3.0)
    stage.run(0.5, answers=True)
    assert stage.ranks == [0, 1]
    stage.all_nodes.forgive()
    assert stage.ranks == [0]
