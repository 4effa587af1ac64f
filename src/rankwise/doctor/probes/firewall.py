"""The firewall of this host: which one it is, and its rules for the port of the rendezvous.

**Why it matters.** Many firewalls let `MASTER_PORT` through and nothing else. Then the rendezvous succeeds, and the first collective hangs: Gloo and
NCCL listen at ports that the kernel assigns, any of `net.ipv4.ip_local_port_range`.

**How it is checked.** The rules of nftables and iptables are read, as root, and those that name the port of the rendezvous are shown. What they let
through is not judged: with several hosts, `links` tries every connection, which also shows the firewalls of clouds and switches.

**What to do.** Let TCP in from the other hosts' network, at all ports.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rankwise.doctor.host import Host
from rankwise.doctor.network.interfaces import find_master
from rankwise.doctor.probe import Probe, Reading, ok
from rankwise.doctor.probes.ports import read_range

_MOST_RULES = 4


def look(host: Host) -> Iterator[Reading]:
    program = _find_program(host)
    shown = f"{program} is running" if program else "neither ufw nor firewalld is running"
    asked = (host.run("iptables-save"), host.run("nft", "list", "ruleset"))
    if not any(ran.is_good for ran in asked):
        is_refused = any(re.search("permi|root", ran.err) for ran in asked)
        why = "only root may read the rules" if is_refused else "; ".join(ran.failure for ran in asked)
        yield Reading("skipped", f"the firewall's rules ({shown})", why, facts={"program": program})
        return
    port = find_master(host)[1]
    if port:
        lines = (line.strip() for ran in asked if ran.is_good for line in ran.out.splitlines())
        rules = [line for line in lines if re.search(rf"\b{port}\b", line)]
        named = "; ".join(rules[:_MOST_RULES]) + "; …" * (len(rules) > _MOST_RULES)
        shown += f"; rules that name port {port}: {named or 'none'}"
    if host.job.num_nodes > 1:
        low, high = read_range(host)
        shown += f"; Gloo and NCCL need ports {low} to {high}, too: hosts that are checked together try them"
    yield ok(shown, program=program)


def _find_program(host: Host) -> str:
    enabled = re.search(r"^ENABLED=yes", host.read("/etc/ufw/ufw.conf"), re.MULTILINE)
    if "Status: active" in host.run("ufw", "status").out or enabled:
        return "ufw"
    return "firewalld" if host.run("firewall-cmd", "--state").out.strip() == "running" else ""


PROBE = Probe("firewall", "the firewall of this host", "network", "quick", look)
