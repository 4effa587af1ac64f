"""The address of the host's own name, at which Gloo listens for the other ranks.

**Why it matters.** Gloo looks up the addresses of the host's own name and listens at the first one that is its own. `/etc/hosts` of many
systems maps it to `127.0.1.1`; then each other host connects to itself: `Gloo connectFullMesh failed`, `Connection refused`, or a
hang. If the name has no address, or one of another host, Gloo falls back to `127.0.0.1`, with the same end.

**How it is checked.** The name is looked up as a rank does it, and compared with the addresses of the interfaces. On one host any
answer will do, and ranks that use NCCL alone do not look it up; so with GPUs it is a warning. Of several hosts no two may have the same name.

**What to do.** `GLOO_SOCKET_IFNAME` set to the interface that the hosts share avoids the lookup; or fix
`/etc/hosts`, so that the name resolves to the address of that interface.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from rankwise.doctor.differences import group_hosts
from rankwise.doctor.host import Host
from rankwise.doctor.network.gloo_nccl import can_bind, find_gloo_address, rate_mistake, split_names
from rankwise.doctor.network.interfaces import read_interfaces, suggest_interface
from rankwise.doctor.network.names import is_loopback_address, map_name
from rankwise.doctor.probe import Facts, Probe, Reading, ok, warn

#: Each rank asks for the name at least once, when it starts.
_SLOW_S = 1.0


def look(host: Host) -> Iterator[Reading]:
    ips, took_s = host.time_lookup(host.name)
    yield _judge_address(host, ips)
    if took_s > _SLOW_S:
        yield warn(
            f"looking up {host.name} took {took_s:.1f} s", "each rank looks it up at startup, and waits as long",
            f"getent hosts {shlex.quote(host.name)}  # slow too? then write the name into /etc/hosts, or fix the name server in /etc/resolv.conf"
        )  # fmt: skip


def _judge_address(host: Host, ips: tuple[str, ...]) -> Reading:
    interfaces = host.ask(read_interfaces)
    taken, best = find_gloo_address(host, interfaces), suggest_interface(host, interfaces)
    info = f"{host.name} is {', '.join(ips)}" if ips else f"the host's own name {host.name} has no address"
    if ips and not any(can_bind(ip, interfaces) for ip in ips):
        info += ", which is on no interface here"
    named = split_names(host.env.get("GLOO_SOCKET_IFNAME", ""))
    if named:
        return ok(f"{info}; Gloo goes by GLOO_SOCKET_IFNAME={','.join(named)}", name=host.name)
    if not is_loopback_address(taken) or host.job.num_nodes < 2:
        return ok(f"{info}; Gloo takes {taken}", name=host.name)
    fix = ["ip -br addr  # no interface here has an address that other hosts could reach"]
    if best is not None:
        fix = [f"export GLOO_SOCKET_IFNAME={shlex.quote(best.name)}", "# or, for good:"]
        fix.append(map_name(host.name, str(best.reachable[0].ip)))
    return Reading(
        rate_mistake(host, "gloo"), f"{info}; Gloo takes {taken}",
        "the other hosts connect to themselves: `Gloo connectFullMesh failed`, `Connection refused`, or a hang", "\n".join(fix), "I5",
        facts={"name": host.name}
    )  # fmt: skip


def _compare(facts: Mapping[str, Facts]) -> Iterator[Reading]:
    for name, hosts in group_hosts(facts, "name").items():
        if len(hosts) > 1:
            yield warn(
                f"{len(hosts)} hosts are called {name}",
                "logs and reports can't tell them apart, and with --rdzv-backend c10d each may consider itself the host of the store",
                "sudo hostnamectl set-hostname NAME  # another name on each; in containers: docker run --hostname NAME", hosts=tuple(hosts)
            )  # fmt: skip


PROBE = Probe(
    "hostname", "the address of the host's own name", "network", "quick", look, classes=("I5",), compare=_compare
)
