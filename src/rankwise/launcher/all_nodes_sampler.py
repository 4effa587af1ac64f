"""What the judge looks through: the ranks of its own node by its sampler, those of the other nodes by what their launchers publish.

Nobody is asked while all is well. When ranks have waited for seconds, here or on a node that says so, all nodes are asked once
a second, later more and more seldom, and what they answer is one scene with ours. What a node tells counts only while it answers
what it was asked last: a rank whose node does not is not seen, and nobody is accused by what was true a while ago.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

from rankwise.base.rank_names import name_ranks
from rankwise.evidence.reader.multi_node_scene import NodeScene, join, open_message, read_message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rankwise.base.clock import Clock
    from rankwise.evidence.reader.rank_activity import RankActivity
    from rankwise.evidence.reader.scene import Scene
    from rankwise.launcher.node_link import NodeLink, NodeMessage
    from rankwise.launcher.rank_sampler import RankSampler

#: So long after a node has said that its ranks wait it is believed without an answer of its.
_RAISED_S = 5.0
#: Two questions are at least so far apart; and a new one does not wait longer for the answers to the last.
_APART_S, _ANSWER_S = 0.5, 5.0
#: So long a node may take to answer before its ranks are not seen any more, and before that is said.
_LATE_S, _SILENT_S = 4.0, 10.0
#: When nothing was asked for so long, what was answered is forgotten.
_FORGET_S = 40.0
#: So long one look may read letters.
_READING_S = 0.1


@dataclass(slots=True, kw_only=True)
class _Correspondent:
    """What is known of one other node."""

    later_s: float = float("inf")
    latest: NodeScene | None = None
    silent_since_s: float | None = None
    is_called_silent: bool = False


@final
class AllNodesSampler:
    """Looks at all ranks of a job; for ``HangWatch`` as good as a sampler of one node.

    Args:
        sampler: Of our own ranks.
        link: To the other nodes.
        say: Shows a line on the terminal.
        clock: Where the time comes from.
    """

    def __init__(self, sampler: RankSampler, link: NodeLink, say: Callable[[str], None], clock: Clock) -> None:
        self._sampler, self._link, self._say, self._clock = sampler, link, say, clock
        self._others: dict[int, _Correspondent] = {}
        self._messages: list[NodeMessage] = []
        self._asked = 0
        self._raised_s = self._since_s = self._question_s = float("-inf")
        self._is_wanted = False

    # ---------------------------------------------------------------- looking

    def look(self) -> bool:
        """See what has moved here, and what others have reported; ask them, if it is time to."""
        news = self._sampler.look()
        self._link.note_questions()
        news |= self._read_messages(_READING_S)
        self._hear_others()
        self._ask_others()
        return news

    def read_all(self, budget_s: float) -> None:
        """Read what has come, at the job's end."""
        self._read_messages(budget_s)

    def forgive(self) -> None:
        """Count all waiting from now on: what others reported before must be reported again."""
        self._sampler.forgive()
        for other in self._others.values():
            if other.latest is not None and not other.latest.is_last:
                other.latest = None

    def _read_messages(self, budget_s: float) -> bool:
        begin = self._clock.monotonic()
        newest = {message.node: message for message in (*self._messages, *self._link.take_messages())}
        self._messages = list(newest.values())
        news = bool(self._messages)
        while self._messages and self._clock.monotonic() - begin <= budget_s:
            self._read(self._messages.pop(0))
        return news

    def _read(self, message: NodeMessage) -> None:
        other = self._others.setdefault(message.node, _Correspondent())
        try:
            body = open_message(message.text)
            # The way takes longer at one time than at another; what it took least is nearest to the clocks' difference.
            other.later_s = min(other.later_s, message.at_s - body["scene"]["now_s"])
            other.latest = read_message(body, later_s=other.later_s)
        except ValueError as error:
            other.latest = None
            self._say(f"rankwise: the records of node {message.node}'s ranks can't be read: {error}")

    def _hear_others(self) -> None:
        """See whether another node's ranks wait; then ours tell too what they do."""
        asked = self._link.asked
        if asked > self._asked and asked not in self._link.questions:
            self._raised_s = self._clock.monotonic()
            self._sampler.ask(activity.rank for activity in self._sampler.activities() if activity.is_answered)
        self._asked = max(asked, self._asked)

    # ----------------------------------------------------------------- asking

    def _ask_others(self) -> None:
        now = self._clock.monotonic()
        if not self._does_somebody_wait(now):
            self._since_s, self._is_wanted = float("-inf"), False
            return
        if self._since_s == float("-inf"):
            self._since_s = now
        passed_s = now - self._question_s
        # What is not read yet may answer: of many nodes, or on a busy host, that takes several looks.
        if passed_s < _APART_S or self._messages or (passed_s < _ANSWER_S and not self._have_all_answered()):
            return
        if self._is_wanted or passed_s >= _pause_s(now - self._since_s):
            self._note_silence(now)
            self._is_wanted, self._question_s = False, now
            self._link.ask(now)

    def _does_somebody_wait(self, now: float) -> bool:
        return now - self._raised_s < _RAISED_S or any(activity.seems_to_wait for activity in self.activities())

    def _have_all_answered(self) -> bool:
        nodes = [node for node in self._link.nodes if node != self._link.node_rank]
        return bool(nodes) and all(self._has_answered(node) for node in nodes)

    def _has_answered(self, node: int) -> bool:
        other = self._others.get(node)
        if other is None or other.latest is None:
            return False
        return other.latest.is_last or other.latest.question >= self._number

    @property
    def _number(self) -> float:
        """The number of our last question; infinite while it is on its way."""
        return next((number for number, at_s in self._link.questions.items() if at_s == self._question_s), float("inf"))

    def _note_silence(self, now: float) -> None:
        """Say of which nodes nothing is heard, before the next question is asked."""
        if self._number == float("inf"):
            return  # the store has not taken it yet
        silent = dict[int, float]()
        for node in self._link.nodes:
            other = self._others.setdefault(node, _Correspondent())
            if node == self._link.node_rank or self._has_answered(node):
                other.silent_since_s, other.is_called_silent = None, False
                continue
            if other.silent_since_s is None:
                other.silent_since_s = self._question_s
            if now - other.silent_since_s >= _SILENT_S and not other.is_called_silent:
                other.is_called_silent, silent[node] = True, other.silent_since_s
        if silent:
            nodes = [self._link.nodes[node] for node in silent]
            hosts = [*dict.fromkeys(node.host for node in nodes)]
            self._say(
                f"rankwise: no answer for {now - min(silent.values()):.0f} s from {name_ranks([*silent], noun='node')} "
                f"({', '.join(hosts[:4])}{', …' * (len(hosts) > 4)}): {name_ranks([rank for node in nodes for rank in node.ranks])} can't be seen"
            )

    # ------------------------------------------------------------- as a sampler

    def activities(self) -> list[RankActivity]:
        """Return how each living rank seems that can be seen."""
        found = self._sampler.activities()
        for other in self._list_present():
            is_asked, reported_s = other.question >= self._number, other.scene.now_s
            found += [
                replace(one, asked_s=self._question_s, is_answered=one.is_answered and is_asked, reported_s=reported_s)
                for one in other.activities
            ]
        return found

    def ask(self, ranks: Iterable[int]) -> None:
        """Ask ranks for their stacks: ours at once, those of others with the next question."""
        chosen = set(ranks)
        own = {activity.rank for activity in self._sampler.activities()}
        self._sampler.ask(chosen & own)
        self._is_wanted |= bool(chosen - own)

    def signal_silent(self) -> None:
        """Take the stacks of our own that do not answer; other nodes do it there."""
        self._sampler.signal_silent()

    def take(self) -> Scene:
        """Return all ranks that can be seen."""
        return self.with_others(self._sampler.take())

    def with_others(self, scene: Scene) -> Scene:
        """Return a scene of our own ranks together with what others have reported of theirs, less those that their own launchers have stopped."""
        return join(scene, (other.unstopped for other in self._list_present()))

    def list_ends(self) -> tuple[NodeScene, ...] | None:
        """Return what all other nodes have left; None while it is not known of every rank of the job."""
        ends = tuple(other.latest for other in self._others.values() if other.latest and other.latest.is_last)
        own = self._sampler.take()
        is_whole = join(own, (end.scene for end in ends)).is_whole
        return ends if is_whole else None

    def list_host_problems(self) -> tuple[str, ...]:
        """Return what is wrong with the hosts of other nodes, with their names, as they have reported last."""
        hosts = {node: about.host for node, about in self._link.nodes.items()}
        return tuple(
            f"on {hosts.get(node, f'node {node}')}: {one}"
            for node, other in sorted(self._others.items())
            if other.latest is not None
            for one in other.latest.host_problems
        )

    def _list_present(self) -> list[NodeScene]:
        """Return what counts of what others have reported: that they have ended, and what answers our last question."""
        now = self._clock.monotonic()
        is_early = bool(self._messages) or now - self._question_s < _LATE_S
        number, known = self._number, sorted(self._link.questions)
        if is_early:  # until the answers are due, those to the question before count
            before = [one for one in known if one < number]
            number = before[-1] if before else 0
        is_over = now - self._question_s > _FORGET_S
        return [
            other.latest
            for other in self._others.values()
            if other.latest is not None and (other.latest.is_last or (other.latest.question >= number and not is_over))
        ]


def _pause_s(waited_s: float) -> float:
    """Return how long to leave the other nodes alone: the longer ranks wait, the less there is to tell."""
    return 1.0 if waited_s < 10 else 5.0 if waited_s < 60 else 20.0
