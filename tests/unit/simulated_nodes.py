"""Launchers of thousands of nodes in one process: the detectors are the real ones, the clock and the network between them are not.

A message takes its latency, and comes in the order of its connection. A packet that is lost is sent again as TCP does: twice when a beat behind it is
acknowledged, then after 0.2 s, 0.4 s and so on; what was sent after it waits for it. What a cut holds up comes when it is healed; where packets pass one way only,
a connection brings as many as TCP sends before the first is acknowledged. A process that is killed closes its connections and its port is refused; a host that is lost says nothing any more;
a process that is frozen does nothing, though its host still acknowledges.
"""

from __future__ import annotations

import heapq
import json
import random
from typing import TYPE_CHECKING, Any, final

from rankwise.engine.node_detector import BEAT_S, Detector, Loss, Peer, list_neighbours

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_LATENCY_S, _RESEND_S, _PROBE_S, _TRY_EVERY_S, _AGAIN_S = 0.0005, 0.2, 0.5, 0.02, 0.3
_QUICKLY, _WINDOW = 2, 10


@final
class _Link:
    """One direction of a connection: what is sent by one node and is to be read by the other, as its peer."""

    __slots__ = ("arrived_s", "back", "held", "is_open", "num_acknowledged", "num_arrived", "peer", "there")

    def __init__(self, there: Node) -> None:
        self.there, self.is_open, self.arrived_s = there, True, 0.0
        self.num_acknowledged = self.num_arrived = 0
        #: The sender as the reader's peer, and the reader as the sender's.
        self.back: Peer
        self.peer: Peer
        self.held: list[tuple[Callable[..., None], tuple[Any, ...]]] = []


@final
class Node:
    """One launcher, as its neighbours see it: what the detector needs of connections.

    Attributes:
        heard_s: When each loss became known to it, by node.
        expelled: Why the others have given it up.
    """

    def __init__(self, number: int, network: Network) -> None:
        self.number, self._network = number, network
        self.heard_s: dict[int, float] = {}
        self.expelled: list[str] = []
        self.detector = Detector(number, on_lost=self._note, on_expelled=self.expelled.append)
        self.detector.use(self)
        self.is_alive = self.is_up = True
        self.is_frozen = False
        self.side = 0
        #: What waits for a frozen process.
        self.waiting: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def _note(self, loss: Loss) -> None:
        self.heard_s[loss.node] = self._network.now_s

    def send(self, peer: Peer, message: Mapping[str, Any] | None) -> None:
        """Send by the network."""
        self._network.send(self, peer.link, message)

    def drop(self, peer: Peer) -> None:
        """Close both directions; the other side reads the end of it."""
        self._network.close(self, peer.link)

    def count_acknowledged(self, peer: Peer) -> int:
        """How much the host has acknowledged."""
        return int(peer.link.num_acknowledged)

    def probe(self, peer: Peer, conclude: Callable[[str], None], *, host_only: bool = False) -> None:
        """Look what is at the port: the kernel of a frozen process takes the connection, and nobody answers."""
        there, network = peer.link.there, self._network
        delay_s = network.find_answer(self, there, host_only=host_only)
        if delay_s > _PROBE_S:
            network.after(_PROBE_S, self, conclude, "silent")
        else:
            network.after(delay_s, self, conclude, "open" if there.is_alive else "refused")

    def reach_parent(self) -> None:
        """Connect again."""
        parent, _ = list_neighbours(self.number, len(self._network.nodes))
        if parent is not None:
            self._network.after(_AGAIN_S, self, self._network.connect, self, self._network.nodes[parent])


