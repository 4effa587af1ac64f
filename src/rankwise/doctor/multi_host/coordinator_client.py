"""A host's connection to the coordinator: it connects, says who it is, answers signs of life, and notices when the coordinator is gone.

Where a host does not reach it: what was found at the endpoint, and what the endpoint's name means here.
"""

from __future__ import annotations

import asyncio
import errno
import shlex
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from rankwise.base.clock import Clock
from rankwise.base.deadline import OverdueError, call_within
from rankwise.base.host import listen_tcp
from rankwise.doctor.host import Host
from rankwise.doctor.limits.processes import find_port_user
from rankwise.doctor.multi_host import wire
from rankwise.doctor.multi_host.connection import Connection, in_thread
from rankwise.doctor.multi_host.plan import JoinError, Plan
from rankwise.doctor.multi_host.wire import GoneError, Message, SilentError, StrangerError, explain
from rankwise.doctor.network.names import find_mistake, is_address, is_own, write_remedy

_OPEN_S, _ANSWER_S, _LEAST_ANSWER_S, _AGAIN_S, _LOOK_UP_S = 4.0, 8.0, 2.0, 0.3, 5.0
_FIRST_SAY_S, _SAY_S = 2.0, 10.0
#: What was to be sent is sent before a connection is closed, as far as there is room.
CLOSE_S = 5.0
_RIVAL_AGAIN_S, _RIVAL_ANSWER_S, _RIVAL_CLASS = 1.0, 5.0, "I10"


async def connect(where: str, plan: Plan) -> Connection:
    """Connect to the coordinator at a name or address; OSError, UnicodeError or OverdueError if that can't be done."""
    sock = await in_thread(partial(_connect, where, plan))
    return Connection(*await asyncio.open_connection(sock=sock))


async def receive(connection: Connection, clock: Clock, timeout_s: float) -> Message:
    """Return the coordinator's next message that is no sign of life, which is answered; GoneError: it is gone, or no doctor."""
    while True:
        message = await connection.receive(timeout_s)
        if not connection.is_known and not {"welcome", "no", "challenge"} & message.keys():
            raise StrangerError(f"it sent {str(message)[:40]!r}")
        connection.is_known = True
        if "beat" not in message:
            return message
        # With the time here: at once, as the round trip bounds the error.
        connection.send({"beat": message["beat"], "at": clock.time()})


def bind_endpoint(host: Host, plan: Plan) -> socket.socket | None:
    """Return a listener at the endpoint; None if that is another host's, or if its port is taken and nobody has said that it is ours.

    In the latter case the holder of the port may be the coordinator; else it is a JoinError.
    """
    if plan.is_coordinator is False or (plan.is_coordinator is None and not is_own(plan.endpoint_host)):
        return None
    try:
        listener = listen_tcp(plan.listen_address, plan.endpoint_port)
    except OSError as error:
        if plan.is_coordinator is None and error.errno == errno.EADDRINUSE:
            return None
        raise _explain_taken(host, plan, error) from error
    wire.keep_packets_small(listener)
    return listener


