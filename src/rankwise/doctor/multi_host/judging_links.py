"""Finds which links are blocked, and at which host; hosts that listen where others don't reach them, and hosts without a route to others.

No firewall blocks what has no route: the fix is another interface, or a route.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import Literal, TypeAlias

from rankwise.doctor.multi_host.blaming import Blame, find_blames
from rankwise.doctor.multi_host.cluster_report import LIBRARIES, ClusterReport, HostReport, Link, Plane, Way
from rankwise.doctor.network.names import is_address, is_loopback_address
from rankwise.doctor.probe import Reading, fail, ok, on_host, skipped
from rankwise.doctor.units import join_names

Side: TypeAlias = Literal["in", "out"]

_CLASSES: dict[Plane, str] = {"gloo": "I8", "nccl": "I7"}
#: Of so many hosts the one at fault can't be known.
_FEWEST = 2
_SHUT = {"refused", "timeout", "unreachable", "reset"}
#: What becomes of a job whose ranks do not get through.
_WHY: dict[Plane, str] = {
    "gloo": "Gloo and NCCL connect all hosts at ports that the kernel chooses: init_process_group succeeds, and then the first collective "
    "hangs, or fails with 'Connection reset by peer' or 'connectFullMesh failed'",
    "nccl": "NCCL takes this address: its first collective hangs, or fails with 'ncclSystemError: Connect to … failed'",
}
_WHY_ELSEWHERE = _WHY | {
    "gloo": "the other hosts have no route there, or look for it at their own such address: 'connectFullMesh failed', 'Connection refused', "
    "'Network is unreachable', or a hang"
}
#: By the firewall that the host's own probe has found.
_LET_IN = {
    "ufw": "sudo ufw allow from {} proto tcp",
    "firewalld": "sudo firewall-cmd --permanent --zone=trusted --add-source={}",
}
_SHOW_RULES = "sudo nft list ruleset; sudo iptables-save  # shows its rules"
Reports: TypeAlias = dict[str, HostReport]
Links: TypeAlias = dict[Way, Link]


def judge_links(found: ClusterReport) -> Iterator[Reading]:
    """Report links that do not open, and hosts that answer in the place of others."""
    reports = {one.name: one for one in found.hosts}
    links = [one for one in found.links if not reports[one.source].lost and not reports[one.target].lost]
    found_bad = [*_judge_families(reports)]
    for plane in LIBRARIES:
        tried = [one for one in links if one.plane == plane and one.outcome != "not tried"]
        found_bad += _judge_plane(plane, {one.way: one for one in tried}, reports)
    yield from found_bad
    # Gloo connects all hosts: a way of which nobody has said anything is not open.
    told = {one.way for one in links if one.plane == "gloo"}
    untold = {*permutations((name for name, one in reports.items() if not one.lost), 2)} - told
    untried = {source: f"it has not said how it reaches {target}" for source, target in sorted(untold, reverse=True)}
    untried |= {one.source: one.detail for one in reversed(links) if one.outcome == "not tried"}
    num_open = sum(one.outcome == "ok" for one in links)
    if num_open and not found_bad:
        hosts = {one.source for one in links} | {one.target for one in links}
        yield ok(f"{'' if untried else 'all '}{num_open} connections between {len(hosts)} hosts open")
    if untried:
        yield skipped(f"{', '.join(sorted(untried))} could not try all links", untried[min(untried)])


def _judge_families(reports: Reports) -> Iterator[Reading]:
    """Report hosts on which Gloo takes IPv6 while it takes IPv4 on others: sockets may connect the two, and Gloo does not."""
    known = {name: one.gloo_address for name, one in reports.items() if one.gloo_address and not one.lost}
    taken = {name: ip for name, ip in known.items() if not is_loopback_address(ip)}
    wide = [name for name, ip in taken.items() if ":" in ip]
    if 0 < len(wide) < len(taken):
        narrow = [name for name in taken if name not in wide]
        yield fail(
            f"Gloo takes an IPv6 address on {', '.join(wide)}, and an IPv4 address on {', '.join(narrow)}",
            "it can't connect the two: each rank fails in init_process_group with `ss1.ss_family == ss2.ss_family. 10 vs 2`",
            "\n".join(f"{_take_interface('gloo', reports[name], taken[name], reports[name].address)}  # on {name}" for name in wide), "I22", hosts=tuple(wide)
        )  # fmt: skip


def _judge_plane(plane: Plane, links: Links, reports: Reports) -> Iterator[Reading]:
    links = {way: link for way, link in links.items() if not _is_of_families(link, reports)}
    elsewhere = [link for link in links.values() if _is_elsewhere(link, reports)]
    yield from _report_elsewhere(plane, elsewhere, reports)
    # Whoever answers there, or does not, says nothing about a firewall.
    places = {(link.target, link.address) for link in elsewhere}
    links = {way: link for way, link in links.items() if (link.target, link.address) not in places}
    yield from _report_nowhere(plane, [one for one in links.values() if one.outcome == "no route"])
    # A host without a route says nothing about what blocks the others.
    links = {way: link for way, link in links.items() if link.outcome != "no route"}
    # Each kind of failure by itself: two failed links may have different causes.
    shut = {way for way, link in links.items() if link.outcome in _SHUT}
    for blame in find_blames(links, shut):
        yield _report_shut(plane, blame, links, reports)
    stalled = {way for way, link in links.items() if link.outcome == "stalled"}
    for blame in find_blames(links, stalled):
        yield _report_stalled(blame, reports)


def _is_of_families(link: Link, reports: Reports) -> bool:
    """Return whether a link fails because Gloo takes IPv4 on its one side, and IPv6 on the other."""
    own = reports[link.source].gloo_address or ":"
    is_wide = ":" in link.address and ":" not in own and not is_loopback_address(own)
    return link.plane == "gloo" and link.outcome == "no route" and is_wide


def _is_elsewhere(link: Link, reports: Reports) -> bool:
    """Return whether a link leads to an address that is none for others: where another host answers, a container's bridge, or one beside that of the rendezvous."""
    if link.outcome == "other host":
        return True
    source, target = reports[link.source], reports[link.target]
    is_local = bool(source.find_interface(link.address)) or link.address in target.private
    is_lost = link.outcome == "no route" or (link.outcome in _SHUT and is_local)
    return is_lost and link.address != target.address


