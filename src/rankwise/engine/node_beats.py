"""The connections by which the launchers of several nodes hear each other: TCP, and a proof from each side that it belongs to the job.

What is concluded from what comes over them is the detector's affair. Only the standard library is used, and nothing of the package: the helper
process loads this file by its path.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import itertools
import json
import queue
import secrets
import selectors
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

#: How long to wait for a connection, and for what is said over it; when to connect once more, and with how many that
#: are made.
_REACH_S, _REACH_EVERY_S, _MOST_OPEN = 0.5, 0.02, 3
_UNDER_WAY = {0, errno.EINPROGRESS, errno.EWOULDBLOCK, getattr(errno, "WSAEWOULDBLOCK", 0)}
_CONNECT_S, _AGAIN_S, _MEET_S, _HELLO_S = 15.0, 0.3, 3.0, 5.0
#: Neighbours that try a port connect often, and a kernel whose queue is full does not answer.
_BACKLOG = 1024
_LONGEST_LINE, _LONGEST_GREETING = 1 << 16, 256
#: So long the loop waits at most for something to come.
_TURN_S = 0.1


@dataclass(eq=False)
class _Connection:
    socket: socket.socket
    host: str
    nonce: str
    begun_s: float
    is_parent: bool = False
    #: The detector's, once the other side has proved who it is.
    peer: Any = None
    #: What the other side wants to have proved, and where it listens.
    asked: str = ""
    port: int = 0
    life_port: int = 0
    #: What a launcher says of itself at its ports, which another process may have later.
    name: str = ""
    num_sent: int = 0
    #: Whether its port was ever reached from here: behind NAT or a firewall it is refused while the launcher lives.
    is_reached: bool = False
    received: bytearray = field(default_factory=bytearray)


class Beats:
    """The connections of one node for one round.

    Args:
        detector: Concludes who is lost.
        key: Known to the launchers of this job only; who has it not is refused.
        tell: Says something to the user.
        life: Where this process listens for as long as it lives, 0 if nowhere, and what it says there.
    """

    def __init__(
        self, detector: Any, key: str, *, tell: Callable[[str], None], life: tuple[int, str] = (0, "")
    ) -> None:
        self.detector = detector
        detector.use(self)
        self._node, self._key, self._tell = detector.node, key.encode(), tell
        self._selector = selectors.DefaultSelector()
        self._listener, (self._life_port, self._name) = _listen(), life
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._connections: list[_Connection] = []
        self._about: Sequence[Any] = ()
        self._parent: int | None = None
        self._parent_at: Sequence[Sequence[Any]] = ()
        self._children: frozenset[int] = frozenset()
        self._has_parent = threading.Event()
        #: What threads have found out that may wait for the network: the loop never does.
        self._found: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._over, self._thread = threading.Event(), threading.Thread(target=self._watch, daemon=True)

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
            self.reach_parent()
        self._thread.start()
        if parent is not None:
            # Before any rank runs: who ends before it is known here could not be missed.
            self._has_parent.wait(_MEET_S)

    def end(self) -> None:
        """Say good-bye and close; what is lost afterwards is not reported."""
        self.detector.end()
        self._over.set()
        if self._thread.ident is None:  # it has never begun
            self._listener.close()
            self._selector.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def do(self, action: Callable[[], None]) -> None:
        """Do something in the thread that hears the others, once what has come is read."""
        self._found.put(action)

    # ------------------------------------------------------------ the thread

    def _watch(self) -> None:
        try:
            self._run()
        except Exception as error:  # noqa: BLE001 - whatever it is, the user learns that nobody watches
            self._tell(f"the loss of a node is not watched for any more: {type(error).__name__}: {error}")
        self.detector.leave()
        for connection in list(self._connections):
            self._close(connection)
        self._selector.unregister(self._listener)
        self._listener.close()
        self._selector.close()

    def _run(self) -> None:
        next_s = time.monotonic()
        while not self._over.is_set():
            events = self._selector.select(max(0.0, min(_TURN_S, next_s - time.monotonic())))
            now_s = time.monotonic()
            if self.detector.wake(now_s):
                events = self._selector.select(0.0)  # what came meanwhile is old, and is read as such
            for key, _ in events:
                self._receive(key.fileobj, key.data, now_s)
            while not self._found.empty():
                try:
                    self._found.get()()
                except Exception as error:  # noqa: BLE001 - one conclusion less, and the others are watched
                    self._tell(f"what was found out of a node can't be used: {type(error).__name__}: {error}")
            for connection in list(self._connections):
                if connection.peer is None and now_s - connection.begun_s > _HELLO_S:
                    self._close(connection)
            next_s = self.detector.judge(now_s)

    # ---------------------------------------------- what the detector asks for

    def send(self, peer: Any, message: Mapping[str, Any] | None) -> None:
        """Send a message, or a beat; never wait."""
        self._send(peer.link, b"\n" if message is None else _pack(message))

    def drop(self, peer: Any) -> None:
        """Close the connection."""
        self._close(peer.link)

    def count_acknowledged(self, peer: Any) -> int:
        """Return how many bytes the peer's host has; where the system does not tell, all."""
        return int(peer.link.num_sent) - _count_unacknowledged(peer.link.socket)

    def probe(self, peer: Any, conclude: Callable[[str], None], *, host_only: bool = False) -> None:
        """Look, in a thread of its own, what is at the peer's port, or whether its host answers."""
        host, port, life_port, name = peer.link.host, peer.link.port, peer.link.life_port, peer.link.name

        def look() -> None:
            if host_only:
                state = "open" if does_host_answer(host, port) else "silent"
            else:
                state = try_to_reach(host, port, name)
            if state == "refused" and life_port and try_to_reach(host, life_port, name) != "refused":
                state = "left"
            if state == "refused" and not peer.link.is_reached:
                state = "silent"
            self._found.put(partial(conclude, state))

        _start(look)

    def reach_parent(self, pause_s: float = 0.0) -> None:
        """Connect to the parent, in a thread of its own, as often as it takes."""
        _start(partial(self._reach_parent, pause_s))

    # ----------------------------------------------------------- connections

    def _reach_parent(self, pause_s: float) -> None:
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
                self._tell(
                    f"node {self._parent}'s launcher is not reached at {shown}: if a node freezes, only time-outs will show it"
                )
                return
            time.sleep(_AGAIN_S)

    def _add(self, made: socket.socket, *, is_parent: bool = False) -> None:
        made.settimeout(0)
        with contextlib.suppress(OSError):
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            host = str(made.getpeername()[0])
        except OSError:  # it has gone already
            made.close()
            if is_parent:
                self.reach_parent(_AGAIN_S)
            return
        connection = _Connection(made, host, secrets.token_hex(16), time.monotonic(), is_parent)
        self._connections.append(connection)
        self._selector.register(made, selectors.EVENT_READ, connection)
        self._send(connection, _pack({"nonce": connection.nonce, "name": self._name}))

    def _close(self, connection: _Connection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            self._selector.unregister(connection.socket)
            connection.socket.close()
            if connection.is_parent and connection.peer is None and not self._over.is_set():
                self.reach_parent(_AGAIN_S)  # it had not said who it is: once more

    def _send(self, connection: _Connection, data: bytes) -> None:
        # A peer that takes nothing for so long that the buffer is full is judged by its silence; one that has closed,
        # when it is read.
        with contextlib.suppress(OSError):
            connection.num_sent += connection.socket.send(data)

    def _receive(self, source: Any, connection: _Connection | None, now_s: float) -> None:
        if connection is None:
            with contextlib.suppress(OSError):
                self._add(source.accept()[0])
            return
        if connection not in self._connections:  # closed by what came before it
            return
        try:
            data = connection.socket.recv(_LONGEST_LINE)
        except BlockingIOError:
            return
        except OSError as error:
            self._end_of(connection, f"its connection broke ({error.strerror or error})", now_s)
            return
        if not data:
            self._end_of(connection, "its connection was closed without a good-bye", now_s)
            return
        if connection.peer is not None:
            connection.peer.silence.hear(now_s)
        connection.received += data
        *lines, rest = connection.received.split(b"\n")
        connection.received = rest
        if len(rest) > _LONGEST_LINE:
            self._close(connection)
            return
        for line in lines:
            if line and connection in self._connections:
                self._read(connection, bytes(line), now_s)

    def _end_of(self, connection: _Connection, why: str, now_s: float) -> None:
        if connection.peer is None:
            self._close(connection)
        else:
            self.detector.close(connection.peer, why, now_s)

    def _read(self, connection: _Connection, line: bytes, now_s: float) -> None:
        try:
            message = json.loads(line)
            if connection.peer is None:
                self._greet(connection, message, now_s)
            else:
                self.detector.read(connection.peer, message)
        except Exception:  # noqa: BLE001 - no launcher of ours speaks so
            self._close(connection)

    def _greet(self, connection: _Connection, message: Mapping[str, Any], now_s: float) -> None:
        """Admit who knows the key: the child proves it first, then the parent; each proof is good for one connection, one side and two nodes."""
        if "nonce" in message:
            connection.asked, connection.name = str(message["nonce"]), str(message.get("name", ""))
            if connection.is_parent and self._parent is not None:
                self._prove_to(connection, self._parent)
            return  # a child gets our proof once it has given its
        node = int(message["node"])
        expected = {self._parent} if connection.is_parent else self._children
        side = "parent" if connection.is_parent else "child"
        if node not in expected or not hmac.compare_digest(
            str(message["proof"]), self._prove(side, connection.nonce, node, self._node)
        ):
            self._close(connection)
            return
        if not connection.is_parent:
            self._prove_to(connection, node)
        connection.port, connection.life_port = int(message["port"]), int(message.get("life_port", 0))
        connection.peer = self.detector.admit(
            connection, node, message["about"], is_parent=connection.is_parent, now_s=now_s
        )
        _start(partial(_note_reached, connection))
        if connection.is_parent:
            self._has_parent.set()

    def _prove_to(self, connection: _Connection, node: int) -> None:
        proof = self._prove("child" if connection.is_parent else "parent", connection.asked, self._node, node)
        self._send(
            connection,
            _pack(
                {
                    "node": self._node,
                    "about": list(self._about),
                    "port": self.port,
                    "life_port": self._life_port,
                    "proof": proof,
                }
            ),
        )

    def _prove(self, side: str, nonce: str, node: int, to: int) -> str:
        return hmac.new(self._key, f"{side} {nonce} {node} {to}".encode(), hashlib.sha256).hexdigest()


def _start(action: Callable[[], None]) -> None:
    threading.Thread(target=action, daemon=True).start()


def _pack(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _note_reached(connection: _Connection) -> None:
    connection.is_reached = (
        try_to_reach(connection.host, connection.life_port or connection.port, connection.name) == "open"
    )


def try_to_reach(host: str, port: int, name: str = "") -> str:
    """Return "open" if a launcher answers there, the one of that name, "refused" if the host says that nothing listens or another answers, else "silent"."""
    greeting = _connect_soon(host, port, greets=True)
    if greeting is None:
        return "silent"
    return "open" if greeting and name.encode() in greeting else "refused"


def does_host_answer(host: str, port: int) -> bool:
    """Tell whether the kernel of a host answers, be it with a refusal."""
    return _connect_soon(host, port, greets=False) is not None


def _connect_soon(host: str, port: int, *, greets: bool) -> bytes | None:
    """Connect, again and again while nothing comes back: TCP itself repeats a lost SYN only after a second.

    Returns:
        What is said there, if a greeting is waited for; empty if the host refuses, or has connected; None: nothing in
        time.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with selectors.DefaultSelector() as selector:
            try:
                return _race(addresses, selector, greets=greets)
            finally:
                for key in list(selector.get_map().values()):
                    key.fileobj.close()  # type: ignore[union-attr]
    except OSError:  # the name has no address here, or no descriptor is left
        return None


def _race(addresses: Sequence[Any], selector: selectors.BaseSelector, *, greets: bool) -> bytes | None:
    """Connect to all addresses in turn, for half a second, and wait as long again for what is said over the last connection."""
    begin_s = now_s = next_s = time.monotonic()
    end_s, num_open = begin_s + _REACH_S, 0
    for address in itertools.cycle(addresses):
        if now_s >= end_s:
            break
        if num_open < _MOST_OPEN and now_s >= next_s:
            next_s = now_s + _REACH_EVERY_S
            _begin_to_connect(address, selector)
        timeout_s = max(0.0, min(next_s if num_open < _MOST_OPEN else end_s, end_s) - now_s)
        events: list[Any] = []
        if selector.get_map():
            events = selector.select(timeout_s)
        else:  # on Windows there must be something to select from
            time.sleep(timeout_s)
        now_s = time.monotonic()
        for key, _ in events:
            connection: Any = key.fileobj
            error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error == errno.ECONNREFUSED or not (error or greets):
                return b""
            if key.data == "connecting" and not error:
                selector.modify(connection, selectors.EVENT_READ, "connected")
                num_open, end_s = num_open + 1, max(end_s, min(now_s, begin_s + _REACH_S) + _REACH_S)
                continue
            with contextlib.suppress(OSError):  # a process that was killed loses its sockets one after the other
                if greeting := connection.recv(_LONGEST_GREETING):
                    return bytes(greeting)
            num_open -= key.data == "connected"
            selector.unregister(connection)
            connection.close()
    return None


def _begin_to_connect(address: Any, selector: selectors.BaseSelector) -> None:
    family, kind, protocol, _, where = address
    with contextlib.suppress(OSError):  # no descriptor is left
        connection = socket.socket(family, kind, protocol)
        connection.settimeout(0)
        # A connection to the same host may be refused, or made, at once; the selector says so, too.
        if connection.connect_ex(where) in _UNDER_WAY:
            selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE, "connecting")
        else:  # there is no route
            connection.close()


@cache
def listen_for_life() -> tuple[int, str]:
    """Answer at a port for as long as this process lives, whatever round it is in; return which, and the name that it says."""
    listener, name = _listen(), secrets.token_hex(8)

    def answer() -> None:
        while True:
            try:
                with listener.accept()[0] as connection:
                    connection.sendall(name.encode() + b"\n")
            except OSError:  # it has gone again, or there are no descriptors left
                time.sleep(_TURN_S)

    _start(answer)
    return int(listener.getsockname()[1]), name


def _listen() -> socket.socket:
    """Return a socket that takes connections by IPv4 and, where the host has it, IPv6."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", 0), backlog=_BACKLOG)


def _count_unacknowledged(connection: socket.socket) -> int:
    """Return how many bytes that were sent the peer's host has not acknowledged."""
    try:
        import fcntl  # not on Windows
        import termios

        return int(struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, b"\0" * 4))[0])
    except (ImportError, OSError):
        return 0
