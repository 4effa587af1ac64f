"""Which nodes of a job are lost: what one launcher concludes from what it hears. Time and messages come in, messages and conclusions go out.

The launchers form a tree of fan-out ``FAN_OUT``, whose neighbours hear each other many times a second. Not by torch's store: its calls have no bound
when the host that serves it freezes, and a node that looks at it once a second learns late. A connection that closes without a good-bye, at a
port that is refused afterwards, proves that the launcher behind it has ended; one over which nothing comes for a while, that it is frozen or can't
be reached. Who loses a neighbour tells the others, who pass it on. Whatever part of the tree a lost node leaves, a neighbour of it is in that part,
so all living nodes learn of it, with messages as many as there are nodes.

Only the standard library is used, and nothing of the package: the helper process loads this file by its path, and a simulation of thousands of nodes
runs it as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Protocol

    class Links(Protocol):
        """What connects a node with its neighbours."""

        def send(self, peer: Peer, message: Mapping[str, Any] | None) -> None:
            """Send a message, or None for a beat; never wait."""

        def drop(self, peer: Peer) -> None:
            """Close the connection."""

        def count_acknowledged(self, peer: Peer) -> int:
            """Return how many bytes, of those that were sent, the peer's host has acknowledged."""

        def probe(self, peer: Peer, conclude: Callable[[str], None], *, host_only: bool = False) -> None:
            """Find out what is at the peer's port, and call back with "open", "silent", "refused" if its launcher has ended, or "left" if that has left the round; with "open" or "silent" if only the host is asked."""

        def reach_parent(self) -> None:
            """Connect to the parent again."""


FAN_OUT = 16
#: How often a node is heard, and how long it may be silent: at least, at most, and in the first seconds, while all
#: ranks import. That keeps no kernel from acknowledging.
BEAT_S = 0.1
_LEAST_S, _MOST_S, _START_S, _FIRST_S = 0.8, 10.0, 2.5, 15.0
#: A silence counts when it is so much longer than the longest of late, which is forgotten by this share with each beat.
_FACTOR, _FORGET = 4.0, 0.001
#: Who did not get to run for so long forgives the others their silence.
_STALL_S = 0.4
#: Before a silence is too long, the peer is asked by new connections: packets may have been lost, and TCP waits longer
#: each time before it repeats one.
_ASK_S = 0.5
#: A connection over which nothing has come between so many answers is made anew: news would not pass.
_MOST_ANSWERS = 3
#: And what ends so soon after that may have ended meanwhile.
_MEANWHILE_S = 3.0
#: Who tells of losses is believed if its host acknowledges: one that hears nothing has lost all others.
_DOUBT_S = 0.6
#: In less than this no other node joins those that went on without this one.
_JOIN_S = 2.0
#: Who was lost sight of, and answers, may take so long to connect again: as long as a child tries, and a second.
_BACK_S = 16.0


def list_neighbours(place: int, number: int) -> tuple[int | None, list[int]]:
    """Return the parent of a place in the tree, None for the root, and its children.

    Args:
        place: From 0.
        number: Of all places.
    """
    parent = None if place == 0 else (place - 1) // FAN_OUT
    first = FAN_OUT * place + 1
    return parent, list(range(first, min(first + FAN_OUT, number)))


class Silence:
    """How long one peer has been silent, and whether that is too long, judged by its own habits (as phi-accrual detectors do).

    Args:
        now_s: When it was first heard, monotonic.
        start_s: How long it may be silent in the first seconds.
    """

    def __init__(self, now_s: float, start_s: float = _START_S) -> None:
        self.begun_s = self.heard_s = self.stated_s = now_s
        self._start_s = start_s
        self._longest_s, self._forgiven_s = BEAT_S, 0.0
        self.num_answers = 0

    def hear(self, now_s: float) -> None:
        """Note that something came."""
        self.stated_s = now_s
        self._longest_s = max(now_s - self.heard_s, self._longest_s * (1 - _FORGET))
        self.heard_s, self._forgiven_s, self.num_answers = now_s, 0.0, 0

    def answer(self, now_s: float) -> None:
        """Note that another connection was answered: that it lives, not that it still takes part."""
        num_answers, stated_s = self.num_answers + 1, self.stated_s
        self.hear(now_s)
        self.num_answers, self.stated_s = num_answers, stated_s

    def forgive(self, stalled_s: float) -> None:
        """Take from the silence what this process could not have heard: the longest stall, since one that stalls again and again would never judge."""
        more_s = max(0.0, stalled_s - self._forgiven_s)
        self.heard_s += more_s
        self._forgiven_s += more_s

    def bound_s(self, now_s: float) -> float:
        """Return how long a silence is none of its habits."""
        least = self._start_s if now_s - self.begun_s < _FIRST_S else _LEAST_S
        return min(_MOST_S, max(least, _FACTOR * self._longest_s))

    def find_excess_s(self, now_s: float) -> float:
        """Return by how much it has been silent for too long."""
        return now_s - self.heard_s - self.bound_s(now_s)


