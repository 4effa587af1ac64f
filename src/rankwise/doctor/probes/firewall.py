"""The firewall of this host: which one it is, and its rules for the port of the rendezvous.

**Why it matters.** Many firewalls let `MASTER_PORT` through and nothing else. Then the rendezvous succeeds, and the first collective hangs: Gloo and
NCCL listen at ports that the kernel assigns, any of `net.ipv4.ip_local_port_range`.

**How it is checked.** The rules of nftables and iptables are read, as root. Those that name the port of the rendezvous are shown, and so is
whether the firewall drops what no rule accepts, without a rule for this host's network. The rules are not followed further: with several hosts,
`links` tries every connection, which also shows the firewalls of clouds and switches.

**What to do.** Let TCP in from the other hosts' network, at all ports. The command is printed for the firewall that was found.
"""

from __future__ import annotations

from collections.abc import Iterator

from rankwise.doctor.host import Host
from rankwise.doctor.network.firewalls import find_firewall, suggest
from rankwise.doctor.network.interfaces import find_master, read_interfaces, suggest_interface
from rankwise.doctor.probe import Probe, Reading, ok, skipped, warn
from rankwise.doctor.probes.ports import read_range

_MOST_RULES = 4


def look(host: Host) -> Iterator[Reading]:
    firewall = find_firewall(host)
    name = f", by {firewall.program}" if firewall.program else ""
    port = find_master(host)[1]
    rules = firewall.list_rules(port)
    shown = "; ".join(rules[:_MOST_RULES]) + "; …" * (len(rules) > _MOST_RULES)
    more = f"; rules that name port {port}: {shown}" if rules else f"; no rule names port {port}" * bool(port)
    best = suggest_interface(host, host.ask(read_interfaces))
    networks = [one for one in best.networks if ":" not in one] if best else []
    if best and firewall.is_closed() and networks and not firewall.accepts(networks, best.name):
        own = ", ".join(networks)
        what = f"the firewall drops what no rule accepts{name}, and no rule accepts {own}{more}"
        if host.job.num_nodes < 2:
            yield ok(f"{what}; a single host does not need it")
            return
        low, high = read_range(host)
        yield warn(
            what,
            f"Gloo and NCCL listen at ports {low} to {high}: the ranks may rendezvous, and then hang at the first collective: `connectFullMesh failed`, `NCCL WARN Connect to ... failed`",
            suggest(firewall, networks, "input"), "I8"
        )  # fmt: skip
    elif firewall.why:
        yield skipped(f"the firewall's rules{name}", firewall.why)
    elif firewall.program:
        tried = "whether hosts reach each other is tried when several are checked together"
        yield ok(f"a firewall is running{name}{more}; {tried}")
    else:
        yield ok("no firewall is running here")


PROBE = Probe("firewall", "the firewall of this host", "network", "quick", look, classes=("I8",))
