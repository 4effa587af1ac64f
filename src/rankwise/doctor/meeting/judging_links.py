"""Judges which links are blocked, and at whose side."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from rankwise.doctor.meeting.blaming import find_blames
from rankwise.doctor.reading import Reading, ok, skipped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rankwise.doctor.meeting.blaming import Blame
    from rankwise.doctor.meeting.together import HostCard, Link, Plane, Together

_PLANES: tuple[Plane, ...] = ("gloo", "nccl", "master")
_CLASSES: dict[Plane, str] = {"gloo": "I8", "nccl": "I7", "master": "I2"}
_SHUT = {"refused", "timeout", "unreachable", "reset"}
_WHY: dict[Plane, str] = {
    "gloo": "Gloo and NCCL connect all hosts at ports that the kernel chooses: init_process_group passes, and then the first collective "
    "hangs, or fails with 'Connection reset by peer' or 'connectFullMesh failed'",
    "nccl": "NCCL takes this address: its first collective hangs, or fails with 'ncclSystemError: Connect to … failed'",
    "master": "the ranks meet at this port: 'The client socket has timed out … while trying to connect'",
}


def find_blocked(found: Together) -> set[str]:
    """Return the hosts at whose ports something fails: those whose firewalls are to be looked at."""
    alive = {one.name for one in found.hosts if not one.lost}
    return {
        one.target
        for one in found.links
        if one.outcome in _SHUT and one.source in alive and one.target in alive
    }


def judge_links(found: Together) -> Iterator[Reading]:
    """Tell of links that do not open, or of who answers there in another one's place."""
    cards = {one.name: one for one in found.hosts}
    links = [one for one in found.links if not cards[one.source].lost and not cards[one.target].lost]
    good = True
    for plane in _PLANES:
        of_plane = {
            (one.source, one.target): one
            for one in links
            if one.plane == plane and one.outcome != "not tried"
        }
        for reading in _judge_plane(plane, of_plane, cards):
            good = False
            yield reading
    if links and good:
        hosts = {one.source for one in links} | {one.target for one in links}
        yield ok(f"all {len(links)} connections between {len(hosts)} hosts open")
    untried = sorted({one.source for one in links if one.outcome == "not tried"})
    if untried:
        detail = next(one.detail for one in links if one.outcome == "not tried")
        yield skipped(f"{', '.join(untried)} could not try all links", detail)


def _judge_plane(
    plane: Plane, links: dict[tuple[str, str], Link], cards: dict[str, HostCard]
) -> Iterator[Reading]:
    # Bad ones only: where one way fails, another explanation than for the next one may hold.
    shut = {way for way, link in links.items() if link.outcome in _SHUT}
    for blame in find_blames(links, shut):
        yield _tell_shut(plane, blame, links, cards)
    for way, link in links.items():
        if link.outcome == "other host":
            yield _tell_other(plane, link, cards[way[1]], cards[way[0]])
    stalled = {way for way, link in links.items() if link.outcome == "stalled"}
    for blame in find_blames(links, stalled):
        yield _tell_stalled(blame, cards)


def _tell_shut(
    plane: Plane, blame: Blame, links: dict[tuple[str, str], Link], cards: dict[str, HostCard]
) -> Reading:
    bad = [links[way] for way in blame.bad]
    words = _describe_outcome(bad)
    sample = f"{bad[0].address} port {bad[0].port}" + (f": {bad[0].detail}" if bad[0].detail else "")
    host = blame.hosts[0]
    address = cards[host].gloo_address if plane == "gloo" else cards[host].nccl_address
    hosts: tuple[str, ...] = (host,)
    fixed: tuple[str, ...] = (host,)
    ports = {
        "gloo": "the ports that Gloo takes",
        "nccl": "the ports that NCCL takes",
        "master": f"port {bad[0].port}",
    }[plane]
    count = f"{len(bad)} of {blame.tried}"
    if blame.kind == "in":
        what = f"connections from {count} hosts to {host} ({bad[0].address or address}), {ports}, {words} ({sample})"
    elif blame.kind == "out":
        what = f"connections from {host} to {count} hosts, {ports}, {words} ({sample}); others reach them"
    elif blame.kind == "both":
        what = f"connections from and to {host}, {ports}, {words}, {count} of them ({sample})"
    elif blame.kind == "all":
        what = f"no host reaches any other one at {ports}: connections {words} ({sample})"
        hosts = fixed = blame.hosts
    else:
        source, target = blame.hosts
        way = f"between {source} and {target}, both ways," if len(bad) == 2 else f"from {source} to {target}"
        what = f"connections {way} {ports}, {words} ({sample})"
        if len(cards) > 2:
            what += "; both reach other hosts"
        hosts = (source, target)
        fixed = hosts if len(bad) == 2 else (target,)
    why = _WHY[plane]
    if blame.kind == "link" and len(cards) == 2 and len(bad) == 1:
        why += (
            f". With two hosts either side may be it: {hosts[1]} lets nothing in, or {hosts[0]} nothing out"
        )
    return Reading(
        verdict="fail", what=what, why=why, class_id=_CLASSES[plane], hosts=hosts,
        fix=_suggest(plane, blame, [cards[name] for name in fixed], list(cards.values())),
    )  # fmt: skip


