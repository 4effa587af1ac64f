"""The network interfaces, and which of them Gloo and NCCL use.

**Why it matters.** NCCL uses the interfaces that begin with `ib`, else all but `lo` and docker's; so the bridge of a container network,
or a VPN, may be among them, or be the first. The other hosts can't reach it: `NCCL WARN Connect to ... failed`, `unhandled system
error`, or a hang at the first collective. Gloo uses the address of the host's name, which may be such a one, too.

**How it is checked.** Addresses and kinds of all interfaces are read, and the rules of Gloo and NCCL are followed, variables counted
in. An interface that a variable names counts as intended.

**What to do.** `NCCL_SOCKET_IFNAME` and `GLOO_SOCKET_IFNAME` set to the interface that the hosts share. NCCL's is the beginning of names,
or with `=` whole ones, or with `^` those to leave out; Gloo's is a whole name.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence

from rankwise.doctor.host import Host
from rankwise.doctor.network import gloo_nccl
from rankwise.doctor.network.interfaces import (
    Interface,
    describe_interface,
    find_master,
    read_interfaces,
    suggest_interface,
)
from rankwise.doctor.network.names import is_loopback_address
from rankwise.doctor.probe import Probe, Reading, Verdict, ok

_FOREIGN = ("container", "vpn", "loopback")


def look(host: Host) -> Iterator[Reading]:
    interfaces = host.ask(read_interfaces)
    gloo = gloo_nccl.find_interface(gloo_nccl.find_gloo_address(host, interfaces), interfaces)
    taken = gloo_nccl.choose_nccl_interfaces(host, interfaces) if gloo_nccl.uses_nccl(host) else []
    nccl = [one for one, _ in taken]
    yield ok(_describe(interfaces, gloo, nccl))
    if host.job.num_nodes > 1:
        best = suggest_interface(host, interfaces)
        yield from _judge_gloo(host, gloo, best)
        yield from _judge_nccl(host, nccl, best)
        if best is None and not any(one.is_up and one.reachable and one.kind == "vpn" for one in interfaces):
            yield _report_none(interfaces)


def _describe(interfaces: Sequence[Interface], gloo: Interface | None, nccl: Sequence[Interface]) -> str:
    # Each pod of a node has a cable, with an address for that cable only.
    shown = [one for one in interfaces if one.reachable or (one.addresses and one.kind not in _FOREIGN)]
    info = ", ".join(describe_interface(one) + ("" if one.is_up else " [down]") for one in shown)
    takers = [f"Gloo takes {gloo.name}"] if gloo else []
    takers += [f"NCCL takes {', '.join(one.name for one in nccl)}"] if nccl else []
    return "; ".join([info or "no interface but loopback has an address", *takers])


def _judge_gloo(host: Host, taken: Interface | None, best: Interface | None) -> Iterator[Reading]:
    # What a variable names is meant, and an address of loopback is told by the probe `hostname`.
    is_named = bool(gloo_nccl.split_names(host.env.get("GLOO_SOCKET_IFNAME", "")))
    if taken is None or best is None or is_named or host.job.backend == "nccl":
        return
    if taken.kind in {"container", "vpn"} and not _leads_to_master(host, taken):
        yield Reading(
            "warn" if gloo_nccl.uses_nccl(host) else _weigh(host, taken, best), f"Gloo takes {describe_interface(taken)}, the address of the host's name",
            "other hosts can't reach it: `Gloo connectFullMesh failed`, `timed out connecting`, or a hang", f"export GLOO_SOCKET_IFNAME={best.name}"
        )  # fmt: skip


def _judge_nccl(host: Host, taken: Sequence[Interface], best: Interface | None) -> Iterator[Reading]:
    settings, interfaces = gloo_nccl.read_settings(host), host.ask(read_interfaces)
    wanted, off = settings.get("NCCL_SOCKET_IFNAME"), settings.get("NCCL_IB_DISABLE")
    # Where data goes by InfiniBand or EFA, only the bootstrap goes by TCP, and takes the first.
    has_rdma = bool(host.names("/sys/class/infiniband")) and (off is None or off.value.strip() != "1")
    own = [one for one in (taken[:1] if has_rdma else taken) if one.kind in _FOREIGN]
    foreign = [one for one in own if not _leads_to_master(host, one)]
    if best is None or not foreign or (wanted is not None and len(wanted.value) > 1):
        return
    is_first = foreign[0] is taken[0]
    is_alone = gloo_nccl.match_names(best.name, [one.name for one in interfaces]) == (best.name,)
    yield Reading(
        _weigh(host, foreign[0], best) if is_first else "warn",
        f"NCCL takes {', '.join(map(describe_interface, foreign))}" + ("" if is_first else f" besides {taken[0].name}"),
        "other hosts can't reach it: `NCCL WARN Connect to ... failed`, `unhandled system error`, or a hang at the first collective",
        f"export NCCL_SOCKET_IFNAME={best.name if is_alone else f'={best.name}'}", "I7"
    )  # fmt: skip


def _weigh(host: Host, taken: Interface, best: Interface) -> Verdict:
    """Return how bad it is: a VPN may be meant, unless the master is elsewhere."""
    return "fail" if taken.kind != "vpn" or _leads_to_master(host, best) else "warn"


def _leads_to_master(host: Host, one: Interface) -> bool:
    name, _ = find_master(host)
    known = host.lookup(name) if name else ()
    ips = [ipaddress.ip_address(ip) for ip in known if not is_loopback_address(ip)]
    return any(ip in address.network for ip in ips for address in one.reachable)


def _report_none(interfaces: Sequence[Interface]) -> Reading:
    up = [one for one in interfaces if one.is_up and one.kind != "loopback"]
    cards = [one for one in interfaces if one.kind in {"ethernet", "infiniband", "wireless"}]
    down = [one.name for one in cards if not one.is_up]
    local = [one.name for one in up if one.addresses and not one.reachable]
    others = [describe_interface(one) for one in up if one.reachable]
    info = [f"{', '.join(down)} down"] if down else []
    info += [f"{', '.join(local)} with a link-local address only"] if local else []
    info += [f"other interfaces: {', '.join(others)}"] if others else []
    return Reading(
        "warn" if others else "fail", "no interface has an address that other hosts reach" + (f": {'; '.join(info)}" if info else ""),
        "the ranks of this host can't reach those of others", f"sudo ip link set dev {down[0]} up" if down else "ip -br addr"
    )  # fmt: skip


PROBE = Probe("interfaces", "network interfaces, and which ones are used", "network", "quick", look, classes=("I7",))