@final
class Network:
    """All nodes of a job.

    Args:
        number: How many.
        loss: The share of packets that are lost.
        slow: Nodes whose processes pause for up to so many seconds between two beats.
        seed: Of what is left to chance.

    Attributes:
        nodes: By their rank.
        now_s: The clock.
        loss: The share of packets that are lost.
        num_beats: How many were sent; ``num_messages`` and ``num_bytes``: of all else.
    """

    def __init__(
        self, number: int, *, loss: float = 0.0, slow: Mapping[int, float] | None = None, seed: int = 0
    ) -> None:
        self._random, self.loss, self._slow = random.Random(seed), loss, slow or {}
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_events = 0
        self.now_s = 0.0
        self.num_beats = self.num_messages = self.num_bytes = 0
        self._ways, self._links = {(0, 0), (1, 1)}, list[tuple[Node, _Link]]()
        self.nodes = [Node(place, self) for place in range(number)]
        for node in self.nodes:
            parent, _ = list_neighbours(node.number, number)
            if parent is not None:
                self.connect(node, self.nodes[parent])
        for node in self.nodes:
            self._at(self._random.random() * BEAT_S, self._turn, node)

    def run(self, for_s: float) -> None:
        """Let so many seconds pass."""
        end_s, events, pop = self.now_s + for_s, self._events, heapq.heappop
        while events and events[0][0] <= end_s:
            self.now_s, _, action, facts = pop(events)
            action(*facts)
        self.now_s = end_s

    # ---------------------------------------------------------------- faults

    def kill(self, number: int) -> None:
        """End a launcher without a word."""
        node = self.nodes[number]
        node.is_alive = False
        for peer in list(node.detector.peers):
            self.close(node, peer.link)

    def lose(self, number: int) -> None:
        """Switch a host off."""
        self.nodes[number].is_alive = self.nodes[number].is_up = False

    def freeze(self, number: int) -> None:
        """Stop a launcher (SIGSTOP)."""
        self.nodes[number].is_frozen = True

    def thaw(self, number: int) -> None:
        """Let it run again: what has come meanwhile is read at once."""
        node = self.nodes[number]
        node.is_frozen = False
        waiting, node.waiting = node.waiting, []
        node.detector.wake(self.now_s)
        for action, facts in waiting:
            action(*facts)

    def cut(self, side: Iterable[int], *, passes: str = "") -> None:
        """Let nothing pass between these nodes and the others; or one way only, "in" to these or "out"."""
        self._ways = {(0, 0), (1, 1)} | {"in": {(0, 1)}, "out": {(1, 0)}, "": set()}[passes]
        for number in side:
            self.nodes[number].side = 1

    def heal(self) -> None:
        """Let all pass again, what was held up first."""
        self._ways = {(0, 0), (0, 1), (1, 0), (1, 1)}
        for sender, link in self._links:
            held, link.held = link.held, []
            for action, facts in held:
                self._arrive(sender, link, action, facts)

    # --------------------------------------------------------------- network

    def reaches(self, here: Node, there: Node) -> bool:
        """Whether packets pass, and the host answers."""
        return there.is_up and (here.side, there.side) in self._ways

    def find_answer(self, here: Node, there: Node, *, host_only: bool) -> float:
        """Return the seconds until one of several new connections is answered: TCP repeats their first packets after a second, which is never soon enough."""
        is_deaf = there.is_frozen and not host_only
        if is_deaf or not (self.reaches(here, there) and self.reaches(there, here)):
            return float("inf")
        passes, tried_s = (1 - self.loss) ** (2 if host_only else 4), 0.0
        while self._random.random() >= passes:
            tried_s += _TRY_EVERY_S
            if tried_s > _PROBE_S:
                return float("inf")
        pause_s = self._slow.get(there.number, 0.0) if there.is_alive and not host_only else 0.0
        return tried_s + 2 * _LATENCY_S + self._random.random() * pause_s

    def connect(self, child: Node, parent: Node) -> None:
        """Make a connection, and have each side admit the other."""
        if not (child.is_alive and parent.is_alive and self.reaches(child, parent) and self.reaches(parent, child)):
            return
        up, down = _Link(parent), _Link(child)
        up.peer = child.detector.admit(up, parent.number, _about(parent), is_parent=True, now_s=self.now_s)
        down.peer = parent.detector.admit(down, child.number, _about(child), is_parent=False, now_s=self.now_s)
        up.back, down.back = down.peer, up.peer
        self._links += [(child, up), (parent, down)]

    def send(self, sender: Node, link: _Link, message: Mapping[str, Any] | None) -> None:
        """Have a message arrive."""
        if message is None:
            self.num_beats += 1
        else:
            self.num_messages += 1
            self.num_bytes += len(json.dumps(message)) + 1
        if sender.is_alive:
            self._at(self._find_arrival(link), self._arrive, sender, link, self._read, (link, message))

    def close(self, sender: Node, link: _Link) -> None:
        """End a connection: the other side reads that after all that was sent before."""
        if link.is_open and sender.is_up:
            link.is_open = False
            self._at(self._find_arrival(link), self._arrive, sender, link, self._read_end, (link,))

    def after(self, delay_s: float, node: Node, action: Callable[..., None], *facts: object) -> None:
        """Have a process do something later."""
        self._at(self.now_s + delay_s, self._do, node, action, facts)

    def _find_arrival(self, link: _Link) -> float:
        delay_s, resend_s, num = _LATENCY_S, _RESEND_S, 0
        while self.loss and self._random.random() < self.loss:
            num += 1
            delay_s += BEAT_S if num <= _QUICKLY else resend_s
            resend_s *= 1 if num <= _QUICKLY else 2
        link.arrived_s = max(self.now_s + delay_s, link.arrived_s)
        return link.arrived_s

    def _at(self, at_s: float, action: Callable[..., None], *facts: object) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at_s, self._num_events, action, facts))

    def _do(self, node: Node, action: Callable[..., None], facts: tuple[Any, ...]) -> None:
        if not node.is_alive:
            return
        if node.is_frozen:
            node.waiting.append((action, facts))
        else:
            action(*facts)

    def _turn(self, node: Node) -> None:
        if not node.is_alive:
            return
        if not node.is_frozen:
            node.detector.wake(self.now_s)
            node.detector.judge(self.now_s)
        pause_s = self._slow.get(node.number, 0.0)
        self._at(self.now_s + BEAT_S + self._random.random() * pause_s, self._turn, node)

    def _arrive(self, sender: Node, link: _Link, action: Callable[..., None], facts: tuple[Any, ...]) -> None:
        is_full = link.num_arrived - link.num_acknowledged >= _WINDOW
        if link.held or is_full or not self.reaches(sender, link.there):
            if link.there.is_up:
                link.held.append((action, facts))
            return
        link.num_arrived += 1
        if self.reaches(link.there, sender):
            link.num_acknowledged = link.num_arrived
        self._do(link.there, action, facts)

    def _read(self, link: _Link, message: Mapping[str, Any] | None) -> None:
        node = link.there
        if link.back in node.detector.peers:
            link.back.silence.hear(self.now_s)
            if message is not None:
                node.detector.read(link.back, message)

    def _read_end(self, link: _Link) -> None:
        node = link.there
        if link.back in node.detector.peers:
            node.detector.close(link.back, "its connection was closed without a good-bye", self.now_s)


def _about(node: Node) -> list[Any]:
    return [f"host{node.number}", 8 * node.number, 8]
