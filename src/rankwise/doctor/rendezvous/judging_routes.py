"""Finds hosts without a route to others: no firewall blocks them, so the fix is another interface, or a route."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from rankwise.doctor.probe import Reading
from rankwise.doctor.rendezvous.cluster_report import LIBRARIES, find_interface, on_host
from rankwise.doctor.units import join_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rankwise.doctor.rendezvous.cluster_report import HostReport, Link, Plane


#: What becomes of a job whose ranks do not get through, whatever stops them.
WHY_OF_OTHERS: dict[Plane, str] = {
    "nccl": "NCCL takes this address: its first collective hangs, or fails with 'ncclSystemError: Connect to … failed'",
    "master": "the ranks rendezvous at this port: 'The client socket has timed out … while trying to connect'",
}
_WHY: dict[Plane, str] = {
    **WHY_OF_OTHERS,
    "gloo": "its ranks fail at init_process_group or in their first collective: 'connectFullMesh failed', 'Network is unreachable'",
}
_CLASSES: dict[Plane, str] = {"gloo": "", "nccl": "I7", "master": "I2"}


def judge_routes(plane: Plane, lost: Sequence[Link], reports: dict[str, HostReport]) -> Iterator[Reading]:
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
        if plane != "master" and link.address != reports[link.target].address and not lacks_ipv6:
            elsewhere.setdefault(link.target, []).append(link)
        else:
            nowhere.setdefault(link.source, []).append(link)
    for target, links in elsewhere.items():
        yield _report_elsewhere(plane, reports[target], links)
    for source, links in nowhere.items():
        yield _report_nowhere(plane, source, links, reports)


def _report_elsewhere(plane: Plane, target: HostReport, links: Sequence[Link]) -> Reading:
    library, variable = LIBRARIES[plane]
    interface, address = find_interface(target, links[0].address), links[0].address
    sources = join_names([one.source for one in links])
    where = f"at {address}" + (f" ({interface})" if interface else "")
    return Reading(
        verdict="fail", hosts=(target.name,), class_id=_CLASSES[plane], why=_WHY[plane],
        what=f"{library} listens {where} on {target.name}, and {sources} {'has' if len(links) == 1 else 'have'} no route to it ({links[0].detail}); "
        f"the rendezvous reached {target.name} at {target.address}",
        fix=on_host(target.name, f"export {variable}={find_interface(target, target.address) or '…'}"),
    )  # fmt: skip


def _report_nowhere(
    plane: Plane, source: str, links: Sequence[Link], reports: dict[str, HostReport]
) -> Reading:
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
    return Reading(
        verdict="fail", hosts=(source,), class_id="I22" if _lacks_ipv6(links[0], reports) else _CLASSES[plane], why=_WHY[plane],
        what=f"{source} has no route to {targets}: {links[0].detail}", fix="\n".join(lines),
    )  # fmt: skip


def _prefer_ipv4(plane: Plane, links: Sequence[Link], reports: dict[str, HostReport]) -> list[str]:
    """Return what makes the targets listen at IPv4, if that is all that is missing: Gloo takes an interface's first address."""
    if plane != "gloo" or not all(_lacks_ipv6(one, reports) for one in links):
        return []
    lines = []
    for link in links:
        report = reports[link.target]
        with_ipv4 = {name for name, ip in report.interfaces if ":" not in ip}
        taken = (find_interface(report, link.address), find_interface(report, report.address))
        interface = next((name for name in taken if name in with_ipv4), "")
        if not interface:
            return []
        lines.append(f"export GLOO_SOCKET_IFNAME={interface}  # on {report.name}")
    return lines


def _lacks_ipv6(link: Link, reports: dict[str, HostReport]) -> bool:
    own = (ip for _, ip in reports[link.source].interfaces)
    return _is_wide_ipv6(link.address) and not any(map(_is_wide_ipv6, own))


def _is_wide_ipv6(ip: str) -> bool:
    return ":" in ip and not _is_own_only(ip)


def _is_own_only(ip: str) -> bool:
    """Return whether an address is good for this host, or one cable, only."""
    read = ipaddress.ip_address(ip.partition("%")[0])
    return read.is_loopback or read.is_link_local