def _report_elsewhere(plane: Plane, links: Sequence[Link], reports: Reports) -> Iterator[Reading]:
    """Report hosts that listen where nobody reaches them: one reading for all that do so at one address."""
    places: dict[tuple[str, str], list[Link]] = {}
    for link in sorted(links, key=lambda one: list(reports).index(one.target)):
        interface = reports[link.target].find_interface(link.address) or "an interface"
        places.setdefault((link.address, interface), []).append(link)
    for (address, interface), found in places.items():
        targets = list(dict.fromkeys(one.target for one in found))
        what = f"{LIBRARIES[plane][0]} listens at {address} ({interface}) on {join_names(targets)}"
        reached = f"the rendezvous reached {join_names([f'{name} at {reports[name].address}' for name in targets])}"
        yield fail(
            "; ".join([what, *_list_reasons(found, targets, reports), reached]), _WHY_ELSEWHERE[plane],
            "\n".join(on_host(name, _take_interface(plane, reports[name])) for name in targets),
            "I7" if plane == "nccl" else "", hosts=tuple(targets)
        )  # fmt: skip


def _list_reasons(links: Sequence[Link], targets: Sequence[str], reports: Reports) -> Iterator[str]:
    """Describe why no connection gets to where some hosts listen."""
    own = [one.source for one in links if reports[one.source].find_interface(one.address)]
    lost = [one for one in links if one.outcome == "no route" and one.source not in own]
    if others := sorted({*own} - {*targets}) or sorted({*own}):
        yield f"{join_names(others)} {'has' if len(others) == 1 else 'have'} that address, too"
    if lost:
        sources = sorted({one.source for one in lost})
        yield f"{join_names(sources)} {'has' if len(sources) == 1 else 'have'} no route to it ({lost[0].detail})"
    for one in [one for one in links if one.outcome == "other host"][:1]:
        yield f"{one.source} finds {one.detail or 'another host'} there"


def _take_interface(plane: Plane, report: HostReport, *addresses: str) -> str:
    """Return the command that makes Gloo, or NCCL, take the interface of an address; without one that by which the rendezvous reached the host."""
    return f"export {LIBRARIES[plane][1]}={report.find_interface(*addresses or (report.address,)) or '…'}"


