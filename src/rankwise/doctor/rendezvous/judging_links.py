"""Finds which links are blocked, and at which host; and hosts without a route to others.

No firewall blocks what has no route: the fix is another interface, or a route.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

from rankwise.doctor.probe import Reading, fail, ok, on_host, skipped
from rankwise.doctor.rendezvous.blaming import Blame, find_blames
from rankwise.doctor.rendezvous.cluster_report import LIBRARIES, ClusterReport, HostReport, Link, Plane, Way
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
_WHY_NO_ROUTE = _WHY | {
    "gloo": "its ranks fail at init_process_group or in their first collective: 'connectFullMesh failed', 'Network is unreachable'"
}
_CLASSES_NO_ROUTE = _CLASSES | {"gloo": ""}
Reports: TypeAlias = dict[str, HostReport]
Links: TypeAlias = dict[Way, Link]
Places: TypeAlias = dict[tuple[str, str], list[str]]


def find_blocked(found: ClusterReport) -> set[str]:
    """Return the hosts whose firewalls are to be looked at: at whose ports something fails, or who may let nothing out."""
    alive = {one.name for one in found.hosts if not one.lost}
    blocked: set[str] = set()
    for plane in LIBRARIES:
        tried = [one for one in found.links if one.plane == plane and {one.source, one.target} <= alive]
        shut = {one.way for one in tried if one.outcome in _SHUT}
        blocked |= {target for _, target in shut}
        for blame in find_blames([one.way for one in tried], shut):
            if blame.kind in {"out", "both"}:
                blocked.add(blame.hosts[0])
            elif blame.kind == "link":
                blocked |= {source for source, _ in blame.bad}
    return blocked


def judge_links(found: ClusterReport) -> Iterator[Reading]:
    """Report links that do not open, and hosts that answer in the place of others."""
    reports = {one.name: one for one in found.hosts}
    links = [one for one in found.links if not reports[one.source].lost and not reports[one.target].lost]
    # Other probes may report these.
    good = not any(one.outcome == "no route" for one in links)
    for plane in LIBRARIES:
        tried = [one for one in links if one.plane == plane and one.outcome != "not tried"]
        of_plane = {one.way: one for one in tried}
        for reading in _judge_plane(plane, of_plane, reports):
            good = False
            yield reading
    if links and good:
        hosts = {one.source for one in links} | {one.target for one in links}
        yield ok(f"all {len(links)} connections between {len(hosts)} hosts open")
    untried = sorted({one.source for one in links if one.outcome == "not tried"})
    if untried:
        detail = next(one.detail for one in links if one.outcome == "not tried")
        yield skipped(f"{', '.join(untried)} could not try all links", detail)


def _judge_plane(plane: Plane, links: Links, reports: Reports) -> Iterator[Reading]:
    # An address that is another place on each host: whoever answers there, or does not, says nothing about a firewall.
    private = _find_private(links, reports)
    yield from _report_private(plane, private, reports)
    links = {way: link for way, link in links.items() if (way[1], link.address) not in private}
    yield from _judge_routes(plane, [one for one in links.values() if one.outcome == "no route"], reports)
    # A host without a route says nothing about what blocks the others.
    links = {way: link for way, link in links.items() if link.outcome != "no route"}
    # Each kind of failure by itself: two failed links may have different causes.
    shut = {way for way, link in links.items() if link.outcome in _SHUT}
    for blame in find_blames(links, shut):
        yield _report_shut(plane, blame, links, reports)
    for way, link in links.items():
        if link.outcome == "other host":
            yield _report_other(plane, link, reports[way[1]], reports[way[0]])
    stalled = {way for way, link in links.items() if link.outcome == "stalled"}
    for blame in find_blames(links, stalled):
        yield _report_stalled(blame, reports)


def _find_private(links: Links, reports: Reports) -> Places:
    """Return hosts that listen at an address of a container's bridge, or at one that the connecting host has itself; and which hosts do."""
    found: Places = {}
    for (source, target), link in links.items():
        report = reports[target]
        is_bad = link.outcome in {"other host", "no route", *_SHUT}
        if not is_bad or link.address == report.address:
            continue
        has_it = bool(reports[source].find_interface(link.address))
        if has_it or link.address in report.private:
            found.setdefault((target, link.address), []).extend([source] if has_it else [])
    return found


