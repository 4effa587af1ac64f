"""The firewall of this host: does it let the other ranks in.

**Why it matters.** Many firewalls let `MASTER_PORT` through and nothing else. Then the rendezvous succeeds, and the first collective hangs: Gloo and
NCCL listen at ports that the kernel assigns, any of `net.ipv4.ip_local_port_range`.

**How it is checked.** The rules of nftables and iptables are read, as root, and followed for a connection from a neighbour. Where that
depends on what can't be known here (marks, rates, sets of addresses that change), nothing is reported. Whether connections really get
through is tried with several hosts; firewalls of clouds and switches show up only there.

**What to do.** Let TCP in from the other hosts' network, at all ports. The command is printed for the firewall that was found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.doctor.network.firewalls import find_firewall, make_packet, suggest_opening
from rankwise.doctor.network.gloo import find_gloo_address, find_interface
from rankwise.doctor.network.master import find_master, has_several_hosts, suggest_interface
from rankwise.doctor.network.nccl import choose_nccl_interfaces, uses_nccl
from rankwise.doctor.probe import Probe
from rankwise.doctor.probes.ports import read_range
from rankwise.doctor.reading import Reading, ok, skipped

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rankwise.doctor.host import Host
    from rankwise.doctor.network.firewalls import Firewall
    from rankwise.doctor.network.interfaces import Interface


def look(host: Host) -> Iterator[Reading]:
    """Tell whether the rules of this host drop what other ranks send."""
    firewall = find_firewall(host)
    name = f", by {firewall.program}" if firewall.program else ""
    found = {one.name: (one, _judge(host, firewall, one)) for one in _list_interfaces(host)}
    blocked = {name: (one, told[True]) for name, (one, told) in found.items() if told[True]}
    unsure = {name: told[None] for name, (_, told) in found.items() if told[None]}
    if blocked:
        yield _tell_blocked(host, blocked, name)
    elif firewall.why:
        yield skipped(f"the firewall's rules{name}", firewall.why)
    elif unsure:
        yield _tell_unsure(host, unsure, name)
    else:
        yield ok(
            f"no rule blocks the ranks of other hosts{name}"
            if firewall.program
            else "no firewall is running here"
        )


def _tell_blocked(host: Host, blocked: Mapping[str, tuple[Interface, list[str]]], name: str) -> Reading:
    told = ", ".join(f"{name} ({', '.join(ports)})" for name, (_, ports) in blocked.items())
    networks = [
        address.network for one, _ in blocked.values() for address in one.reachable if address.is_ipv4
    ]
    what = f"the firewall drops TCP from neighbours{name}: {told}"
    if not has_several_hosts(host):
        return ok(f"{what}; a single host does not need it")
    return Reading(
        verdict="warn", what=what, class_id="I8", fix=suggest_opening(host, networks),
        why="the ranks may rendezvous, and then hang at the first collective: `connectFullMesh failed`, `NCCL WARN Connect to ... failed`",
    )  # fmt: skip


def _tell_unsure(host: Host, unsure: Mapping[str, list[str]], name: str) -> Reading:
    told = ", ".join(f"{name} ({', '.join(ports)})" for name, ports in unsure.items())
    what = f"whether the firewall lets TCP from neighbours in is not known{name}: {told}"
    if not has_several_hosts(host):
        return ok(f"{what}; a single host does not need it")
    return skipped(
        what, "a rule depends on what can't be known here; with several hosts (rankwise doctor --hosts …), connections are tried"
    )  # fmt: skip


def _list_interfaces(host: Host) -> list[Interface]:
    """List the interfaces on which Gloo and NCCL will listen, or the one where they should."""
    interfaces = host.interfaces()
    gloo = find_interface(find_gloo_address(host, interfaces), interfaces)
    taken = [gloo, *(choose_nccl_interfaces(host, interfaces) if uses_nccl(host) else ())]
    if not any(one is not None and one.is_candidate for one in taken):
        taken.append(suggest_interface(host, interfaces))
    return list({one.name: one for one in taken if one is not None and one.kind != "loopback"}.values())


def _judge(host: Host, firewall: Firewall, one: Interface) -> dict[bool | None, list[str]]:
    """Return the ports of an interface by whether the firewall drops what reaches them; None: that can't be told."""
    low, high = read_range(host)
    port = find_master(host)[1]
    answers = {_drops(firewall, one, at) for at in (low, (low + high) // 2, high)}
    # Ranks take any of them: a range that is open in parts is no certain end.
    found: dict[bool | None, list[str]] = {True: [], None: [], False: []}
    found[True if answers == {True} else None if None in answers else False].append(
        f"ports {low} to {high}, where Gloo and NCCL listen"
    )
    if port is not None and host.job.is_master is not False:
        found[_drops(firewall, one, port)].append(f"the rendezvous port {port}")
    return found


def _drops(firewall: Firewall, one: Interface, port: int) -> bool | None:
    packet = make_packet(one, port)
    return firewall.drops(packet) if packet is not None else False


PROBE = Probe(
    id="firewall",
    title="the firewall of this host",
    topic="network",
    speed="quick",
    look=look,
    classes=("I8",),
)
