"""The link between the launchers of a job's nodes: what ours asks and tells the others of ranks that wait. It never waits for them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast, final

from rankwise.base.errors import LaunchError
from rankwise.launcher.helper import InterruptedByUser
from rankwise.verdict.case import LostNode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.launcher.helper import Helper

_DECIDE_S = 3.0
#: So long a node that ends waits until the others have heard why, or what the judge says of all.
_HEAR_S, _WORD_S, _COLLECT_S = 3.0, 10.0, 10.0
#: A node that has often paused is given up after such a silence.
_SETTLE_S = 11.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node that takes part.

    Attributes:
        host: Its name.
        base_rank: Its first rank; the others follow.
        num_ranks: How many it has.
    """

    host: str
    base_rank: int
    num_ranks: int

    @property
    def ranks(self) -> range:
        """Its ranks."""
        return range(self.base_rank, self.base_rank + self.num_ranks)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMessage:
    """What another node has published.

    Attributes:
        node: Its rank among the nodes.
        at_s: When it came here, monotonic.
        text: What it says (evidence.reader.multi_node_scene).
    """

    node: int
    at_s: float
    text: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnd:
    """That a node has ended the attempt for all.

    Attributes:
        node: Which.
        why: What has failed there.
        code: Its exit code.
        gives_up: Whether it does not meet the others for another attempt.
        host_problems: What is wrong with its host, and may be the cause, as sentences.
    """

    node: int
    why: str
    code: int
    gives_up: bool
    host_problems: tuple[str, ...] = ()


class EndedElsewhere(Exception):  # noqa: N818 - it is no error
    """Another node has ended the attempt, while we waited for its ranks."""


