"""Explains why a host did not reach the rendezvous: what it found at the endpoint, and what the endpoint's name means to it."""

from __future__ import annotations

import shlex
import socket
from typing import TYPE_CHECKING

from rankwise.base.deadline import OverdueError
from rankwise.doctor.network.names import forget_name, is_address, is_host_name
from rankwise.doctor.rendezvous.plan import JoinError, Plan
from rankwise.doctor.rendezvous.wire import SilentError, StrangerError, explain
from rankwise.doctor.variables.addresses import find_mistake, write_remedy

if TYPE_CHECKING:
    from rankwise.doctor.host import Host


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
    where, is_written = _report_address(host, name)
    if isinstance(error, StrangerError | SilentError):
        what = (
            f"at {plan.endpoint} something listens that sends nothing ({waited}): another program, or a doctor that is frozen"
            if isinstance(error, SilentError)
            else f"at {plan.endpoint} something else answers, not rankwise doctor: {error}"
        )
        who = f"ss -ltnp 'sport = :{port}'"
        return JoinError(
            what + where, class_id="I9", hint=f"on {name}, `{who}` shows what it is: end it, or choose another port on all hosts",
            fix=f"# on {name}: what is it? End it, or choose another port on all hosts\nsudo {who}" + _write_check(name, where, is_written=is_written),
        )  # fmt: skip
    if isinstance(error, ConnectionRefusedError):
        what = f"nothing listened at {plan.endpoint} {waited}"
        hint = f"start the doctor on {name} at the same time"
        fix = f"# on {name}: start the doctor there at the same time"
    elif isinstance(error, TimeoutError):
        what = f"{plan.endpoint} gave no answer {waited}: packets are dropped"
        hint = f"on {name}, open the port: sudo ufw allow {port}/tcp (or: sudo firewall-cmd --add-port={port}/tcp)"
        fix = f"# on {name}, open the port:\nsudo ufw allow {port}/tcp  # or: sudo firewall-cmd --add-port={port}/tcp"
    else:
        what = f"{plan.endpoint} can't be reached ({waited}): {describe(plan, error)}"
        hint, fix = (
            f"`ip route get {shlex.quote(name)}` shows the way from here",
            f"ip route get {shlex.quote(name if is_address(name) else next(iter(host.lookup(name)), name))}",
        )
    check = _write_check(name, where, is_written=is_written).lstrip()
    if check:
        # A name that leads elsewhere is likelier than a doctor that was not started, or a firewall: it comes first.
        hint = f"is {name} the first host, for all hosts, and is that its address, seen from here? (getent hosts {shlex.quote(name)}) If so, {hint}"
        fix = f"{check}\n{fix}"
    else:
        hint += f"; is {name} the right address? (on that host: ip -br addr)"
    return JoinError(what + where, class_id="I2", hint=hint, fix=fix)


def _report_no_address(name: str, waited: str) -> JoinError:
    mistake = find_mistake(name)
    if mistake is not None and mistake.host:
        port = f", and {mistake.port} as the port" if mistake.port else ""
        return JoinError(
            f"{mistake.what}: the hosts are to rendezvous there, but no name server knows it", class_id="I3", hint=f"give {mistake.host} as the address{port}",
            fix=write_remedy(mistake, None),
        )  # fmt: skip
    if not is_host_name(name):
        return JoinError(
            f"{name}, the rendezvous address, is not a host name", class_id="I3", hint="give the name or an address of the first host",
            fix="export MASTER_ADDR=…  # the name or an address of the first host, on all hosts",
        )  # fmt: skip
    command = f"getent hosts {shlex.quote(name)}"
    return JoinError(
        f"{name}, the rendezvous address, has no address here ({waited})", class_id="I3",
        hint=f"`{command}` must print one: pass the address instead of the name, or add it to /etc/hosts",
        fix=f"{command}  # must print an address; else pass one instead of the name, or add it to /etc/hosts",
    )  # fmt: skip


def _report_address(host: Host, name: str) -> tuple[str, bool]:
    """Return what a name means here, and whether /etc/hosts says so; nothing for an address."""
    if is_address(name):
        return "", False
    found = host.lookup(name)
    if not found:
        return "", False
    for index, line in enumerate(host.read("/etc/hosts").splitlines(), 1):
        address, *names = line.partition("#")[0].split() or [""]
        if address in found and name.lower() in [one.lower() for one in names]:
            return f"; {name} is {address} here, by line {index} of /etc/hosts", True
    return f"; {name} is {', '.join(found)} here, by the name server", False


def _write_check(name: str, where: str, *, is_written: bool) -> str:
    """Return how to see what is wrong with a name. Which of the two it is nobody knows here: nothing is changed by what can be pasted."""
    if not where:
        return ""
    lines = [
        f"# is {name} the first host? All hosts must be given the same one, by --master-addr, --rdzv-endpoint or MASTER_ADDR",
        f"getent hosts {shlex.quote(name)}  # is that the address of {name}?",
    ]
    if is_written and is_host_name(name):
        lines[-1] += " If not, take it out of /etc/hosts:"
        lines += [f"# {line}" for line in forget_name(name).splitlines()]
    return "\n" + "\n".join(lines)
