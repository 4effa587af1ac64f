"""IPv6: all of it, or nothing, and the same on all hosts.

**Why it matters.** Where a name has an IPv6 address first and this host has no route to it, torch still tries it first: warnings of
`socket.cpp` with `errno: 97` or `101` appear before the real error, and a route that drops packets costs the whole timeout. Gloo can't
connect ranks of which some listen on IPv4, and some on IPv6.

**How it is checked.** The interfaces' addresses, the kernel's switches, and the addresses of the master's name. A host without IPv6 is
ok, also with the usual line for `::1` in `/etc/hosts`.

**What to do.** Use an IPv4 address for the master. `GLOO_SOCKET_IFNAME` makes Gloo use IPv4 on an interface that has both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rankwise.base.host import is_loopback
from rankwise.doctor.differences import group_hosts
from rankwise.doctor.host import Host
from rankwise.doctor.network.gloo_nccl import find_gloo_address, find_interface
from rankwise.doctor.network.interfaces import find_master, suggest_interface
from rankwise.doctor.network.names import is_loopback_address
from rankwise.doctor.probe import Facts, Probe, Reading, fail, ok


def look(host: Host) -> Iterator[Reading]:
    interfaces = host.interfaces()
    gloo = find_gloo_address(host, interfaces)
    one, best = find_interface(gloo, interfaces), suggest_interface(host, interfaces)
    # Whoever listens on loopback has another fault, and no family in common with others to lack.
    family = "" if not gloo or is_loopback_address(gloo) else "IPv6" if ":" in gloo else "IPv4"
    name = one.name if one else best.name if best else ""
    yield ok(_describe(host), family=family, interface=name)
    yield from _judge_master(host)


def _has_route(host: Host) -> bool:
    return any(not address.is_ipv4 for one in host.interfaces() if one.is_up for address in one.reachable)


def _describe(host: Host) -> str:
    if _has_route(host):
        return "IPv4 and IPv6"
    if host.read("/proc/sys/net/ipv6/conf/all/disable_ipv6") == "1":
        return "IPv4; IPv6 is switched off (net.ipv6.conf.all.disable_ipv6)"
    if any(not address.is_ipv4 for one in host.interfaces() for address in one.addresses):
        return "IPv4; IPv6 for loopback and link-local only"
    return "IPv4 only"


def _judge_master(host: Host) -> Iterator[Reading]:
    name, _ = find_master(host)
    ips = host.lookup(name) if name and not is_loopback(name) else ()
    if not ips or ":" not in ips[0] or is_loopback_address(ips[0]) or _has_route(host):
        return
    other = next((ip for ip in ips if ":" not in ip), "")
    why = "ranks here never reach the store: `The client socket has timed out`"
    fix = "export MASTER_ADDR=…  # the master's IPv4 address, on all hosts"
    if other:
        why = "ranks try IPv6 first: warnings of socket.cpp (errno 97, 101), or a long wait, before they take IPv4"
        fix = f"export MASTER_ADDR={other}  # on all hosts"
    what = f"the master's name {name} is {', '.join(ips)}, but this host has no IPv6 address for other hosts"
    yield Reading("warn" if other else "fail", what, why, fix, "I22")


def _compare(facts: Mapping[str, Facts]) -> Iterator[Reading]:
    families = group_hosts(facts, "family")
    if len(families) == 2:
        hosts = families["IPv6"]
        yield fail(
            f"Gloo takes an IPv6 address on {', '.join(hosts)}, and an IPv4 address on {', '.join(families['IPv4'])}",
            "it can't connect the two: each rank fails in init_process_group with `ss1.ss_family == ss2.ss_family. 10 vs 2`",
            "\n".join(f"export GLOO_SOCKET_IFNAME={facts[host].get('interface')}  # on {host}" for host in hosts), "I22", hosts=tuple(hosts)
        )  # fmt: skip


PROBE = Probe("ipv6", "IPv6", "network", "quick", look, classes=("I22",), compare=_compare)
