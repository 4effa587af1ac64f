"""Whether the launchers of a job's other nodes live: neighbours in a tree hear each other many times a second, and a loss is reported to all.

Why not by torch's store: its calls have no bound when the host that serves it freezes, and a node that looks at it once a second learns late.
Each node has a connection to its parent and to at most ``FAN_OUT`` children. A connection that closes without a good-bye proves that the launcher
behind it has ended; one over which nothing comes for a while, that it is frozen or can't be reached. Who loses a neighbour tells the others,
who pass it on. Whatever part of the tree a lost node leaves, a neighbour of it is in that part, so all living nodes learn of it.

Only the standard library is used, and nothing of the package: the helper process loads this file by its path.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import queue
import secrets
import selectors
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

FAN_OUT = 16
#: How often a node is heard, and how long it may be silent: at least, at most, and in the first seconds, while all ranks import.
BEAT_S = 0.1
_LEAST_S, _MOST_S, _START_S, _FIRST_S = 0.8, 10.0, 5.0, 15.0
#: A silence counts when it is so much longer than the longest of late, which is forgotten by this share with each beat.
_FACTOR, _FORGET = 4.0, 0.005
#: Who did not get to run for so long forgives the others their silence.
_STALL_S = 0.4
#: And what ends so soon after that may have ended meanwhile.
_MEANWHILE_S = 3.0
_REACH_S, _REACH_TRIES = 0.5, 4
_CONNECT_S, _AGAIN_S, _MEET_S, _HELLO_S = 15.0, 0.3, 3.0, 5.0
_LONGEST_LINE = 1 << 16


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
    """

    def __init__(self, now_s: float) -> None:
        self.begun_s = self.heard_s = now_s
        self._longest_s = BEAT_S

    def hear(self, now_s: float) -> None:
        """Note that something came."""
        self._longest_s = max(now_s - self.heard_s, self._longest_s * (1 - _FORGET))
        self.heard_s = now_s

    def forgive(self, stalled_s: float) -> None:
        """Take from the silence what this process could not have heard."""
        self.heard_s += stalled_s

    def bound_s(self, now_s: float) -> float:
        """Return how long a silence is none of its habits."""
        least = _START_S if now_s - self.begun_s < _FIRST_S else _LEAST_S
        return min(_MOST_S, max(least, _FACTOR * self._longest_s))


@dataclass(frozen=True)
class Loss:
    """A node that was lost.

    Attributes:
        node: Its rank among the nodes.
        about: Its host, first rank and number of ranks.
        why: How it is known.
        is_ended: Whether its launcher is known to have ended; else it is silent, and may be alive behind a cut.
    """

    node: int
    about: Sequence[Any]
    why: str
    is_ended: bool


@dataclass
class _Peer:
    connection: socket.socket
    host: str
    nonce: str
    begun_s: float
    is_parent: bool = False
    node: int | None = None
    about: Sequence[Any] = ()
    port: int = 0
    silence: Silence | None = None
    received: bytearray = field(default_factory=bytearray)