def _report_private(plane: Plane, private: Places, reports: Reports) -> Iterator[Reading]:
    """Report hosts that listen where nobody reaches them: one reading for all that do so at one address."""
    places: Places = {}
    order = list(reports)
    for target, address in sorted(private, key=lambda one: order.index(one[0])):
        interface = reports[target].find_interface(address) or "an interface"
        places.setdefault((address, interface), []).append(target)
    library, variable = LIBRARIES[plane]
    for (address, interface), targets in places.items():
        others = {source for target in targets for source in private[target, address]} - set(targets)
        own = sorted(others) or targets
        what = f"{library} listens at {address} on {', '.join(targets)}: that is {interface} there"
        if own != targets or len(targets) > 1:
            what += f", and {', '.join(own)} {'has' if len(own) == 1 else 'have'} that address, too"
        yield fail(
            what + "; the rendezvous reached " + ", ".join(f"{name} at {reports[name].address}" for name in targets),
            "other hosts look for it at their own such address, or find no route: 'connectFullMesh failed', 'Connection refused', or a hang",
            "\n".join(on_host(name, f"export {variable}={reports[name].find_interface(reports[name].address) or '…'}") for name in targets),
            "I7" if plane == "nccl" else "", hosts=tuple(targets)
        )  # fmt: skip


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
    words, sample, ports = _describe_outcome(bad), _give_sample(bad), _name_ports(plane)
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


def _name_ports(plane: Plane) -> str:
    return f"the ports that {LIBRARIES[plane][0]} takes"


def _give_sample(bad: Sequence[Link]) -> str:
    return f"{bad[0].address} port {bad[0].port}" + (f": {bad[0].detail}" if bad[0].detail else "")


def _report_split(plane: Plane, blame: Blame, bad: Sequence[Link], reports: Reports) -> Reading:
    ports = _name_ports(plane)
    reach = "; ".join(f"{join_names(group)} reach each other" for group in blame.groups)
    what = f"{reach}; {describe_sides(blame)} at {ports}: connections {_describe_outcome(bad)} ({_give_sample(bad)})"
    guilty = _find_own_firewalls(blame, reports)
    between = "a switch, a VLAN, a router, or the security groups of a cloud"
    if guilty:
        what += f"; {join_names(list(guilty))}'s own {'firewalls drop' if len(guilty) > 1 else 'firewall drops'} it: see firewall"
        why = f"check the other hosts' own firewalls as well, and then what is between them: {between}"
    else:
        why = (
            f"something between them blocks it: {between}, or their own firewalls; no host is to blame alone"
        )
    return fail(
        what, f"{why}. {_WHY[plane]}", _suggest_for_split(blame, guilty, reports), _CLASSES[plane], hosts=blame.hosts
    )  # fmt: skip


def _find_own_firewalls(blame: Blame, reports: Reports) -> dict[str, Reading]:
    """Return the readings of firewalls that are not well, of hosts at which nothing arrives from another group."""
    targets = {target for _, target in blame.bad}
    readings = ((name, one) for name in blame.hosts if name in targets for one in reports[name].readings)
    return {name: one for name, one in readings if one.probe == "firewall" and one.is_bad}


def _suggest_for_split(blame: Blame, guilty: dict[str, Reading], reports: Reports) -> str:
    source, target = blame.bad[0]
    lines = [on_host(name, reading.fix or _open("in", name, reports)) for name, reading in guilty.items()]
    address = reports[target].address
    way = f"# let all TCP ports pass between these groups: in the switch, the VLAN, the router, or the security group. The way, on {source}:\nip route get {address}\ntraceroute {address}"
    rest = next((one for _, one in blame.bad if one not in guilty), "")
    show = f"# or in their own firewalls. The rules, on {rest}:\nsudo nft list ruleset; sudo iptables-save"
    rules = [show] if rest else []
    return "\n".join([*lines, *rules, way] if guilty else [way, *rules])


