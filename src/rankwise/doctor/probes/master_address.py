"""The address of the rendezvous: does it lead from here to the right host.

**Why it matters.** `MASTER_ADDR` must have an address here, and lead to the first host from every other one. `localhost` is a different host on
every node: each waits for the rest. A name without an address ends in `The client socket has timed out`, and nothing says that it was
the name. Where it has an IPv6 address first and this host has no route to it, torch still tries it first: warnings of `socket.cpp` with
`errno: 97` or `101` appear before the real error, and a route that drops packets costs the whole timeout.

**How it is checked.** The name is looked up as a rank does it. On the first host its addresses should be the host's own; on the others
they must not be. Of several hosts, `rendezvous` tells whether they find the first one there.

**What to do.** Use an address of the first host that the other ones reach, best one of IPv4: `ip -br addr` there, `getent hosts NAME` here. With
`--rdzv-backend c10d` the endpoint must be a name that this host has for itself; an address of another interface matches no host.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

from rankwise.base.host import is_loopback, is_unspecified
from rankwise.doctor.host import Host
from rankwise.doctor.network.interfaces import find_master, read_interfaces, suggest_interface
from rankwise.doctor.network.names import find_mistake, is_loopback_address, write_remedy
from rankwise.doctor.probe import Probe, Reading, fail, ok, warn

_NOUN = "the master's name "
_WHY_LOST = "ranks can't find the store: `The client socket has timed out`, with no mention of the name"


def look(host: Host) -> Iterator[Reading]:
    mistake = _find_mistake(host)
    if mistake is not None:
        yield mistake
        return
    name, _ = find_master(host)
    if not name:
        yield ok("no master address given")
        return
    if is_loopback(name) or is_unspecified(name):
        yield _judge_localhost(host, name)
        return
    ips = host.lookup(name)
    own = [str(address.ip) for one in host.ask(read_interfaces) for address in one.addresses]
    fault = _find_fault(host, name, ips, own) or _find_lack_of_ipv6(host, name, ips)
    yield fault or ok(_report_ips(name, ips))
    if fault is None:
        yield from _judge_endpoint(host, name, ips, own)


def _find_mistake(host: Host) -> Reading | None:
    """Report a port, blanks and the like around the name: no name server knows such a name."""
    job = host.job
    # A launcher sets MASTER_ADDR anew, whatever it says now; its flags may have an address of IPv6 in brackets.
    given = re.sub(r"^\[(.*)\]$", r"\1", job.master_addr)
    mistake = find_mistake(given or ("" if job.is_launch else host.env.get("MASTER_ADDR", "")))
    if mistake is None:
        return None
    return fail(
        f"the master's address {mistake.what}", _WHY_LOST, write_remedy(mistake, find_master(host)[1]), "I3"
    )  # fmt: skip


def _judge_localhost(host: Host, name: str) -> Reading:
    if host.job.num_nodes < 2:
        return ok(f"the master is {name}, this host")
    # In Kubernetes the first pod is told `localhost`, and only the others get the name.
    if host.job.is_master and "KUBERNETES_SERVICE_HOST" in host.env:
        return ok(f"the master is {name}, this pod")
    best = suggest_interface(host, host.ask(read_interfaces)) if host.job.is_master else None
    # To listen on all addresses is what the first host does anyway; the others may be told where it is.
    is_open = is_unspecified(name) and host.job.is_master is True
    return Reading(
        "warn" if is_open else "fail", f"the master's address is {name}, and {host.job.num_nodes} hosts are to rendezvous there",
        "that is a different host on each of them: every node waits for the rest" + (", unless those are given an address of this one" if is_open else ""),
        f"export MASTER_ADDR={best.reachable[0].ip}  # on all hosts" if best else "export MASTER_ADDR=…  # an address of the first host that the others reach",
        "I4"
    )  # fmt: skip


def _report_ips(name: str, ips: Sequence[str], noun: str = "") -> str:
    """Describe what a name means here; an address means itself."""
    return f"the master's address is {name}" if list(ips) == [name] else f"{noun}{name} is {', '.join(ips)}"


def _find_fault(host: Host, name: str, ips: tuple[str, ...], own: list[str]) -> Reading | None:
    if not ips:
        what = f"the master's name {name} has no address here"
        fix = f"getent hosts {shlex.quote(name)}  # on the host {name} itself: ip -br addr; then here: echo 'ADDRESS {name}' | sudo tee -a /etc/hosts"
        return fail(what, _WHY_LOST, fix, "I3")
    is_loop = any(map(is_loopback_address, ips))
    if host.job.is_master is False and all(is_loopback_address(ip) or ip in own for ip in ips):
        # Two nodes may be simulated on one host, by its address; by a name that means loopback nobody does.
        return Reading(
            "fail" if is_loop else "warn", f"{_report_ips(name, ips, _NOUN)} here, this host itself, but the ranks rendezvous on another one",
            "ranks here look for the store on their own host: `Connection refused`, and the others wait",
            f"grep -n {shlex.quote(name)} /etc/hosts  # must lead to the first host's address", "I2"
        )  # fmt: skip
    if host.job.is_master and not is_loop and not set(ips) & set(own) and host.job.num_nodes > 1:
        best = suggest_interface(host, host.ask(read_interfaces))
        return warn(
            f"the ranks are to rendezvous on this host, but {_report_ips(name, ips)}, which is on no interface here",
            "behind NAT this may work; else the ranks look for the store on another host: `The client socket has timed out`",
            f"export MASTER_ADDR={best.reachable[0].ip}  # on all hosts" if best else "ip -br addr", "I2"
        )  # fmt: skip
    return None


def _find_lack_of_ipv6(host: Host, name: str, ips: tuple[str, ...]) -> Reading | None:
    """Report a name whose first address is of IPv6, where this host has none: torch tries it all the same."""
    own = [address for one in host.ask(read_interfaces) if one.is_up for address in one.reachable]
    if ":" not in ips[0] or is_loopback_address(ips[0]) or not all(address.version == 4 for address in own):
        return None
    other = next((ip for ip in ips if ":" not in ip), "")
    why = "ranks here never reach the store: `The client socket has timed out`"
    fix = "export MASTER_ADDR=…  # the master's IPv4 address, on all hosts"
    if other:
        why = "ranks try IPv6 first: warnings of socket.cpp (errno 97, 101), or a long wait, before they take IPv4"
        fix = f"export MASTER_ADDR={other}  # on all hosts"
    what = f"{_report_ips(name, ips, _NOUN)}, but this host has no IPv6 address for other hosts"
    return Reading("warn" if other else "fail", what, why, fix, "I22")


def _judge_endpoint(host: Host, name: str, ips: tuple[str, ...], own: list[str]) -> Iterator[Reading]:
    """Report if torch's c10d would not take this host for the one at the endpoint, though it is."""
    if host.env.get("PET_RDZV_BACKEND") != "c10d" or not any(ip in own for ip in ips):
        return
    known = host.lookup(host.name)
    if name != host.name and not set(ips) & set(known):
        resolved = "" if name in ips else f" ({', '.join(ips)})"
        yield warn(
            f"the endpoint {name}{resolved} is this host, whose own name {host.name} is {', '.join(known) or 'without an address'}",
            "torch's c10d compares just these: no node opens the store, and all fail with `RendezvousConnectionError` after 60 s",
            "export PET_RDZV_CONF=is_host=1  # on this host; is_host=0 on the others", "I21"
        )  # fmt: skip


PROBE = Probe(
    "master-address",
    "the address of the rendezvous",
    "network",
    "quick",
    look,
    classes=("I2", "I3", "I4", "I21", "I22"),
)