@dataclass(frozen=True)
class Loss:
    """A node that was lost.

    Attributes:
        node: Its rank among the nodes.
        about: Its host, first rank and number of ranks.
        why: How it is known.
        is_ended: Whether its launcher is known to have ended as a member of this round; else it is silent, and may be
            alive behind a cut.
        is_gone: Whether it is known to have ended by now: it may have met others before, without the node that tells.
    """

    node: int
    about: Sequence[Any]
    why: str
    is_ended: bool
    is_gone: bool = False

    @property
    def message(self) -> dict[str, Any]:
        """What the others are sent."""
        return {"lost": [self.node, list(self.about), self.why, self.is_ended, self.is_gone]}


@dataclass(eq=False)
class Peer:
    """A neighbour that has proved who it is.

    Attributes:
        node: Its rank among the nodes.
        about: Its host, first rank and number of ranks.
        is_parent: Whether it is the parent, and this node the child.
        silence: Since when nothing was heard of it.
        reach: Since when its host has acknowledged nothing.
        link: The connection, for whoever holds it.
        num_acknowledged: How many bytes its host has.
        doubted: What it has sent while its host acknowledged nothing.
        is_asked: Whether a new connection is being tried.
    """

    node: int
    about: Sequence[Any]
    is_parent: bool
    silence: Silence
    reach: Silence
    link: Any
    num_acknowledged: int = 0
    is_asked: bool = False
    doubted: list[Mapping[str, Any]] = field(default_factory=list)