async def join(host: Host, plan: Plan, say: Callable[[str], None], *, secret: str = "") -> Connection:
    """Connect to the coordinator, and be admitted; try again until the time is over, and tell by ``say`` what is waited for.

    A coordinator in this process knows us by its ``secret``. It is a JoinError if none can be reached, or if we are
    rejected.
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


async def _try_join(host: Host, plan: Plan, until_s: float, secret: str) -> Connection:
    # A little longer than the arrival may take: the answer to a host that has just arrived must not be missed.
    bound_s = max(_LEAST_ANSWER_S, min(_ANSWER_S, until_s - asyncio.get_running_loop().time()))
    where = (plan.listen_address or "127.0.0.1") if secret else plan.endpoint_host
    connection = await connect(where, plan)
    try:
        await _shake_hands(connection, host, plan, secret, bound_s)
    except BaseException:
        await connection.wait_closed(CLOSE_S)
        raise
    return connection


async def _shake_hands(connection: Connection, host: Host, plan: Plan, secret: str, bound_s: float) -> None:
    nonce = wire.make_nonce()
    connection.send(_make_hello(host, plan, nonce=nonce, own=secret))
    answer = await receive(connection, host.clock, bound_s)
    if plan.token and "no" not in answer:
        challenge = wire.text(answer, "challenge")
        if not wire.is_proof(wire.text(answer, "proof"), plan.token, "coordinator", nonce, challenge):
            raise StrangerError("it does not have the token of this rendezvous")
        connection.send({"proof": wire.prove(plan.token, "peer", nonce, challenge)})
        answer = await receive(connection, host.clock, bound_s)
    if "no" in answer:
        raise read_refusal(answer)
    if wire.whole(answer, "welcome") != wire.VERSION:
        raise StrangerError("it uses another version of the doctor's protocol")


def _make_hello(host: Host, plan: Plan, **more: str) -> Message:
    return {
        wire.GREETING: wire.VERSION, "mark": wire.mark(plan.token), "name": wire.one_line(host.name), "node_rank": plan.node_rank,
        "num_hosts": plan.num_hosts, **more,
    }  # fmt: skip


def read_refusal(message: Message) -> JoinError:
    """Return what a coordinator says that rejects us."""
    hint, class_id = wire.one_line(wire.text(message, "hint")), wire.one_line(wire.text(message, "class"), 8)
    return JoinError(wire.one_line(wire.text(message, "no")), f"# {hint}" * bool(hint), class_id)


async def find_rival(host: Host, plan: Plan, secret: str) -> JoinError | None:
    """Look for another coordinator at the master's address, while hosts arrive here; return the error with which it rejects us.

    Two hosts that both claim node rank 0 would each wait for the others. But an address that is not ours may still lead
    here (address translation, the service of a cluster): whoever answers is asked whether it is ourselves.
    """
    if not plan.is_coordinator or plan.listen_address or await in_thread(partial(is_own, plan.endpoint_host)):
        return None
    loop = asyncio.get_running_loop()
    until_s = loop.time() + plan.arrival_timeout_s
    while loop.time() < until_s:
        with suppress(GoneError, OSError, UnicodeError, OverdueError):
            connection = await connect(plan.endpoint_host, plan)
            try:
                connection.send(_make_hello(host, plan, holds=secret))
                answer = await receive(connection, host.clock, _RIVAL_ANSWER_S)
            finally:
                await connection.wait_closed(CLOSE_S)
            if "no" in answer:
                return read_refusal(answer) if wire.text(answer, "class") == _RIVAL_CLASS else None
        await asyncio.sleep(_RIVAL_AGAIN_S)
    return None


def _connect(where: str, plan: Plan) -> socket.socket:
    """Connect to the first address of a name that answers."""
    source = (plan.listen_address, 0) if plan.listen_address else None
    failures: list[OSError] = []
    for *_, address in call_within(
        _LOOK_UP_S, partial(socket.getaddrinfo, where, plan.endpoint_port, type=socket.SOCK_STREAM)
    ):
        try:
            numeric, _ = socket.getnameinfo(address, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)  # with its scope
            return socket.create_connection((numeric, plan.endpoint_port), _OPEN_S, source)
        except OSError as error:
            failures.append(error)
    raise failures[0] if failures else OSError(f"{where} has no address")


def _explain_taken(host: Host, plan: Plan, error: OSError) -> JoinError:
    port = plan.endpoint_port
    if error.errno != errno.EADDRINUSE:
        what = f"this host can't listen at {plan.endpoint}: {wire.explain(error)}"
        fix = "# choose a port from 1024 to 65535 that is free, the same one on all hosts"
        return JoinError(what, fix, "I9")
    holder, _ = find_port_user(host, port)
    by = f" by {holder}" if holder else ""
    fix = f"# end it (ss -ltnp 'sport = :{port}' shows it), or choose another port on all hosts"
    return JoinError(f"the rendezvous port {port} is taken{by}", fix, "I9")


def describe(plan: Plan, error: Exception) -> str:
    """Describe what happened at the endpoint."""
    if isinstance(error, socket.gaierror | UnicodeError):
        return f"{plan.endpoint_host} has no address here"
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there yet"
    if isinstance(error, TimeoutError):
        return "no answer"
    return explain(error) if isinstance(error, OSError) else str(error)


def explain_failure(host: Host, plan: Plan, error: Exception) -> JoinError:
    """Return the error that says why this host could not join, by what happened the last time."""
    waited = f"within {plan.arrival_timeout_s:.0f} s"
    name, port = plan.endpoint_host, plan.endpoint_port
    if isinstance(error, socket.gaierror | UnicodeError | OverdueError):
        return _report_no_address(name, waited)
    where, check = _check_name(host, name)
    if isinstance(error, StrangerError | SilentError):
        what = f"at {plan.endpoint} something else answers, not rankwise doctor: {error}"
        if isinstance(error, SilentError):
            what = f"at {plan.endpoint} something listens that sends nothing ({waited}): another program, or a doctor that is frozen"
        fix = f"# on {name}: what is it? End it, or choose another port on all hosts\nsudo ss -ltnp 'sport = :{port}'"
        return JoinError(what + where, "\n".join([fix, *check]), "I9")
    if isinstance(error, ConnectionRefusedError):
        what = f"nothing listened at {plan.endpoint} {waited}"
        fix = f"# on {name}: start the doctor there at the same time"
    elif isinstance(error, TimeoutError):
        what = f"{plan.endpoint} gave no answer {waited}: packets are dropped"
        fix = f"# on {name}, open the port:\nsudo ufw allow {port}/tcp  # or: sudo firewall-cmd --add-port={port}/tcp"
    else:
        what = f"{plan.endpoint} can't be reached ({waited}): {describe(plan, error)}"
        fix = f"ip route get {shlex.quote(name if is_address(name) else next(iter(host.lookup(name)), name))}"
    # A name that leads elsewhere is likelier than a doctor that was not started, or a firewall: it comes first.
    return JoinError(what + where, "\n".join([*check, fix]), "I2")


def _report_no_address(name: str, waited: str) -> JoinError:
    mistake = find_mistake(name)
    if mistake is not None:
        return JoinError(f"the rendezvous address {mistake.what}", write_remedy(mistake, None), "I3")
    fix = f"getent hosts {shlex.quote(name)}  # must print an address; else pass one instead of the name, or add it to /etc/hosts"
    return JoinError(f"{name}, the rendezvous address, has no address here ({waited})", fix, "I3")


def _check_name(host: Host, name: str) -> tuple[str, list[str]]:
    """Return what a name means here, and how to see what is wrong with it; nothing for an address."""
    found = () if is_address(name) else host.lookup(name)
    if not found:
        return "", []
    check = [
        f"# is {name} the first host? All hosts must be given the same one, by --master-addr, --rdzv-endpoint or MASTER_ADDR",
        f"getent hosts {shlex.quote(name)}  # is that the address of {name}?",
    ]
    for index, line in enumerate(host.read("/etc/hosts").splitlines(), 1):
        address, *names = line.partition("#")[0].split() or [""]
        if address in found and name.lower() in [one.lower() for one in names]:
            return f"; {name} is {address} here, by line {index} of /etc/hosts", check
    return f"; {name} is {', '.join(found)} here, by the name server", check
