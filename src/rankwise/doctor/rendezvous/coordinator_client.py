"""A host's connection to the coordinator: it connects, says who it is, sends signs of life, and notices when the coordinator is gone."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, final

from rankwise.base.deadline import OverdueError, call_within
from rankwise.base.host import find_port_holder, listen_tcp
from rankwise.doctor.rendezvous.connection import Connection, in_thread
from rankwise.doctor.rendezvous.join_failure import describe, explain_failure
from rankwise.doctor.rendezvous.plan import JoinError, Plan
from rankwise.doctor.rendezvous.wire import (
    BEAT_S,
    GREETING,
    VERSION,
    GoneError,
    SilentError,
    StrangerError,
    explain,
    is_proof,
    keep_packets_small,
    make_nonce,
    mark,
    one_line,
    prove,
    text,
    whole,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.base.clock import Clock
    from rankwise.doctor.host import Host
    from rankwise.doctor.rendezvous.wire import Message

_OPEN_S, _ANSWER_S, _LEAST_ANSWER_S, _AGAIN_S, _LOOK_UP_S = 4.0, 8.0, 2.0, 0.3, 5.0
_FIRST_SAY_S, _SAY_S = 2.0, 10.0
_RIVAL_AGAIN_S, _RIVAL_ANSWER_S, _RIVAL_CLASS = 1.0, 5.0, "I10"
#: What arrived while this process was stopped is read within this time.
_GRACE_S = 0.5
_ARGUMENTS = re.compile(r"(?<=\S) (?:-|[^ ]*=).*\)$|(?<=\.py) .*\)$")


@final
class CoordinatorClient:
    """The connection to the coordinator, while it lasts; after a silence of ``silence_s`` the coordinator is gone."""

    def __init__(self, connection: Connection, clock: Clock, silence_s: float) -> None:
        #: Our address, by which we reached the coordinator.
        self.address = connection.local_address
        self._connection, self._clock, self._silence_s = connection, clock, silence_s
        self._beating = asyncio.create_task(self._beat())

    @staticmethod
    async def connect(where: str, plan: Plan, clock: Clock, silence_s: float) -> CoordinatorClient:
        """Connect to the coordinator at a name or address; OSError, UnicodeError or OverdueError if that can't be done."""
        sock = await in_thread(partial(_connect, where, plan))
        return CoordinatorClient(Connection(*await asyncio.open_connection(sock=sock)), clock, silence_s)

    def send(self, message: Message) -> None:
        """Send a message; if the coordinator is gone, `receive` raises."""
        with suppress(GoneError):
            self._connection.send(message)

    async def receive(self, timeout_s: float | None = None) -> Message:
        """Return the next message that is meant for more than this connection.

        Raises:
            GoneError: The coordinator is gone.
            SilentError: Nothing has ever arrived.
            StrangerError: It is no doctor.
        """
        receiving = asyncio.create_task(self._receive())
        try:
            bound_s = timeout_s or self._silence_s
            while not (await asyncio.wait({receiving}, timeout=bound_s))[0]:
                silent_s = asyncio.get_running_loop().time() - self._connection.heard_s
                if silent_s >= bound_s and not (await asyncio.wait({receiving}, timeout=_GRACE_S))[0]:
                    raise self._explain_silence(bound_s)
            return receiving.result()
        finally:
            receiving.cancel()

    def _explain_silence(self, silent_s: float) -> GoneError:
        if not self._connection.is_known:
            return SilentError(f"it accepted, but sent nothing within {silent_s:.0f} s")
        return GoneError(f"nothing received for {silent_s:.0f} s: it is frozen, or the cable is cut")

    async def close(self) -> None:
        """Close it; what was to be sent is sent before, as far as there is room."""
        self._beating.cancel()
        await self._connection.wait_closed(5.0)

    async def _receive(self) -> Message:
        while True:
            message = await self._connection.receive()
            if not self._connection.is_known and not {"welcome", "no", "challenge"} & message.keys():
                raise StrangerError(f"it sent {str(message)[:40]!r}")
            self._connection.is_known = True
            if text(message, "do") == "time":
                # At once, and not when the rest has time: the round trip bounds the error.
                self.send({"answer": "time", "at": self._clock.time()})
            elif "beat" not in message:
                return message

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self.send({"beat": 1})


def bind_endpoint(plan: Plan) -> socket.socket | None:
    """Return a listener at the endpoint; None if that is another host's, or if its port is taken and nobody has said that it is ours.

    In the latter case the holder of the port may be the coordinator; else it is a JoinError.
    """
    if plan.is_coordinator is False or (plan.is_coordinator is None and not _is_own(plan.endpoint_host)):
        return None
    try:
        if plan.listen_address:
            listener = socket.create_server((plan.listen_address, plan.endpoint_port), backlog=2048)
        else:
            listener = listen_tcp("", plan.endpoint_port)
    except OSError as error:
        if plan.is_coordinator is None and error.errno == errno.EADDRINUSE:
            return None
        raise _explain_taken(plan, error) from error
    keep_packets_small(listener)
    return listener


