"""The judge on made-up facts of hosts without a route to each other: no firewall is blamed for what an interface or a route mends."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rankwise.doctor.multi_host.cluster_report import ClusterReport, HostReport, Link, Outcome, Plane
from rankwise.doctor.multi_host.judging import judge
from rankwise.doctor.multi_host.plan import Plan

if TYPE_CHECKING:
    from rankwise.doctor.probe import Reading

PLAN = Plan(endpoint_host="h0", endpoint_port=29500)
_WORDS = "Network is unreachable"


def make_card(number: int, *addresses: tuple[str, str], gloo: str) -> HostReport:
    first = addresses[0][1]
    return HostReport(
        name=f"h{number}", own_name=f"h{number}", address=first, gloo_address=gloo, interfaces=addresses, clock_ahead_s=0.0
    )  # fmt: skip


def make_link(source: int, target: HostReport, outcome: Outcome, plane: Plane = "gloo") -> Link:
    address = target.nccl_address if plane == "nccl" else target.gloo_address
    detail = _WORDS if outcome == "no route" else ""
    return Link(source=f"h{source}", target=target.name, plane=plane, address=address, port=40000, outcome=outcome, detail=detail)  # fmt: skip


def make_set(cards: list[HostReport], lost: set[tuple[int, int]], plane: Plane = "gloo") -> ClusterReport:
    links = [
        make_link(a, cards[b], "no route" if (a, b) in lost else "ok", plane)
        for a in range(len(cards)) for b in range(len(cards)) if a != b
    ]  # fmt: skip
    return ClusterReport(hosts=tuple(cards), links=tuple(links))


def bad(found: ClusterReport) -> list[Reading]:
    return [one for one in judge(found, PLAN) if one.verdict in {"warn", "fail"}]


@pytest.mark.parametrize(("plane", "variable", "class_id"), [("gloo", "GLOO", ""), ("nccl", "NCCL", "I7")])
def test_an_interface_that_others_do_not_reach_is_its_hosts_to_change(
    plane: Plane, variable: str, class_id: str
) -> None:
    """h0 listens on a network that no other host has: it is told to take the interface by which the rendezvous reached it."""
    first = make_card(0, ("eth0", "10.0.0.1"), ("stor0", "192.168.7.1"), gloo="192.168.7.1")
    cards = [replace(first, nccl_address="192.168.7.1")]
    cards += [
        replace(make_card(n, ("eth0", f"10.0.0.{n + 1}"), gloo=f"10.0.0.{n + 1}"), nccl_address=f"10.0.0.{n + 1}")
        for n in (1, 2)
    ]  # fmt: skip
    found = make_set(cards, {(1, 0), (2, 0)}, plane)
    (told,) = bad(found)
    assert (told.hosts, told.class_id) == (("h0",), class_id)
    assert told.fix == f"# on h0:\nexport {variable}_SOCKET_IFNAME=eth0"
    assert f"at 192.168.7.1 (stor0) on h0; h1 and h2 have no route to it ({_WORDS})" in told.what


def test_a_host_without_a_route_is_named_with_its_way() -> None:
    """h1 knows no way to the others: it is h1's table of routes, and no firewall's fix is told."""
    cards = [make_card(n, ("eth0", f"10.{n}.0.1"), gloo=f"10.{n}.0.1") for n in range(3)]
    (told,) = bad(make_set(cards, {(1, 0), (1, 2)}))
    assert told.hosts == ("h1",)
    assert told.what == f"h1 has no route to h0 (10.0.0.1) and h2 (10.2.0.1): {_WORDS}"
    assert "sudo ip route add 10.0.0.0/24 via GATEWAY" in told.fix
    assert "iptables" not in told.fix
    assert "firewall" not in told.fix


@pytest.mark.parametrize("lacks", [True, False])
def test_half_of_ipv6_is_told_once(*, lacks: bool) -> None:
    """Gloo takes IPv6 on h0 and h2, and IPv4 on h1, which may have no route to them: it connects none of both, and takes IPv4 if told so."""
    both = [
        make_card(n, ("eth0", f"fd00::{n + 1}"), ("eth0", f"10.0.0.{n + 1}"), gloo=f"fd00::{n + 1}") for n in (0, 2)
    ]
    only_ipv4 = make_card(1, ("eth0", "10.0.0.2"), ("eth0", "fe80::7%eth0"), gloo="10.0.0.2")
    found = make_set([both[0], only_ipv4, both[1]], {(1, 0), (1, 2)} if lacks else set())
    assert not [one for one in judge(found, PLAN) if one.verdict == "ok" and "connections" in one.what]
    (told,) = bad(found)
    assert (told.class_id, told.hosts) == ("I22", ("h0", "h2"))
    assert told.fix == "export GLOO_SOCKET_IFNAME=eth0  # on h0\nexport GLOO_SOCKET_IFNAME=eth0  # on h2"