def describe_sides(blame: Blame) -> str:
    """Describe of a split between which groups nothing passes."""
    sides, count = set(blame.sides), len(blame.groups)
    if len(sides) == count * (count - 1):
        return "nothing passes between these groups" if count > _FEWEST else "nothing passes between the two"
    shut = []
    for one, other in sorted(sides):
        first, second = join_names(blame.groups[one]), join_names(blame.groups[other])
        if (other, one) not in sides:
            shut.append(f"nothing passes from {first} to {second}")
        elif one < other:
            shut.append(f"nothing passes between {first} and {second}")
    return ", ".join(shut)


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
            on_host(one.name, f"export NCCL_SOCKET_IFNAME={one.find_interface(one.gloo_address)}  # the one by which Gloo reaches it")
            for one in fixed if one.name in targets
        )  # fmt: skip
    if blame.kind == "link":
        return _suggest_for_link(blame, reports)
    sides: list[Side] = ["out"] if blame.kind == "out" else ["in", "out"] if blame.kind == "both" else ["in"]
    return "\n".join(on_host(it.name, *(_open(side, it.name, reports) for side in sides)) for it in fixed)


def _suggest_for_link(blame: Blame, reports: Reports) -> str:
    """Open what may drop something: where the target comes in, and else where the source goes out."""
    ways: list[tuple[Side, str]] = [("in", target) for _, target in blame.bad]
    ways += [("out", source) for source, _ in blame.bad]
    commands = {(side, name): _open(side, name, reports) for side, name in ways}
    # A host that has looked at its rules, and found none in the way, says so in a comment.
    guilty = [way for way in ways if not commands[way].startswith("#")]
    first = [way for way in guilty if way[0] == "in"] or guilty or ways[: len(blame.bad)]
    rest = [way for way in ways if way not in first and (way in guilty or not guilty)]
    return "\n".join([
        *(on_host(way[1], commands[way]) for way in first),
        *(f"# or, if that does not help, on {way[1]}:\n{commands[way]}" for way in rest),
    ])  # fmt: skip


def _open(side: Side, name: str, reports: Reports) -> str:
    """Return what opens a host's firewall on one side; plain rules where the host did not say."""
    report = reports[name]
    others = ",".join(list_networks([one.address for one in reports.values() if one.name != name]))
    if side == "in":
        return report.opening or f"sudo iptables -I INPUT -p tcp -s {others} -j ACCEPT"
    return report.opening_out or f"sudo iptables -I OUTPUT -p tcp -d {others} -j ACCEPT"


def list_networks(addresses: Sequence[str]) -> list[str]:
    """Return the network that holds all of some addresses, if it has 256 of IPv4 at most; else the addresses."""
    try:
        read = [ipaddress.ip_address(one) for one in addresses]
    except ValueError:
        return list(addresses)
    is_plain = all(one.version == 4 and not one.is_loopback for one in read)
    nets = {str(ipaddress.ip_network(f"{one}/24", strict=False)) for one in read} if is_plain else set[str]()
    return list(nets) if len(nets) == 1 else sorted(set(addresses))


def _report_other(plane: Plane, link: Link, target: HostReport, source: HostReport) -> Reading:
    who, (library, variable) = link.detail or "another host", LIBRARIES[plane]
    return fail(
        f"at {link.address}, where {library} listens on {target.name}, {source.name} finds {who}",
        "two hosts have this address (a container's bridge?): ranks connect to the wrong one, or to themselves",
        on_host(target.name, f"export {variable}={target.find_interface(target.address) or '…'}"), "I7" if plane == "nccl" else "",
        hosts=(target.name, source.name)
    )  # fmt: skip


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