class Beats:
    """The connections of one node for one round.

    Args:
        node: Its rank among the nodes.
        key: Known to the launchers of this job only; who has it not is refused.
        on_lost: Called with each node that is lost.
        on_expelled: Called when the others have given this one up, with their reason.
        tell: Says something to the user.
    """

    def __init__(
        self,
        node: int,
        key: str,
        *,
        on_lost: Callable[[Loss], None],
        on_expelled: Callable[[str], None],
        tell: Callable[[str], None],
    ) -> None:
        self._node, self._key = node, key.encode()
        self._on_lost, self._on_expelled, self._tell = on_lost, on_expelled, tell
        self._selector = selectors.DefaultSelector()
        self._listener = _listen()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._peers: list[_Peer] = []
        self.losses: dict[int, Loss] = {}
        self._about: Sequence[Any] = ()
        self._parent: int | None = None
        self._parent_at: Sequence[Sequence[Any]] = ()
        self._children: frozenset[int] = frozenset()
        self._has_parent = threading.Event()
        #: What threads have found out that may wait for the network: the loop never does.
        self._found: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._over, self._thread = threading.Event(), threading.Thread(target=self._watch, daemon=True)
        #: Whether the others have given this node up.
        self.is_expelled = False
        self._stalled_at_s = float("-inf")

    @property
    def port(self) -> int:
        """Where children connect."""
        return int(self._listener.getsockname()[1])

    def begin(
        self,
        about: Sequence[Any],
        parent: tuple[int, Sequence[Sequence[Any]]] | None,
        children: Sequence[int],
    ) -> None:
        """Connect to the parent, and hear.

        Args:
            about: This node's host, first rank and number of ranks, for the others' reports.
            parent: Its rank, and the addresses at which it may be; None for the root.
            children: Who may connect.
        """
        self._about, self._children = about, frozenset(children)
        if parent is not None:
            self._parent, self._parent_at = parent
            self._start(self._reach_parent)
        self._thread.start()
        if parent is not None:
            # Before any rank runs: who ends before it is known here could not be missed.
            self._has_parent.wait(_MEET_S)

    def end(self) -> None:
        """Say good-bye and close; what is lost afterwards is not reported."""
        self._over.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(1.0)

    # ------------------------------------------------------------ the thread

    def _watch(self) -> None:
        try:
            self._run()
        except Exception as error:  # noqa: BLE001 - whatever it is, the user learns that nobody watches
            self._tell(f"the loss of a node is not watched for any more: {type(error).__name__}: {error}")
        for peer in list(self._peers):
            self._send(peer, b'{"bye": 1}\n')
            self._drop(peer)
        self._selector.unregister(self._listener)
        self._listener.close()
        self._selector.close()

    def _run(self) -> None:
        last_s = next_s = time.monotonic()
        while not self._over.is_set():
            events = self._selector.select(max(0.0, min(BEAT_S, next_s - time.monotonic())))
            now = time.monotonic()
            self._note_stall(now - last_s, now)
            last_s = now
            for key, _ in events:
                self._receive(key.fileobj, key.data, now)
            if now >= next_s:
                next_s = now + BEAT_S
                for peer in list(self._peers):
                    self._send(peer, b"\n")
            while not self._found.empty():
                self._found.get()()
            for peer in list(self._peers):
                self._judge(peer, now)

    def _note_stall(self, stalled_s: float, now: float) -> None:
        """Forgive the others what this process could not have heard."""
        if stalled_s <= _STALL_S:
            return
        if stalled_s > _LEAST_S:
            self._stalled_at_s = now
        for peer in self._peers:
            if peer.silence is not None:
                peer.silence.forgive(stalled_s)

    @staticmethod
    def _start(action: Callable[[], None]) -> None:
        threading.Thread(target=action, daemon=True).start()

    def _judge(self, peer: _Peer, now: float) -> None:
        silence = peer.silence
        if silence is None:
            if now - peer.begun_s > _HELLO_S:
                self._drop(peer)
            return
        if (silent_s := now - silence.heard_s) <= silence.bound_s(now):
            return
        # A beat is a byte, and the last few may still be on their way.
        is_acknowledged = _count_unacknowledged(peer.connection) < silent_s / BEAT_S / 2
        state = "its host still answers: the launcher is frozen, or does not get to run" if is_acknowledged else "its host acknowledges nothing: it is down, or cut off"  # fmt: skip
        self._lose(peer, f"nothing was heard of it for {silent_s:.1f} s; {state}", is_ended=False)

    def _lose(self, peer: _Peer, why: str, *, is_ended: bool) -> None:
        self._send(peer, _pack({"expelled": why}))
        self._drop(peer)
        if peer.node is not None:
            self._note(Loss(peer.node, peer.about, why, is_ended))

    def _note(self, loss: Loss) -> None:
        if loss.node in self.losses or self._over.is_set() or self.is_expelled:
            return
        self.losses[loss.node] = loss
        message = _pack({"lost": [loss.node, list(loss.about), loss.why, loss.is_ended]})
        for peer in list(self._peers):
            self._send(peer, message)
        self._on_lost(loss)

    # ----------------------------------------------------------- connections

    def _reach_parent(self, pause_s: float = 0.0) -> None:
        """Connect, in a thread of its own, as often as it takes."""
        time.sleep(pause_s)
        until_s = time.monotonic() + _CONNECT_S
        while not self._over.is_set():
            for host, port in self._parent_at:
                with contextlib.suppress(OSError):
                    connection = socket.create_connection((host, port), timeout=_REACH_S)
                    self._found.put(partial(self._add, connection, is_parent=True))
                    return
            if time.monotonic() > until_s:
                shown = " or ".join(f"{host}:{port}" for host, port in self._parent_at)
                self._tell(f"node {self._parent}'s launcher is not reached at {shown}: if a node freezes, only time-outs will show it")  # fmt: skip
                return
            time.sleep(_AGAIN_S)

    def _add(self, connection: socket.socket, *, is_parent: bool = False) -> None:
        connection.settimeout(0)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            host = str(connection.getpeername()[0])
        except OSError:  # it has gone already
            connection.close()
            if is_parent:
                self._start(partial(self._reach_parent, _AGAIN_S))
            return
        peer = _Peer(connection, host, secrets.token_hex(16), time.monotonic(), is_parent)
        self._peers.append(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)
        self._send(peer, _pack({"nonce": peer.nonce}))

    def _drop(self, peer: _Peer) -> None:
        if peer in self._peers:
            self._peers.remove(peer)
            self._selector.unregister(peer.connection)
            peer.connection.close()
            if peer.is_parent and peer.node is None and not self._over.is_set():
                self._start(partial(self._reach_parent, _AGAIN_S))  # it had not said who it is: once more

    def _send(self, peer: _Peer, data: bytes) -> None:
        # A peer that takes nothing for so long that the buffer is full is judged by its silence; one that has closed, when it is read.
        with contextlib.suppress(OSError):
            peer.connection.send(data)

    def _receive(self, source: Any, peer: _Peer | None, now: float) -> None:
        if peer is None:
            with contextlib.suppress(OSError):
                self._add(source.accept()[0])
            return
        if peer not in self._peers:  # dropped by what came before it
            return
        try:
            data = peer.connection.recv(_LONGEST_LINE)
        except BlockingIOError:
            return
        except OSError as error:
            self._end_of(peer, f"its connection broke ({error.strerror or error})", now)
            return
        if not data:
            self._end_of(peer, "its connection was closed without a good-bye", now)
            return
        if peer.silence is not None:
            peer.silence.hear(now)
        peer.received += data
        *lines, rest = peer.received.split(b"\n")
        peer.received = rest
        if len(rest) > _LONGEST_LINE:
            self._drop(peer)
            return
        for line in lines:
            if line and peer in self._peers:
                self._read(peer, bytes(line), now)

    def _end_of(self, peer: _Peer, why: str, now: float) -> None:
        """Find out what the end of a connection means: whether the launcher behind it has ended."""
        node, about = peer.node, peer.about
        if node is None or self.is_expelled:
            self._drop(peer)
            return
        # Who did not run for a while may have been given up meanwhile, and the other one may long be in another round.
        has_stalled = now - self._stalled_at_s < _MEANWHILE_S
        self._drop(peer)

        def probe() -> None:
            state = _try_to_reach(peer.host, peer.port)
            self._found.put(lambda: conclude(state))

        def conclude(state: str) -> None:
            if state == "refused":
                self._note(Loss(node, about, f"its launcher has ended: {why}", is_ended=not has_stalled))
            elif state == "silent":
                self._note(Loss(node, about, f"{why}, and its host can't be reached any more", is_ended=False))  # fmt: skip
            elif peer.is_parent and not self._over.is_set():
                self._start(partial(self._reach_parent, _AGAIN_S))

        self._start(probe)

    def _read(self, peer: _Peer, line: bytes, now: float) -> None:
        try:
            message = json.loads(line)
            if peer.node is None:
                self._greet(peer, message, now)
            elif "lost" in message:
                node, about, why, is_ended = message["lost"]
                if node == self._node:
                    self._expel(str(why))
                else:
                    self._note(Loss(int(node), about, str(why), bool(is_ended)))
            elif "expelled" in message:
                self._expel(str(message["expelled"]))
            elif "bye" in message:
                self._drop(peer)
        except Exception:  # noqa: BLE001 - no launcher of ours speaks so
            self._drop(peer)

    def _greet(self, peer: _Peer, message: Mapping[str, Any], now: float) -> None:
        """Admit who knows the key: the child proves it first, then the parent; each proof is good for one connection, one side and two nodes."""
        if "nonce" in message:
            if peer.is_parent and self._parent is not None:
                self._prove_to(peer, str(message["nonce"]), self._parent)
            else:
                peer.about = [str(message["nonce"])]  # for our own proof, once the child has given its
            return
        node = int(message["node"])
        expected = {self._parent} if peer.is_parent else self._children
        side = "parent" if peer.is_parent else "child"
        if node not in expected or not hmac.compare_digest(str(message["proof"]), self._prove(side, peer.nonce, node, self._node)):  # fmt: skip
            self._drop(peer)
            return
        if not peer.is_parent:
            self._prove_to(peer, str(peer.about[0]), node)
        peer.node, peer.about, peer.port, peer.silence = (
            node,
            message["about"],
            int(message["port"]),
            Silence(now),
        )
        if peer.is_parent:
            self._has_parent.set()
        for loss in self.losses.values():
            self._send(peer, _pack({"lost": [loss.node, list(loss.about), loss.why, loss.is_ended]}))

    def _prove_to(self, peer: _Peer, nonce: str, node: int) -> None:
        proof = self._prove("child" if peer.is_parent else "parent", nonce, self._node, node)
        self._send(peer, _pack({"node": self._node, "about": list(self._about), "port": self.port, "proof": proof}))  # fmt: skip

    def _prove(self, side: str, nonce: str, node: int, to: int) -> str:
        return hmac.new(self._key, f"{side} {nonce} {node} {to}".encode(), hashlib.sha256).hexdigest()

    def _expel(self, why: str) -> None:
        """Take it that the others go on without this node: what it has lost itself proves nothing."""
        if not self.is_expelled:
            self.is_expelled = True
            self.losses.clear()
            self._on_expelled(why)


def _pack(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _try_to_reach(host: str, port: int) -> str:
    """Return "open" if a launcher answers there, "refused" if the host says that nothing listens, else "silent"."""
    for _ in range(_REACH_TRIES):
        try:
            with socket.create_connection((host, port), timeout=_REACH_S) as connection:
                if connection.recv(1):
                    return "open"
        except ConnectionRefusedError:
            return "refused"
        except ConnectionResetError:
            pass
        except OSError:
            break
        time.sleep(BEAT_S / 4)  # a process that was killed loses its sockets one after the other
    return "silent"


def _listen() -> socket.socket:
    """Return a socket that takes connections by IPv4 and, where the host has it, IPv6."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=64)
    return socket.create_server(("", 0), backlog=64)


def _count_unacknowledged(connection: socket.socket) -> int:
    """Return how many bytes that were sent the peer's host has not acknowledged."""
    try:
        import fcntl  # not on Windows
        import termios

        return int(struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, b"\0" * 4))[0])
    except (ImportError, OSError):
        return 0