def _report_shut(plane: Plane, blame: Blame, links: Links, reports: Reports) -> Reading:
    bad = [links[way] for way in blame.bad]
    if blame.kind == "split":
        return _report_split(plane, blame, bad, reports)
    hosts = blame.hosts if blame.kind in {"all", "link"} else blame.hosts[:1]
    why = _WHY[plane]
    if blame.kind == "link" and len(bad) == 1 and plane != "nccl":
        source, target = hosts
        if len(reports) > _FEWEST:
            why += f". Either side may be the cause: {target} lets nothing in from {source}, or {source} nothing out to {target}"
        else:
            why += f". With two hosts either side may be the cause: {target} lets nothing in, or {source} nothing out"
    return fail(
        _describe_shut(plane, blame, bad, reports), why, _suggest(plane, blame, [reports[name] for name in hosts], reports), _CLASSES[plane], hosts=hosts
    )  # fmt: skip


def _describe_shut(plane: Plane, blame: Blame, bad: Sequence[Link], reports: Reports) -> str:
    words, sample, ports = _describe_outcome(bad), _give_sample(bad), f"the ports that {LIBRARIES[plane][0]} takes"
    host, count = blame.hosts[0], f"{len(bad)} of {blame.tried}"
    if blame.kind == "in":
        address = reports[host].gloo_address if plane == "gloo" else reports[host].nccl_address
        return f"connections from {count} hosts to {host} ({bad[0].address or address}), {ports}, {words} ({sample})"
    if blame.kind == "out":
        return f"connections from {host} to {count} hosts, {ports}, {words} ({sample}); others reach them"
    if blame.kind == "both":
        return f"connections from and to {host}, {ports}, {words}, {count} of them ({sample})"
    if blame.kind == "all":
        return f"no host reaches any other one at {ports}: connections {words} ({sample})"
    source, target = blame.hosts
    way = f"between {source} and {target}, both ways," if len(bad) == 2 else f"from {source} to {target},"
    what = f"connections {way} {ports}, {words} ({sample})"
    return what + ("; both reach other hosts" if len(reports) > _FEWEST else "")


def _give_sample(bad: Sequence[Link]) -> str:
    return f"{bad[0].address} port {bad[0].port}" + (f": {bad[0].detail}" if bad[0].detail else "")


def _report_split(plane: Plane, blame: Blame, bad: Sequence[Link], reports: Reports) -> Reading:
    reach = "; ".join(f"{join_names(group)} reach each other" for group in blame.groups)
    what = f"{reach}; {describe_sides(blame)} at the ports that {LIBRARIES[plane][0]} takes: connections {_describe_outcome(bad)} ({_give_sample(bad)})"
    why = "something between them blocks it: a switch, a VLAN, a router, the security groups of a cloud, or their own firewalls; no host is to blame alone"
    source, target = blame.bad[0]
    address = reports[target].address
    fix = f"# let all TCP ports pass between these groups: in the switch, the VLAN, the router, or the security group. The way, on {source}:\nip route get {address}\ntraceroute {address}"
    fix += f"\n# or in their own firewalls. The rules, on {target}:\n{_SHOW_RULES}"
    return fail(what, f"{why}. {_WHY[plane]}", fix, _CLASSES[plane], hosts=blame.hosts)


def describe_sides(blame: Blame) -> str:
    """Describe of a split between which groups nothing passes."""
    place = {host: index for index, group in enumerate(blame.groups) for host in group}
    sides = sorted({(place[source], place[target]) for source, target in blame.bad})
    if len(sides) == len(blame.groups) * (len(blame.groups) - 1):
        return "nothing passes between these groups"
    named = [join_names(group) for group in blame.groups]
    return ", ".join(f"nothing passes from {named[one]} to {named[other]}" for one, other in sides)


def _describe_outcome(bad: Sequence[Link]) -> str:
    outcomes = {one.outcome for one in bad}
    if outcomes == {"timeout"}:
        return "are dropped without an answer"
    if "timeout" in outcomes:
        return "are dropped or refused"
    return "are refused" if outcomes <= {"refused", "reset"} else "are rejected"