def _judge_routes(plane: Plane, lost: Sequence[Link], reports: Reports) -> Iterator[Reading]:
    """Report hosts that listen where others have no route to, and hosts that have no route to others, by the links that lack one."""
    # Where the probe of IPv6 was looked at on all hosts, and Gloo takes both families, that reports it better.
    alive = [one for one in reports.values() if not one.lost]
    has_both = len({":" in one.gloo_address for one in reports.values() if one.gloo_address}) > 1
    is_reported = has_both and all(any(reading.probe == "ipv6" for reading in one.readings) for one in alive)
    elsewhere: dict[str, list[Link]] = {}
    nowhere: dict[str, list[Link]] = {}
    for link in lost:
        lacks_ipv6 = _lacks_ipv6(link, reports)
        if lacks_ipv6 and is_reported:
            continue
        if link.address != reports[link.target].address and not lacks_ipv6:
            elsewhere.setdefault(link.target, []).append(link)
        else:
            nowhere.setdefault(link.source, []).append(link)
    for target, links in elsewhere.items():
        yield _report_elsewhere(plane, reports[target], links)
    for source, links in nowhere.items():
        yield _report_nowhere(plane, source, links, reports)


def _report_elsewhere(plane: Plane, target: HostReport, links: Sequence[Link]) -> Reading:
    library, variable = LIBRARIES[plane]
    interface, address = target.find_interface(links[0].address), links[0].address
    sources = join_names([one.source for one in links])
    where = f"at {address}" + (f" ({interface})" if interface else "")
    return fail(
        f"{library} listens {where} on {target.name}, and {sources} {'has' if len(links) == 1 else 'have'} no route to it ({links[0].detail}); the rendezvous reached {target.name} at {target.address}",
        _WHY_NO_ROUTE[plane], on_host(target.name, f"export {variable}={target.find_interface(target.address) or '…'}"), _CLASSES_NO_ROUTE[plane],
        hosts=(target.name,)
    )  # fmt: skip


def _report_nowhere(plane: Plane, source: str, links: Sequence[Link], reports: Reports) -> Reading:
    targets = join_names([f"{one.target} ({one.address})" for one in links])
    lines = _prefer_ipv4(plane, links, reports)
    address = links[0].address
    if not lines and _is_own_only(address):
        lines = [
            f"# {address} is valid on one link only; on {links[0].target}, use an interface that has another address (ip -br addr):",
            f"export {LIBRARIES['nccl' if plane == 'nccl' else 'gloo'][1]}=…",
        ]
    if not lines:
        net = ipaddress.ip_network(f"{address}/{64 if ':' in address else 24}", strict=False)
        lines = [f"# on {source}: which way should it be?", f"ip route get {address}; ip addr; ip route"]
        lines.append(f"# then, with the gateway that leads there: sudo ip route add {net} via GATEWAY")
    return fail(
        f"{source} has no route to {targets}: {links[0].detail}", _WHY_NO_ROUTE[plane], "\n".join(lines),
        "I22" if _lacks_ipv6(links[0], reports) else _CLASSES_NO_ROUTE[plane], hosts=(source,)
    )  # fmt: skip


def _prefer_ipv4(plane: Plane, links: Sequence[Link], reports: Reports) -> list[str]:
    """Return what makes the targets listen at IPv4, if that is all that is missing: Gloo takes an interface's first address."""
    if plane != "gloo" or not all(_lacks_ipv6(one, reports) for one in links):
        return []
    lines = []
    for link in links:
        report = reports[link.target]
        with_ipv4 = {name for name, ip in report.interfaces if ":" not in ip}
        taken = (report.find_interface(link.address), report.find_interface(report.address))
        interface = next((name for name in taken if name in with_ipv4), "")
        if not interface:
            return []
        lines.append(f"export GLOO_SOCKET_IFNAME={interface}  # on {report.name}")
    return lines


def _lacks_ipv6(link: Link, reports: Reports) -> bool:
    own = (ip for _, ip in reports[link.source].interfaces)
    return _is_wide_ipv6(link.address) and not any(map(_is_wide_ipv6, own))


def _is_wide_ipv6(ip: str) -> bool:
    return ":" in ip and not _is_own_only(ip)


def _is_own_only(ip: str) -> bool:
    """Return whether an address is good for this host, or one cable, only."""
    read = ipaddress.ip_address(ip.partition("%")[0])
    return read.is_loopback or read.is_link_local