@final
class NodeLink:
    """Speaks with the helper process about one round.

    Args:
        helper: Holds the store at which the nodes have met.
        name: Of the round, as the helper counts.
        node_rank: Which node we are.
        judge: Which node judges for all.
        host: Our name, for others to show.

    Attributes:
        questions: Ours, by number: when each was on its way, monotonic.
    """

    def __init__(self, helper: Helper, name: str, *, node_rank: int, judge: int, host: str) -> None:
        self._helper, self._name = helper, name
        self.node_rank, self.judge, self.host = node_rank, judge, host
        self.questions: dict[int, float] = {}
        self._num_published, self._has_published_end = 0, False
        self._seen: dict[int, int] = {}

    @property
    def is_judge(self) -> bool:
        """Whether we judge for all."""
        return self.judge == self.node_rank

    @property
    def asked(self) -> int:
        """The number of the last question that any node has asked; 0 for none."""
        return int(str(self._news("asked") or 0))

    @property
    def lost(self) -> str | None:
        """Why the others can't be reached any more; None while they can."""
        lost = self._news("lost")
        return None if lost is None else str(lost)

    @property
    def lost_nodes(self) -> tuple[LostNode, ...]:
        """The nodes that were lost while their ranks ran."""
        lost = cast("dict[str, dict[str, object]]", self._news("lost_nodes") or {})
        return tuple(
            LostNode(
                node=int(node),
                host=str(one["host"]),
                base_rank=int(str(one["base"])),
                num_ranks=int(str(one["num"])),
                why=str(one["why"]),
            )
            for node, one in sorted(lost.items())
        )

    @property
    def given_up(self) -> str:
        """Why the other nodes have gone on without ours; empty if they haven't."""
        return str(self._news("expelled") or "")

    @property
    def decision(self) -> str | None:
        """What any node has decided for all."""
        answer = self._news("decision")
        return None if answer is None else str(answer)

    @property
    def end(self) -> AttemptEnd | None:
        """That a node, the first one if several have, has ended the attempt; None if none has."""
        answer = self._news("ended")
        if answer is None:
            return None
        facts = json.loads(str(answer))
        return AttemptEnd(
            node=int(facts["node"]),
            why=str(facts["why"]),
            code=int(facts["code"]),
            gives_up=bool(facts["gives_up"]),
            host_problems=tuple(facts.get("host_problems", ())),
        )

    @property
    def has_end(self) -> bool:
        """Whether the attempt was ended for all: by us, or by another node."""
        return self._has_published_end or self.end is not None

    @property
    def ended_elsewhere(self) -> AttemptEnd | None:
        """That another node has ended the attempt; None if none has."""
        end = self.end
        return None if end is None or end.node == self.node_rank else end

    def end_attempt(self, why: str, *, code: int, gives_up: bool, host_problems: Sequence[str] = ()) -> None:
        """Tell the other nodes that the attempt ends here: their ranks are stopped, and are not started again alone.

        Args:
            why: What has failed.
            code: Our exit code, if we give up.
            gives_up: Whether this node does not meet the others for another attempt.
            host_problems: What is wrong with this host.
        """
        facts = {
            "node": self.node_rank,
            "why": f"on node {self.node_rank} ({self.host}): {why}",
            "code": code,
            "gives_up": gives_up,
            "host_problems": [f"on {self.host}: {one}" for one in host_problems],
        }
        self._has_published_end = True
        self._try("end_attempt", timeout_s=_DECIDE_S, text=json.dumps(facts))

    def leave(self) -> None:
        """Go without a word: the others, who have enough nodes without this one, take it for lost and go on at once."""
        self._helper.close()

    @property
    def nodes(self) -> dict[int, Node]:
        """The nodes that take part, ours among them; known to the judge when it has asked."""
        answer = cast("dict[str, list[object]]", self._news("nodes") or {})
        return {
            int(node): Node(host=str(host), base_rank=int(str(base)), num_ranks=int(str(num)))
            for node, (host, base, num) in answer.items()
        }

    def ask(self, now_s: float) -> None:
        """Ask all nodes what their ranks do.

        Args:
            now_s: Now, monotonic: what is answered to this question is not older.
        """
        self._helper.tell("ask", token=now_s)

    def note_questions(self) -> None:
        """Learn the number of our last question."""
        answer = cast("list[float] | None", self._news("question"))
        if answer is not None:
            self.questions.setdefault(int(answer[1]), float(answer[0]))

    def publish(self, text: str) -> None:
        """Tell the others of our ranks."""
        self._num_published += 1
        self._helper.tell("publish", num=self._num_published, text=text)

    def take_messages(self) -> list[NodeMessage]:
        """Return what has come since the last time, the newest of each node."""
        messages = []
        for node in self.nodes:
            answer = cast("dict[str, object] | None", self._news(f"scene/{node}"))
            if answer is not None and (num := int(str(answer["num"]))) > self._seen.get(node, 0):
                self._seen[node] = num
                at_s = float(str(answer["at_s"]))
                messages.append(NodeMessage(node=node, at_s=at_s, text=str(answer["text"])))
        return messages

    def decide(self, text: str) -> str:
        """Make known to all what the attempt has come to, and return what stands: another node may have been quicker."""
        try:
            return str(self._helper.ask("decide", timeout_s=_DECIDE_S, text=text)["text"])
        except (LaunchError, InterruptedByUser):
            return text

    def wait_end_heard(self) -> None:
        """Wait, if the attempt was ended for all, until they have heard why."""
        if self.has_end:
            self.wait_heard("ended")

    def wait_heard(self, what: str) -> None:
        """Wait, before we take the store away, until all others have heard the last word."""
        self._try("hear", timeout_s=_HEAR_S + 1, bound_s=_HEAR_S, what=what)

    def settle(self) -> None:
        """Wait, when our ranks have lost a peer, until it is known whether its node is lost: others may have given that up sooner."""
        if not self.lost_nodes:
            self._try("settle", timeout_s=_SETTLE_S + 1, bound_s=_SETTLE_S)

    def collect(self) -> bool:
        """Have what all nodes have published by now, when our ranks have ended; False if the store has gone."""
        return self._try("collect", timeout_s=_COLLECT_S) is not None

    def say_word(self, text: str) -> None:
        """Tell the others, who wait for it, what is to be said of the whole job."""
        self._try("say_word", timeout_s=_DECIDE_S, text=text)

    def wait_word(self) -> str:
        """Return what the judge says of the whole job; empty if it says nothing in time."""
        answer = self._try("wait_word", timeout_s=_WORD_S + 1, bound_s=_WORD_S)
        return "" if answer is None else str(answer["text"])

    def _try(self, op: str, *, timeout_s: float, **facts: object) -> dict[str, object] | None:
        try:
            return self._helper.ask(op, timeout_s=timeout_s, on_wait=None, on_tick=None, **facts)
        except (LaunchError, InterruptedByUser):
            return None  # the store has gone, or the user wants us to

    def _news(self, name: str) -> object:
        return self._helper.news(f"{self._name}/{name}")