def _suggest(plane: Plane, blame: Blame, fixed: Sequence[HostReport], reports: Reports) -> str:
    if plane == "nccl" and all(one.find_interface(one.gloo_address) for one in fixed):
        targets = {target for _, target in blame.bad} if blame.kind == "link" else {one.name for one in fixed}
        return "\n".join(
            on_host(one.name, f"{_take_interface(plane, one, one.gloo_address)}  # the one by which Gloo reaches it")
            for one in fixed if one.name in targets
        )  # fmt: skip
    if blame.kind == "link":
        ways: list[tuple[Side, str]] = [("in", target) for _, target in blame.bad]
        ways += [("out", source) for source, _ in blame.bad]
    else:
        sides: list[Side] = ["out"] if blame.kind == "out" else ["in", "out"] if blame.kind == "both" else ["in"]
        ways = [(side, one.name) for one in fixed for side in sides]
    lines = [_open(side, name, reports) for side, name in ways]
    # What others reach at another address needs no open firewall at this one.
    apart = [reports[name] for side, name in ways if side == "in" and plane == "gloo"]
    lines += [
        f"# or, on {it.name}: {_take_interface(plane, it)}" for it in apart if it.gloo_address not in {"", it.address}
    ]
    return "\n".join(lines)


def _open(side: Side, name: str, reports: Reports) -> str:
    """Return how TCP is let into a host, or out of it: with the command where its firewall has a short one."""
    ends = [one.address for one in reports.values() if one.name != name and is_address(one.address)]
    nets = sorted(set(map(_find_net, ends)))
    facts = (one.facts for one in reports[name].readings if one.probe == "firewall")
    program = next((fact.get("program") for fact in facts), "") if side == "in" else ""
    commands = [command.format(net) for net in nets if (command := _LET_IN.get(str(program)))]
    commands += ["sudo firewall-cmd --reload"] * (program == "firewalld" and bool(nets))
    way = f"{'in from' if side == 'in' else 'out to'} {', '.join(nets)}"
    return on_host(
        name,
        f"# let TCP {way}, at all ports, in its firewall or the cloud's security group",
        *(commands or [_SHOW_RULES]),
    )


def _find_net(address: str) -> str:
    """Return the network of an address, as far as it is our own; of a public one's neighbours nobody knows whose they are."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    return str(ipaddress.ip_network(f"{ip}/{64 if ip.version == 6 else 24}", strict=False) if ip.is_private else ip)


def _report_stalled(blame: Blame, reports: Reports) -> Reading:
    pairs = ", ".join(f"{source} → {target}" for source, target in blame.bad[:6])
    who = blame.hosts[0] if blame.kind in {"in", "out", "both"} else ""
    lines = [
        on_host(name, f"sudo ip link set dev {reports[name].find_interface(reports[name].gloo_address) or 'IFACE'} mtu 1400")
        for name in ((who,) if who else blame.hosts)
    ]  # fmt: skip
    address = reports[blame.bad[0][1]].address
    lines.append(f"ping -c 1 -M do -s 1472 {address}  # shows whether whole packets pass")
    return fail(
        f"small messages pass, but a stream does not ({pairs})" + (f": all at {who}" if who else ""),
        "large packets are dropped silently on the way (path MTU): init succeeds, and the first large collective hangs", "\n".join(lines),
        hosts=blame.hosts
    )  # fmt: skip


def _report_nowhere(plane: Plane, lost: Sequence[Link]) -> Iterator[Reading]:
    """Report hosts that have no route to where the rendezvous reached the others."""
    by_source: dict[str, list[Link]] = {}
    for link in lost:
        by_source.setdefault(link.source, []).append(link)
    for source, links in by_source.items():
        targets = join_names([f"{one.target} ({one.address})" for one in links])
        address = links[0].address
        lines = [f"# on {source}: which way should it be?", f"ip route get {address}; ip addr; ip route"]
        lines.append(f"# then, with the gateway that leads there: sudo ip route add {_find_net(address)} via GATEWAY")
        why = "its ranks fail at init_process_group or in their first collective: 'connectFullMesh failed', 'Network is unreachable'"
        yield fail(
            f"{source} has no route to {targets}: {links[0].detail}", _WHY[plane] if plane == "nccl" else why, "\n".join(lines),
            "I7" if plane == "nccl" else "", hosts=(source,)
        )  # fmt: skip