class Detector:
    """What one node knows of the others.

    Args:
        node: Its rank among the nodes.
        on_lost: Called with each node that is lost, and again with each proof that it has ended.
        on_expelled: Called when the others have given this one up, with their reason.

    Attributes:
        losses: By node.
        peers: The neighbours that are heard.
        is_expelled: Whether the others have given this node up.
    """

    def __init__(self, node: int, *, on_lost: Callable[[Loss], None], on_expelled: Callable[[str], None]) -> None:
        self.node = node
        self._on_lost, self._on_expelled = on_lost, on_expelled
        self.losses: dict[int, Loss] = {}
        self.peers: list[Peer] = []
        #: Neighbours that were lost sight of, and answer: until when they have to connect again.
        self._awaited: dict[int, tuple[Peer, float]] = {}
        self.is_expelled = self._is_over = False
        self._links: Links
        self._woken_s: float | None = None
        self._num_probing = 0
        self._next_s = self._stalled_at_s = self._stalled_long_at_s = float("-inf")

    def use(self, links: Links) -> None:
        """Speak with the neighbours by these."""
        self._links = links

    def admit(self, link: object, node: int, about: Sequence[Any], *, is_parent: bool, now_s: float) -> Peer:
        """Hear a neighbour from now on, and tell it what is lost already."""
        peer = Peer(node, about, is_parent, Silence(now_s), Silence(now_s, _LEAST_S), link)
        self.peers.append(peer)
        self._awaited.pop(node, None)
        for loss in self.losses.values():
            self._links.send(peer, loss.message)
        return peer

    def end(self) -> None:
        """Conclude nothing any more: what is lost from now on is not reported."""
        self._is_over = True

    def leave(self) -> None:
        """Say good-bye to all."""
        for peer in list(self.peers):
            self._links.send(peer, {"bye": 1})
            self._drop(peer)

    # ----------------------------------------------------------------- time

    def wake(self, now_s: float) -> bool:
        """Forgive the others what this process could not have heard, if it did not run for a while, and tell whether; called before anything that has come is read."""
        stalled_s = now_s - (now_s if self._woken_s is None else self._woken_s)
        self._woken_s = now_s
        if stalled_s <= _STALL_S:
            return False
        if stalled_s > _LEAST_S:
            self._stalled_at_s = now_s
        if stalled_s > _JOIN_S:
            self._stalled_long_at_s = now_s
        for peer in self.peers:
            peer.silence.forgive(stalled_s)
            peer.reach.forgive(stalled_s)
        return True

    def judge(self, now_s: float) -> float:
        """Be heard by the others, judge their silence, and return when to do so again; called after what has come was read."""
        if is_turn := now_s >= self._next_s:
            self._next_s = now_s + BEAT_S
            for peer in list(self.peers):
                if (num := self._links.count_acknowledged(peer)) > peer.num_acknowledged:
                    peer.num_acknowledged = num
                    peer.reach.hear(now_s)
                    self._believe(peer)
                self._links.send(peer, None)
        for peer in list(self.peers):
            excess_s = max(peer.silence.find_excess_s(now_s), peer.reach.find_excess_s(now_s))
            if excess_s > 0:
                self._give_up(peer, now_s)
            elif is_turn and excess_s > -_ASK_S:
                self._ask(peer, now_s)
        for peer, until_s in list(self._awaited.values()):
            if now_s >= until_s:
                del self._awaited[peer.node]
                self.close(peer, "it did not connect again", now_s)
        return self._next_s

    # ------------------------------------------------------------- messages

    def read(self, peer: Peer, message: Mapping[str, Any]) -> None:
        """Take a message of a neighbour, later if that does not hear this node now."""
        if peer.silence.heard_s - peer.reach.heard_s > _DOUBT_S and "bye" not in message:
            peer.doubted.append(message)
        else:
            self._take(peer, message)

    def _believe(self, peer: Peer) -> None:
        while peer.doubted:
            self._take(peer, peer.doubted.pop(0))

    def _take(self, peer: Peer, message: Mapping[str, Any]) -> None:
        if "lost" in message:
            node, about, why, is_ended, is_gone = message["lost"]
            if node == self.node:
                self._expel(str(why))
            else:
                self.note(Loss(int(node), about, str(why), bool(is_ended), bool(is_gone)))
        elif "expelled" in message:
            self._expel(str(message["expelled"]))
        elif "given_up" in message:
            self.note(Loss(peer.node, peer.about, str(message["given_up"]), is_ended=False))
        elif "bye" in message:
            self._drop(peer)

    def close(self, peer: Peer, why: str, now_s: float) -> None:
        """Find out what the end of a connection means: whether the launcher behind it has ended.

        Args:
            peer: Whose.
            why: How it ended.
            now_s: When, monotonic.
        """
        self._drop(peer)
        # Who was given up may have met others before it ended.
        if self.is_expelled or peer.node in self.losses:
            return
        is_ended, is_gone = self.judge_end(now_s, peer.silence.stated_s)
        self._num_probing += 1

        def conclude(state: str) -> None:
            self._num_probing -= 1
            if state != "silent":
                self._believe(peer)
            if state == "refused":
                self.note(Loss(peer.node, peer.about, f"its launcher has ended: {why}", is_ended, is_gone))
            elif state == "left":
                self.note(Loss(peer.node, peer.about, f"{why}, and its launcher has left this round", is_ended=False))
            elif state == "silent":
                self.note(Loss(peer.node, peer.about, f"{why}, and its host can't be reached any more", is_ended=False))
            else:
                self._await(peer, now_s)

        self._links.probe(peer, conclude)

    def judge_end(self, now_s: float, stated_s: float | None = None) -> tuple[bool, bool]:
        """Return what the end of a launcher that is seen now proves, as in :class:`Loss`.

        Who did not run for a while may have been given up meanwhile, and so may a node that was silent: it may have met
            others before it ended.

        Args:
            now_s: When, monotonic.
            stated_s: When it last said itself that it is a member: what had come during a stall was read at its end,
                and what comes later was sent later; None: it is no neighbour, and nobody knows.
        """
        proofs = []
        for stalled_s, most_s in ((self._stalled_at_s, _LEAST_S), (self._stalled_long_at_s, _JOIN_S)):
            is_fresh = stated_s is None or now_s - stated_s <= most_s
            proofs.append(
                is_fresh and (now_s - stalled_s >= _MEANWHILE_S or (stated_s is not None and stated_s > stalled_s))
            )
        return proofs[0], proofs[1]

    def is_sure(self, now_s: float) -> bool:
        """Tell whether all neighbours were heard of late: those that have often paused are given up later than by others."""
        if self._num_probing:
            return False
        heard_s = [min(peer.silence.heard_s, peer.reach.heard_s) for peer in list(self.peers)]
        return bool(self.losses) or all(now_s - one <= _LEAST_S for one in heard_s)

    def note(self, loss: Loss) -> None:
        """Report a loss, and tell the others.

        Nodes that lose it at the same time may know less of it than one that has a proof, or not its ranks.
        """
        before = self.losses.get(loss.node, loss)
        about = max(before.about, loss.about, key=lambda one: int(one[2]))
        loss = replace(max(before, loss, key=lambda one: (one.is_ended, one.is_gone)), about=about)
        if loss == self.losses.get(loss.node) or self._is_over or self.is_expelled:
            return
        self.losses[loss.node] = loss
        for peer in list(self.peers):
            self._links.send(peer, loss.message)
        self._on_lost(loss)

    # ---------------------------------------------------------- conclusions

    def _await(self, peer: Peer, now_s: float) -> None:
        """Have a neighbour that lives connect again in time; without a connection nobody would notice its loss."""
        if self._is_over or peer.node in self.losses or any(one.node == peer.node for one in self.peers):
            return
        self._awaited[peer.node] = (peer, now_s + _BACK_S)
        if peer.is_parent:
            self._links.reach_parent()

    def _ask(self, peer: Peer, asked_s: float) -> None:
        """Take it for a sign of life if a launcher answers at the peer's port; the same loop does that as sends beats."""
        if peer.is_asked:
            return
        peer.is_asked = True
        # Whoever is heard lives, but may have to be reached.
        host_only = peer.silence.find_excess_s(asked_s) <= -_ASK_S
        silences = [(one, one.heard_s) for one in ((peer.reach,) if host_only else (peer.silence, peer.reach))]

        def conclude(state: str) -> None:
            peer.is_asked = False
            if state != "open" or peer not in self.peers:
                return
            # Several answers to one silence are one; and something may have come meanwhile.
            for one in [one for one, heard_s in silences if one.heard_s == heard_s]:
                one.answer(asked_s)
            if max(peer.silence.num_answers, peer.reach.num_answers) > _MOST_ANSWERS:
                self._drop(peer)
                self._await(peer, asked_s)

        self._links.probe(peer, conclude, host_only=host_only)

    def _give_up(self, peer: Peer, now_s: float) -> None:
        silent_s, unreached_s = now_s - peer.silence.heard_s, now_s - peer.reach.heard_s
        why = f"nothing was heard of it for {silent_s:.1f} s; "
        if silent_s < _ASK_S:
            why = f"it is heard, and its host has acknowledged nothing for {unreached_s:.1f} s: the network passes one way only"
        elif unreached_s < _DOUBT_S:
            why += "its host still answers: the launcher is frozen, or does not get to run"
        else:
            why += "its host acknowledges nothing: it is down, or cut off"
        self._links.send(peer, {"expelled": why})
        self._drop(peer)
        self.note(Loss(peer.node, peer.about, why, is_ended=False))

    def _expel(self, why: str) -> None:
        """Take it that the others go on without this node: what it has lost itself proves nothing."""
        if not self.is_expelled:
            self.is_expelled = True
            # They may hear of each other through this node only, and some of them may have waited for it for longer.
            for peer in list(self.peers):
                self._links.send(peer, {"given_up": why})
            self.losses.clear()
            self._on_expelled(why)

    def _drop(self, peer: Peer) -> None:
        if peer in self.peers:
            self.peers.remove(peer)
            self._links.drop(peer)
