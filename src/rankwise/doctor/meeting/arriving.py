"""Comes to the meeting's endpoint: as its holder, if the place is ours, and as one of those that arrive."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING

from rankwise.base.deadline import OverdueError, call_within
from rankwise.base.host import find_port_holder, listen_tcp
from rankwise.doctor.meeting.plan import MeetingError, Plan
from rankwise.doctor.meeting.tether import Tether
from rankwise.doctor.meeting.wire import (
    GREETING,
    VERSION,
    GoneError,
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

_OPEN_S, _WORD_S, _AGAIN_S, _LOOK_UP_S = 4.0, 8.0, 0.3, 5.0
_FIRST_SAY_S, _SAY_S = 2.0, 10.0


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
    if plan.is_holder is False or (plan.is_holder is None and not _is_own(plan.endpoint_host)):
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


def arrive(host: Host, plan: Plan, say: Callable[[str], None], *, is_own: bool) -> Tether:
    """Connect to the holder, and be welcome there; try again until the time is over.

    Args:
        host: This host.
        plan: The plan.
        say: Told what is waited for.
        is_own: Whether the holder is in this process.

    Raises:
        MeetingError: It can't be found or reached, is somebody else, or sends us away.
    """
    clock = host.clock
    begin_s = clock.monotonic()
    next_say_s = begin_s + _FIRST_SAY_S
    while True:
        try:
            return _try(host, plan, is_own=is_own)
        except (GoneError, OSError, UnicodeError, OverdueError) as error:
            if (
                isinstance(error, StrangerError)
                or clock.monotonic() - begin_s + _AGAIN_S > plan.arrival_timeout_s
            ):
                raise _explain_failure(plan, error) from error
            if clock.monotonic() >= next_say_s:
                next_say_s += _SAY_S
                say(f"waiting for the host that holds {plan.endpoint}: {_describe(plan, error)}")
        clock.sleep(_AGAIN_S)


def _try(host: Host, plan: Plan, *, is_own: bool) -> Tether:
    hello: Message = {
        GREETING: VERSION, "token": plan.token, "name": host.name, "node_rank": plan.node_rank, "num_hosts": plan.num_hosts,
        "is_own": is_own,
    }  # fmt: skip
    where = (plan.listen_address or "127.0.0.1") if is_own else plan.endpoint_host
    tether = Tether(_connect(where, plan), hello, host.clock, plan.silence_s)
    try:
        _wait_welcome(tether, host)
    except BaseException:
        tether.close()
        raise
    return tether


def _wait_welcome(tether: Tether, host: Host) -> None:
    until_s = host.clock.monotonic() + _WORD_S
    while (told := tether.next(0.5)) is None:
        if host.clock.monotonic() > until_s:
            raise GoneError(f"it opened, and said nothing within {_WORD_S:.0f} s")
    if "no" in told:
        raise MeetingError(text(told, "no"), hint=text(told, "hint"), class_id=text(told, "class"))
    if whole(told, "welcome") != VERSION:
        raise StrangerError("it speaks another version of the doctor's language")


def _connect(where: str, plan: Plan) -> socket.socket:
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
    by = f" by {holder}" if holder else ""
    if error.errno == errno.EADDRINUSE:
        return MeetingError(
            f"port {plan.endpoint_port}, where the hosts are to meet, is taken{by}", class_id="I9",
            hint=f"end it (ss -ltnp 'sport = :{plan.endpoint_port}' shows it), or choose another port on all hosts",
        )  # fmt: skip
    return MeetingError(
        f"this host can't listen at {plan.endpoint}: {explain(error)}", class_id="I9",
        hint="choose a port from 1024 to 65535 that is free, the same one on all hosts",
    )  # fmt: skip


def _describe(plan: Plan, error: Exception) -> str:
    if isinstance(error, socket.gaierror | UnicodeError):
        return f"{plan.endpoint_host} has no address here"
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there yet"
    if isinstance(error, TimeoutError):
        return "no answer"
    return explain(error) if isinstance(error, OSError) else str(error)


def _explain_failure(plan: Plan, error: Exception) -> MeetingError:
    waited = f"within {plan.arrival_timeout_s:.0f} s"
    host, port = plan.endpoint_host, plan.endpoint_port
    if isinstance(error, socket.gaierror | UnicodeError | OverdueError):
        return MeetingError(
            f"{host}, where the hosts are to meet, has no address here ({waited})", class_id="I3",
            hint=f"`getent hosts {host}` must tell one: give the address instead of the name, or add it to /etc/hosts",
        )  # fmt: skip
    if isinstance(error, StrangerError):
        return MeetingError(
            f"at {plan.endpoint} somebody else answers, who is no doctor of rankwise: {error}", class_id="I9",
            hint=f"on {host}, `ss -ltnp 'sport = :{port}'` shows who it is: end it, or choose another port on all hosts",
        )  # fmt: skip
    if isinstance(error, ConnectionRefusedError):
        return MeetingError(
            f"nobody listened at {plan.endpoint} {waited}", class_id="I2",
            hint=f"start the doctor on {host} at the same time; is {host} the right address, seen from here? (getent hosts {host})",
        )  # fmt: skip
    if isinstance(error, TimeoutError):
        return MeetingError(
            f"{plan.endpoint} gave no answer {waited}: packets are dropped", class_id="I2",
            hint=f"on {host}, open the port: sudo ufw allow {port}/tcp (or: sudo firewall-cmd --add-port={port}/tcp); is it the right address?",
        )  # fmt: skip
    return MeetingError(
        f"{plan.endpoint} can't be reached ({waited}): {_describe(plan, error)}", class_id="I2",
        hint=f"`ip route get {host}` shows the way from here; is it the right address?",
    )  # fmt: skip
