"""Comes to the meeting's endpoint: as its holder, if the place is ours, and as one of those that arrive."""

from __future__ import annotations

import errno
import re
import socket
from typing import TYPE_CHECKING

from rankwise.base.deadline import OverdueError, call_within
from rankwise.base.host import find_port_holder, listen_tcp
from rankwise.doctor.meeting.border import one_line
from rankwise.doctor.meeting.not_arriving import describe, explain_failure
from rankwise.doctor.meeting.plan import MeetingError, Plan
from rankwise.doctor.meeting.proof import is_proof, make_nonce, mark, prove
from rankwise.doctor.meeting.tether import Tether
from rankwise.doctor.meeting.wire import (
    GREETING,
    VERSION,
    GoneError,
    SilentError,
    StrangerError,
    explain,
    keep_packets_small,
    text,
    whole,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.doctor.host import Host
    from rankwise.doctor.meeting.wire import Message

_OPEN_S, _WORD_S, _LEAST_WORD_S, _AGAIN_S, _LOOK_UP_S = 4.0, 8.0, 2.0, 0.3, 5.0
_FIRST_SAY_S, _SAY_S = 2.0, 10.0
_ARGUMENTS = re.compile(r"(?<=\S) (?:-|[^ ]*=).*\)$|(?<=\.py) .*\)$")


def bind_endpoint(plan: Plan) -> socket.socket | None:
    """Listen at the endpoint, if it is here.

    Args:
        plan: The plan.

    Returns:
        The listener; None if the endpoint is another host's, or if the port is taken and nobody has said that it is ours: that may
        be the meeting.

    Raises:
        MeetingError: The port is taken, and this host is to hold the meeting.
    """
    if plan.is_holder is False or (plan.is_holder is None and not is_own(plan.endpoint_host)):
        return None
    try:
        if plan.listen_address:
            listener = socket.create_server((plan.listen_address, plan.endpoint_port), backlog=2048)
        else:
            listener = listen_tcp("", plan.endpoint_port)
    except OSError as error:
        if plan.is_holder is None and error.errno == errno.EADDRINUSE:
            return None
        raise _tell_taken(plan, error) from error
    keep_packets_small(listener)
    return listener


def arrive(host: Host, plan: Plan, say: Callable[[str], None], *, own: str = "") -> Tether:
    """Connect to the holder, and be welcome there; try again until the time is over.

    Args:
        host: This host.
        plan: The plan.
        say: Told what is waited for.
        own: If the holder is in this process, the word by which it knows us.

    Raises:
        MeetingError: It can't be found or reached, is somebody else, or sends us away.
    """
    clock = host.clock
    begin_s = clock.monotonic()
    until_s = begin_s + plan.arrival_timeout_s
    next_say_s = begin_s + _FIRST_SAY_S
    while True:
        try:
            return _try(host, plan, until_s, own)
        except (GoneError, OSError, UnicodeError, OverdueError) as error:
            if isinstance(error, StrangerError) or clock.monotonic() + _AGAIN_S > until_s:
                raise explain_failure(host, plan, error) from error
            if clock.monotonic() >= next_say_s:
                next_say_s += _SAY_S
                say(f"waiting for the host that serves {plan.endpoint}: {describe(plan, error)}")
        clock.sleep(_AGAIN_S)


def _try(host: Host, plan: Plan, until_s: float, own: str) -> Tether:
    nonce = make_nonce()
    hello: Message = {
        GREETING: VERSION, "mark": mark(plan.token), "nonce": nonce, "name": host.name, "node_rank": plan.node_rank, "num_hosts": plan.num_hosts,
        "own": own,
    }  # fmt: skip
    where = (plan.listen_address or "127.0.0.1") if own else plan.endpoint_host
    tether = Tether(connect(where, plan), hello, host.clock, plan.silence_s)
    try:
        _wait_welcome(tether, host, until_s, plan.token, nonce)
    except BaseException:
        tether.close()
        raise
    return tether


def _wait_welcome(tether: Tether, host: Host, until_s: float, token: str, nonce: str) -> None:
    told = _wait_word(tether, host, until_s)
    if token and "no" not in told:
        if not is_proof(text(told, "proof"), token, "holder", nonce, text(told, "challenge")):
            raise StrangerError("it does not have the token of this rendezvous")
        tether.send({"proof": prove(token, "guest", nonce, text(told, "challenge"))})
        told = _wait_word(tether, host, until_s)
    if "no" in told:
        raise read_refusal(told)
    if whole(told, "welcome") != VERSION:
        raise StrangerError("it uses another version of the doctor's protocol")


def _wait_word(tether: Tether, host: Host, until_s: float) -> Message:
    begin_s = host.clock.monotonic()
    # A little longer than all have: who has just come must be heard, too.
    bound_s = max(_LEAST_WORD_S, min(_WORD_S, until_s - begin_s))
    while (told := tether.next(0.25)) is None:
        if host.clock.monotonic() > begin_s + bound_s:
            raise SilentError(f"it accepted, but sent nothing within {bound_s:.0f} s")
    return told


def read_refusal(told: Message) -> MeetingError:
    """Return what the holder says who sends us away."""
    return MeetingError(
        one_line(text(told, "no")),
        hint=one_line(text(told, "hint")),
        class_id=one_line(text(told, "class"), 8),
    )


def connect(where: str, plan: Plan) -> socket.socket:
    """Connect to the first address of a name that answers.

    Raises:
        OSError: None does.
        UnicodeError: It is no name.
        OverdueError: No name server answers.
    """
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


def is_own(name: str) -> bool:
    """Tell whether a name's address is one of ours: only then can it be bound."""
    try:
        found = call_within(_LOOK_UP_S, lambda: socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError, OverdueError):
        return False
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as sock:
            try:
                sock.bind(address)
            except OSError:
                continue
            return True
    return False


def _tell_taken(plan: Plan, error: OSError) -> MeetingError:
    holder = find_port_holder(plan.endpoint_port) if error.errno == errno.EADDRINUSE else ""
    # Of its command the program and the script: what stands behind may be a secret.
    by = f" by {re.sub(_ARGUMENTS, ')', holder)}" if holder else ""
    if error.errno == errno.EADDRINUSE:
        return MeetingError(
            f"the rendezvous port {plan.endpoint_port} is taken{by}", class_id="I9",
            hint=f"end it (ss -ltnp 'sport = :{plan.endpoint_port}' shows it), or choose another port on all hosts",
        )  # fmt: skip
    return MeetingError(
        f"this host can't listen at {plan.endpoint}: {explain(error)}", class_id="I9",
        hint="choose a port from 1024 to 65535 that is free, the same one on all hosts",
    )  # fmt: skip