def _describe_outcome(bad: Sequence[Link]) -> str:
    outcomes = {one.outcome for one in bad}
    if outcomes == {"timeout"}:
        return "are dropped without an answer"
    if "timeout" in outcomes:
        return "are dropped or refused"
    return "are refused" if outcomes <= {"refused", "reset"} else "are turned away"


def _suggest(plane: Plane, blame: Blame, fixed: Sequence[HostCard], everyone: Sequence[HostCard]) -> str:
    lines = []
    for card in fixed:
        lines.append(f"# on {card.name}:")
        interface = _find_interface(card, card.gloo_address)
        if plane == "nccl" and interface:
            lines.append(f"export NCCL_SOCKET_IFNAME={interface}  # the one by which Gloo reaches it")
            continue
        others = [one.address for one in everyone if one.name != card.name]
        if blame.kind == "out":
            network = ",".join(list_networks(others))
            lines.append(f"sudo iptables -I OUTPUT -p tcp -d {network} -j ACCEPT")
        else:
            lines.append(card.opening or _open_plainly(others))
    return "\n".join(lines)


def _open_plainly(others: Sequence[str]) -> str:
    return f"sudo iptables -I INPUT -p tcp -s {','.join(list_networks(others))} -j ACCEPT"


def list_networks(addresses: Sequence[str]) -> list[str]:
    """Return the network that holds all of some addresses, if it has 256 of IPv4 at most; else the addresses."""
    try:
        read = [ipaddress.ip_address(one) for one in addresses]
    except ValueError:
        return list(addresses)
    networks = {str(ipaddress.ip_network(f"{one}/24", strict=False)) for one in read if one.version == 4}
    if (
        len(networks) == 1
        and all(one.version == 4 for one in read)
        and not any(one.is_loopback for one in read)
    ):
        return sorted(networks)
    return sorted(set(addresses))


def _find_interface(card: HostCard, address: str) -> str:
    return next((name for name, ip in card.interfaces if ip == address), "")


def _tell_other(plane: Plane, link: Link, target: HostCard, source: HostCard) -> Reading:
    who = link.detail or "another host"
    if plane == "master":
        return Reading(
            verdict="fail", what=f"at the master's address, as {source.name} reads it ({link.address}), {who} answers, and not {target.name}",
            why=_WHY[plane], class_id="I2", hosts=(source.name, target.name),
            fix=f"# on {source.name}:\nexport MASTER_ADDR={target.address}",
        )  # fmt: skip
    variable = "GLOO_SOCKET_IFNAME" if plane == "gloo" else "NCCL_SOCKET_IFNAME"
    interface = _find_interface(target, target.address) or "…"
    return Reading(
        verdict="fail", what=f"at {link.address}, where {plane.capitalize() if plane == 'gloo' else 'NCCL'} listens on {target.name}, "
        f"{source.name} finds {who}", why="two hosts have this address (a container's bridge?): ranks connect to the wrong one, or to themselves",
        class_id="I7" if plane == "nccl" else "", hosts=(target.name, source.name),
        fix=f"# on {target.name}:\nexport {variable}={interface}",
    )  # fmt: skip


def _tell_stalled(blame: Blame, cards: dict[str, HostCard]) -> Reading:
    pairs = ", ".join(f"{source} → {target}" for source, target in blame.bad[:6])
    who = blame.hosts[0] if blame.kind in {"in", "out", "both"} else ""
    fixed = [cards[name] for name in ((who,) if who else blame.hosts)]
    lines = []
    for card in fixed:
        interface = _find_interface(card, card.gloo_address) or "IFACE"
        lines += [f"# on {card.name}:", f"sudo ip link set dev {interface} mtu 1400"]
    target = cards[blame.bad[0][1]]
    lines.append(f"ping -c 1 -M do -s 1472 {target.address}  # tells whether whole packets pass")
    return Reading(
        verdict="fail", what=f"small messages pass and a stream does not ({pairs})" + (f": all at {who}" if who else ""),
        why="large packets are dropped on the way and nobody is told (path MTU): init passes, and the first large collective hangs",
        hosts=blame.hosts, fix="\n".join(lines),
    )  # fmt: skip
