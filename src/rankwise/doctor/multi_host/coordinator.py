"""The coordinator's end of all connections: it admits hosts, gives them orders, waits for answers, and gives up hosts that are silent."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import final

from rankwise.doctor.host import Host
from rankwise.doctor.multi_host import wire
from rankwise.doctor.multi_host.connection import Connection
from rankwise.doctor.multi_host.peer import Admission, Peer, list_names, refuse
from rankwise.doctor.multi_host.plan import Plan
from rankwise.doctor.multi_host.wire import GoneError, Message, StrangerError

#: So long a host that connects may take to say who it is; so many may be about to.
_HELLO_S, _MOST_UNKNOWN = 10.0, 1024
#: No job has more nodes: whoever claims more is no doctor.
_MOST_HOSTS = 1 << 16
#: So often the users are told which hosts are waited for, and after so long for the first time.
_SAY_S, _FIRST_SAY_S = 10.0, 2.0
_POLL_S, _CLOSE_S = 0.1, 1.0
_REFUSE_OTHER = refuse(
    "another doctor has its rendezvous at this port", "start all hosts with the same arguments, or choose another port"
)


class OwnHostLostError(Exception):
    """The coordinator's own host does not take part any more; the text says why. Without it there is no result."""


@final
class Coordinator:
    """All connections of the coordinator; a host that connects may take ``hello_s`` to say who it is."""

    def __init__(self, host: Host, plan: Plan, *, hello_s: float = _HELLO_S) -> None:
        self.peers: list[Peer] = []
        self.admission = Admission(host.name, plan, self.here, host.clock)
        #: Called with each other host that is lost.
        self.on_loss: Callable[[Peer], None] = lambda _: None
        self._plan, self._clock, self._hello_s = plan, host.clock, hello_s
        self._num_unknown, self._is_over, self._own_loss = 0, False, ""
        self._changed = asyncio.Event()
        self._connections: set[Connection] = set()

    async def serve(self, listener: socket.socket) -> None:
        """Accept hosts, and send them signs of life, until this is cancelled."""
        server = await asyncio.start_server(self._accept, sock=listener, backlog=2048)
        try:
            await self._beat()
        finally:
            server.close()

    async def close(self) -> None:
        """Close all connections, after what waits to be sent, if it leaves soon."""
        await asyncio.gather(*(one.wait_closed(_CLOSE_S) for one in self._connections))

    def here(self) -> list[Peer]:
        """Return the hosts that still answer."""
        return [one for one in self.peers if one.is_here]

    async def ask(
        self, orders: Mapping[Peer, Message], timeout_s: float, doing: str, *, is_joint: bool = False
    ) -> dict[Peer, Message]:
        """Give orders (all of one kind, which stands as ``do``), and return the answers.

        A host that is late is lost. What ``is_joint`` is nothing without one of the hosts: the others are not waited for
        then. OwnHostLostError: our own host is lost.
        """
        kind = next((wire.text(one, "do") for one in orders.values()), "")
        # The order to try all links is long, and the same for all hosts: it is encoded once.
        last, line = None, b""
        for peer, order in orders.items():
            if order is not last:
                last, line = order, wire.encode(order)
            peer.awaited, peer.answer = kind, None
            self.tell(peer, line)

        def list_waited() -> list[Peer]:
            return [one for one in orders if one.is_here and one.answer is None]

        loop = asyncio.get_running_loop()
        end_s, next_say_s = loop.time() + timeout_s * self._plan.timeout_factor, loop.time() + _FIRST_SAY_S
        while (waited := list_waited()) and loop.time() < end_s:
            if is_joint and not all(one.is_here for one in orders):
                waited = []
                break
            await self.wait_change(min(end_s, next_say_s) - loop.time())
            if loop.time() >= next_say_s and (waited := list_waited()):
                next_say_s += _SAY_S
                self.say(f"{doing}: waiting for {list_names(waited)}")
        for peer in waited:
            self.lose(peer, f"did not answer within {timeout_s * self._plan.timeout_factor:.0f} s ({doing})")
        self._check_own()
        return {peer: peer.answer for peer in orders if peer.answer is not None and peer.is_here}

    async def wait_change(self, timeout_s: float) -> None:
        """Wait until a host arrives, answers or is lost, or until the time is over."""
        self._check_own()
        self._changed.clear()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), max(0.0, timeout_s))

    def tell(self, peer: Peer, message: Message | bytes) -> None:
        """Send a message, or the line of one, to a host."""
        if peer.is_here:
            peer.connection.send(message)

    def tell_all(self, message: Message) -> None:
        """Send a message to all hosts that are here."""
        for peer in self.here():
            self.tell(peer, message)

    def say(self, line: str) -> None:
        """Show a line to the users of all hosts."""
        self.tell_all({"say": line})

    def lose(self, peer: Peer, why: str) -> None:
        """Give a host up; `ask` and `wait_change` raise if it is our own, which all others must be told."""
        if not peer.is_here:
            return
        peer.lost = why
        peer.connection.close()
        self._changed.set()
        if self._is_over:
            return
        if peer.is_own:
            self._own_loss = why
        else:
            self.on_loss(peer)

    async def break_off(self, why: str, hint: str) -> None:
        """Report all hosts that there will be no result."""
        self._is_over = True
        self.tell_all(refuse(why, hint))
        await self.wait_until_left(2.0)

    async def wait_until_left(self, timeout_s: float) -> None:
        """Wait until all have received their results, and have left: to close before would take the results away."""
        self._is_over = True
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        while self.here() and loop.time() < end_s:
            await self.wait_change(_POLL_S)

    def _check_own(self) -> None:
        if self._own_loss and not self._is_over:
            raise OwnHostLostError(self._own_loss)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            connection = Connection(reader, writer)
        except OSError:  # gone already
            writer.close()
            return
        self._connections.add(connection)
        # A handler that is cancelled at the end must end quietly: asyncio logs it otherwise (Python 3.11). Its
        # connection is closed by `close`: Ctrl-C cancels all tasks at once (Python 3.10), and the other hosts are still
        # to be told.
        with suppress(asyncio.CancelledError):
            peer = await self._admit(connection) if self._num_unknown < _MOST_UNKNOWN else None
            if peer is not None:
                await self._listen(peer)
            self._connections.discard(connection)
            connection.close()

    async def _admit(self, connection: Connection) -> Peer | None:
        self._num_unknown += 1
        try:
            return await asyncio.wait_for(self._shake_hands(connection), self._hello_s)
        except (GoneError, asyncio.TimeoutError):
            return None
        finally:
            self._num_unknown -= 1

    async def _shake_hands(self, connection: Connection) -> Peer | None:
        """Return the host at the other end, if it is one of ours; else it is told why not."""
        hello = await connection.receive(self._hello_s)
        peer = Peer(
            connection=connection, address=connection.address, arrived_at=connection.local_address,
            name=wire.clean_name(wire.text(hello, "name")) or connection.address, node_rank=_read_count(hello, "node_rank"),
            num_hosts=_read_count(hello, "num_hosts"), rival=wire.text(hello, "holds"),
            # Compared as a whole: nobody else knows it.
            is_own=wire.text(hello, "own") == self.admission.secret,
        )  # fmt: skip
        refusal = self._find_mismatch(hello)
        # A rival is told nothing but that it is one.
        must_prove = refusal is None and self._plan.token and not peer.rival
        if must_prove and not await self._prove(hello, connection):
            refusal = _REFUSE_OTHER
        refusal = refusal or self.admission.admit(peer)
        if refusal is not None:
            connection.send(refusal)
            return None
        connection.is_known = True
        self.peers.append(peer)
        self.tell(peer, {"welcome": wire.VERSION})
        self.tell(peer, {"beat": self._clock.monotonic()})
        self._changed.set()
        return peer

    def _find_mismatch(self, hello: Message) -> Message | None:
        if hello.get(wire.GREETING) != wire.VERSION:
            return refuse(
                f"the rendezvous host speaks version {wire.VERSION} of the doctor's protocol, this host {wire.one_line(repr(hello.get(wire.GREETING)), 20)}",
                "use the same version of rankwise on all hosts", "R11",
            )  # fmt: skip
        return _REFUSE_OTHER if wire.text(hello, "mark") != wire.mark(self._plan.token) else None

    async def _prove(self, hello: Message, connection: Connection) -> bool:
        """Prove that we know the token, and return whether the other side does, too."""
        nonce, challenge = wire.text(hello, "nonce"), wire.make_nonce()
        proof = wire.prove(self._plan.token, "coordinator", nonce, challenge)
        connection.send({"challenge": challenge, "proof": proof})
        answer = await connection.receive(self._hello_s)
        return wire.is_proof(wire.text(answer, "proof"), self._plan.token, "peer", nonce, challenge)

    async def _listen(self, peer: Peer) -> None:
        try:
            while peer.is_here:
                self._take(peer, await peer.connection.receive(self._plan.silence_s))
        except GoneError as error:
            self.lose(peer, f"{wire.INVALID_ANSWER}: {error}" if isinstance(error, StrangerError) else str(error))

    def _take(self, peer: Peer, message: Message) -> None:
        if wire.text(message, "leaves"):
            self.lose(peer, wire.one_line(wire.text(message, "leaves"), 500))
        elif wire.text(message, "answer"):
            if wire.text(message, "answer") == peer.awaited:  # all else may be of a stranger's making
                peer.answer = message
                self._changed.set()
        elif "at" in message:
            # The time there, as it answers a beat. The exchange with the shortest round trip counts.
            half_s = (self._clock.monotonic() - wire.number(message, "beat")) / 2
            if 0 <= half_s < peer.clock_error_s:
                peer.clock_ahead_s = wire.number(message, "at") + half_s - self._clock.time()
                peer.clock_error_s = half_s

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(wire.BEAT_S)
            self.tell_all({"beat": self._clock.monotonic()})


def _read_count(message: Message, key: str) -> int | None:
    count = wire.whole(message, key)
    return count if count is not None and 0 <= count <= _MOST_HOSTS else None