async def join(host: Host, plan: Plan, say: Callable[[str], None], *, secret: str = "") -> CoordinatorClient:
    """Connect to the coordinator, and be admitted; try again until the time is over, and tell by ``say`` what is waited for.

    A coordinator in this process knows us by its ``secret``. It is a JoinError if none can be reached, or if we are rejected.
    """
    loop = asyncio.get_running_loop()
    begin_s = loop.time()
    until_s, next_say_s = begin_s + plan.arrival_timeout_s, begin_s + _FIRST_SAY_S
    while True:
        try:
            return await _try_join(host, plan, until_s, secret)
        except (GoneError, OSError, UnicodeError, OverdueError) as error:
            if isinstance(error, StrangerError) or loop.time() + _AGAIN_S > until_s:
                raise await in_thread(partial(explain_failure, host, plan, error)) from error
            if loop.time() >= next_say_s:
                next_say_s += _SAY_S
                say(f"waiting for the host that serves {plan.endpoint}: {describe(plan, error)}")
        await asyncio.sleep(_AGAIN_S)


async def _try_join(host: Host, plan: Plan, until_s: float, secret: str) -> CoordinatorClient:
    # A little longer than the arrival may take: the answer to a host that has just arrived must not be missed.
    bound_s = max(_LEAST_ANSWER_S, min(_ANSWER_S, until_s - asyncio.get_running_loop().time()))
    where = (plan.listen_address or "127.0.0.1") if secret else plan.endpoint_host
    client = await CoordinatorClient.connect(where, plan, host.clock, plan.silence_s)
    try:
        await _shake_hands(client, host, plan, secret, bound_s)
    except BaseException:
        await client.close()
        raise
    return client


async def _shake_hands(
    client: CoordinatorClient, host: Host, plan: Plan, secret: str, bound_s: float
) -> None:
    nonce = make_nonce()
    client.send(_make_hello(host, plan, nonce=nonce, own=secret))
    answer = await client.receive(bound_s)
    if plan.token and "no" not in answer:
        challenge = text(answer, "challenge")
        if not is_proof(text(answer, "proof"), plan.token, "coordinator", nonce, challenge):
            raise StrangerError("it does not have the token of this rendezvous")
        client.send({"proof": prove(plan.token, "peer", nonce, challenge)})
        answer = await client.receive(bound_s)
    if "no" in answer:
        raise read_refusal(answer)
    if whole(answer, "welcome") != VERSION:
        raise StrangerError("it uses another version of the doctor's protocol")


def _make_hello(host: Host, plan: Plan, **more: str) -> Message:
    return {
        GREETING: VERSION, "mark": mark(plan.token), "name": one_line(host.name), "node_rank": plan.node_rank,
        "num_hosts": plan.num_hosts, **more,
    }  # fmt: skip


def read_refusal(message: Message) -> JoinError:
    """Return what a coordinator says that rejects us."""
    hint, class_id = one_line(text(message, "hint")), one_line(text(message, "class"), 8)
    return JoinError(one_line(text(message, "no")), hint=hint, class_id=class_id)


async def find_rival(host: Host, plan: Plan, secret: str) -> JoinError | None:
    """Look for another coordinator at the master's address, while hosts arrive here; return the error with which it rejects us.

    Two hosts that both claim node rank 0 would each wait for the others. But an address that is not ours may still lead
    here (address translation, the service of a cluster): whoever answers is asked whether it is ourselves.
    """
    if await in_thread(partial(_is_own, plan.endpoint_host)):
        return None
    loop = asyncio.get_running_loop()
    until_s = loop.time() + plan.arrival_timeout_s
    while loop.time() < until_s:
        with suppress(GoneError, OSError, UnicodeError, OverdueError):
            client = await CoordinatorClient.connect(plan.endpoint_host, plan, host.clock, _RIVAL_ANSWER_S)
            try:
                client.send(_make_hello(host, plan, holds=secret))
                answer = await client.receive()
            finally:
                await client.close()
            if "no" in answer:
                return read_refusal(answer) if text(answer, "class") == _RIVAL_CLASS else None
        await asyncio.sleep(_RIVAL_AGAIN_S)
    return None


def _connect(where: str, plan: Plan) -> socket.socket:
    """Connect to the first address of a name that answers."""
    found = call_within(
        _LOOK_UP_S, lambda: socket.getaddrinfo(where, plan.endpoint_port, type=socket.SOCK_STREAM)
    )
    failure: OSError | None = None
    for family, kind, protocol, _, address in found:
        sock = socket.socket(family, kind, protocol)
        try:
            keep_packets_small(sock)
            sock.settimeout(_OPEN_S)
            if plan.listen_address:
                sock.bind((plan.listen_address, 0))
            sock.connect(address)
        except OSError as error:
            sock.close()
            failure = failure or error
            continue
        return sock
    raise failure or OSError(f"{where} has no address")


def _is_own(name: str) -> bool:
    """Return whether a name's address is one of ours: only then can it be bound."""
    try:
        found = call_within(_LOOK_UP_S, lambda: socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError, OverdueError):
        return False
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as sock, suppress(OSError):
            sock.bind(address)
            return True
    return False


def _explain_taken(plan: Plan, error: OSError) -> JoinError:
    if error.errno != errno.EADDRINUSE:
        return JoinError(
            f"this host can't listen at {plan.endpoint}: {explain(error)}", class_id="I9",
            hint="choose a port from 1024 to 65535 that is free, the same one on all hosts",
        )  # fmt: skip
    holder = find_port_holder(plan.endpoint_port)
    # Of its command the program and the script: its arguments may be secret.
    by = f" by {re.sub(_ARGUMENTS, ')', holder)}" if holder else ""
    return JoinError(
        f"the rendezvous port {plan.endpoint_port} is taken{by}", class_id="I9",
        hint=f"end it (ss -ltnp 'sport = :{plan.endpoint_port}' shows it), or choose another port on all hosts",
    )  # fmt: skip
