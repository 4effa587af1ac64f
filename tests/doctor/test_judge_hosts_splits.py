"""The judge of several hosts: what lies between groups of them, addresses that are another place on each host, and which side is told to open."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from doctor.test_judge_hosts import bad, make_set, ways
from network_hosts import ask
from rankwise.doctor.host import ProgramResult
from rankwise.doctor.json_records import to_json
from rankwise.doctor.multi_host import cluster_report
from rankwise.doctor.multi_host.blaming import find_blames
from rankwise.doctor.multi_host.cluster_report import NameLookup
from rankwise.doctor.multi_host.judging_links import judge_links
from rankwise.doctor.probe import ok
from rankwise.doctor.units import join_names

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rankwise.doctor.multi_host.cluster_report import ClusterReport

# ── groups of hosts ──


@pytest.mark.parametrize("count", [4, 5, 8, 16, 64])
@pytest.mark.parametrize("is_one_way", [False, True])
def test_a_split_accuses_no_host(count: int, is_one_way: bool) -> None:
    """Two halves that don't reach each other, or one not the other: one reading with both, and no firewall of any host."""
    half = count // 2

    def is_shut(way: tuple[int, int]) -> bool:
        return (way[0] < half) != (way[1] < half) and (not is_one_way or way[0] < half)

    (told,) = bad(make_set(count, outcome=lambda way: "timeout" if is_shut(way) else "ok"))
    assert (told.verdict, told.class_id) == ("fail", "I8")
    assert told.hosts == tuple(sorted(f"h{n}" for n in range(count)))
    assert told.what.count("reach each other") == 2
    assert ("nothing passes from h0" if is_one_way else "nothing passes between these groups") in told.what
    assert "switch" in told.why
    assert "iptables -I" not in told.fix
    assert "ip route get 10.0.0." in told.fix


def test_three_groups_are_one_reading() -> None:
    """Three racks of two hosts: each is named as a group."""
    (told,) = bad(make_set(6, outcome=lambda way: "timeout" if way[0] // 2 != way[1] // 2 else "ok"))
    assert "h0 and h1 reach each other; h2 and h3 reach each other; h4 and h5 reach each other" in told.what
    assert "nothing passes between these groups" in told.what


def test_a_blocked_host_beside_a_split_is_named_as_well() -> None:
    """Two halves, and a fifth host that lets nobody in: both are told, and nobody else."""
    found = make_set(
        5,
        outcome=lambda way: "timeout" if way[1] == 4 or (4 not in way and way[0] // 2 != way[1] // 2) else "ok",
    )
    split, blocked = bad(found)
    assert split.hosts == ("h0", "h1", "h2", "h3")
    assert blocked.hosts == ("h4",)
    assert "4 of 4 hosts to h4" in blocked.what


@pytest.mark.parametrize("victims", [(1,), (1, 3), (0, 1, 2)])
@pytest.mark.parametrize("count", [4, 8, 16])
def test_hosts_that_let_nobody_in_are_no_group(count: int, victims: tuple[int, ...]) -> None:
    """Several hosts with a firewall of their own don't reach each other either: each is named, not what lies between."""
    told = bad(make_set(count, outcome=lambda way: "refused" if way[1] in victims else "ok"))
    assert sorted(one.hosts for one in told) == [(f"h{victim}",) for victim in victims]


def test_few_ways_make_no_split() -> None:
    """Of 16 hosts each was measured with its neighbours only: two bad links cut the ring, and are told as links."""
    tried = [(f"h{a:02}", f"h{b:02}") for a, b in ways(16) if (a - b) % 16 in {1, 15}]
    wrong = {("h00", "h01"), ("h01", "h00"), ("h08", "h09"), ("h09", "h08")}
    assert [one.kind for one in find_blames(tried, wrong)] == ["link", "link"]


def test_splits_explain_all_that_is_bad() -> None:
    """Groups of any size, with single bad ways on top: whatever is bad stands in exactly one blame."""
    for seed in range(100):
        chance = random.Random(seed)
        count = chance.randint(4, 10)
        group = [chance.randrange(3) for _ in range(count)]
        tried = [(f"h{a}", f"h{b}") for a, b in ways(count)]
        wrong = {(f"h{a}", f"h{b}") for a, b in ways(count) if group[a] != group[b] or chance.random() < 0.05}
        explained = [way for blame in find_blames(tried, wrong) for way in blame.bad]
        assert sorted(explained) == sorted(wrong)


def test_slow_ways_between_two_halves_blame_no_host() -> None:
    """Two racks with a slow cable between them: one reading, the hosts of both sides, nobody's interface."""
    (told,) = bad(make_set(8, speed=lambda way: 5e6 if way[0] // 4 != way[1] // 4 else 1e9))
    assert (told.verdict, len(told.hosts)) == ("warn", 8)
    assert "between h0, h1, h2 and h3 and, on the other side, h4, h5, h6 and h7" in told.what
    assert "ethtool" not in told.fix


# ── which side is opened ──


@pytest.mark.parametrize(
    ("count", "shut", "fix"),
    [
        (4, lambda way: way[0] == 2, [("h2", "out to")]),
        (4, lambda way: 2 in way, [("h2", "in from"), ("h2", "out to")]),
        (2, lambda way: way == (0, 1), [("h1", "in from"), ("h0", "out to")]),
        (3, lambda way: way == (2, 1), [("h1", "in from"), ("h2", "out to")]),
    ],
)
def test_each_side_that_may_drop_is_told(count: int, shut: Callable[[Any], bool], fix: list[tuple[str, str]]) -> None:
    """A host that lets nothing out, or in and out; of a single link, where either end may drop it, both ends, the target's first."""
    (told,) = bad(make_set(count, outcome=lambda way: "timeout" if shut(way) else "ok"))
    todo = "# let TCP {} 10.0.0.0/24, at all ports, in its firewall or the cloud's security group"
    lines = [line for line in told.fix.splitlines() if line.startswith("#")]
    assert lines == [line for name, way in fix for line in (f"# on {name}:", todo.format(way))]


@pytest.mark.parametrize(
    ("program", "command"),
    [
        ("ufw", "sudo ufw allow from 10.0.0.0/24 proto tcp"),
        (
            "firewalld",
            "sudo firewall-cmd --permanent --zone=trusted --add-source=10.0.0.0/24\nsudo firewall-cmd --reload",
        ),
        ("", "sudo nft list ruleset; sudo iptables-save  # shows its rules"),
    ],
)
def test_a_firewall_with_a_short_command_has_it_printed(program: str, command: str) -> None:
    """The host's own probe says which firewall runs there."""
    found = make_set(3, outcome=lambda way: "timeout" if way[1] == 2 else "ok")
    seen = (ok("running", program=program).of("firewall", "h2"),)
    hosts = tuple(replace(one, readings=seen) if one.name == "h2" else one for one in found.hosts)
    (told,) = bad(replace(found, hosts=hosts))
    assert told.fix.splitlines()[2:] == command.splitlines()


@pytest.mark.parametrize(("net", "sources"), [("10.0.0", ["10.0.0.0/24"]), ("8.8.8", ["8.8.8.1", "8.8.8.2"])])
def test_who_may_not_read_the_rules_is_told_the_command(tmp_path: Path, net: str, sources: list[str]) -> None:
    """The probe knows the firewall without root, and the judge opens it: for a private network, and of public addresses for the hosts alone."""
    refused = ProgramResult(code=4, err="Permission denied (you must be root)")
    (seen,) = ask("firewall", tmp_path, programs={"iptables-save": refused, "ufw status": "Status: active\n"})
    assert seen.verdict == "skipped"
    found = make_set(3, outcome=lambda way: "timeout" if way[1] == 2 else "ok")
    hosts = tuple(
        replace(one, address=f"{net}.{n}", gloo_address=f"{net}.{n}", readings=(seen.of("firewall", one.name),)) for n, one in enumerate(found.hosts, 1)
    )  # fmt: skip
    links = tuple(replace(one, address=hosts[int(one.target[1:])].address) for one in found.links)
    (told,) = bad(replace(found, hosts=hosts, links=links))
    assert told.fix.splitlines()[2:] == [f"sudo ufw allow from {one} proto tcp" for one in sources]


def test_ways_that_nobody_tried_are_not_open() -> None:
    """A host that has said nothing of its ways, or not of all, is named, and not counted among those that reach the others."""
    found = make_set(3)
    assert [one.what for one in judge_links(found)] == ["all 6 connections between 3 hosts open"]
    for links in (found.links[:4], found.links[:5]):
        told = [(one.verdict, one.what) for one in judge_links(replace(found, links=links))]
        assert told == [("ok", f"{len(links)} connections between 3 hosts open"), ("skipped", "h2 could not try all links")]  # fmt: skip
    lost = tuple(replace(one, lost="gone") if one.name == "h2" else one for one in found.hosts)
    assert [one.what for one in judge_links(replace(found, hosts=lost))] == ["all 2 connections between 2 hosts open"]
    none = [one.what for one in judge_links(replace(found, links=()))]
    assert none == ["h0, h1, h2 could not try all links"]


def test_addresses_of_containers_pass_through_json() -> None:
    """What a host tells of itself comes back from JSON as it was."""
    found = make_set(2)
    cards = tuple(replace(one, private=("172.17.0.1",)) for one in found.hosts)
    assert cluster_report.from_json(to_json(replace(found, hosts=cards))).hosts == cards


# ── addresses that are another place on each host ──

DOCKER = "172.17.0.1"


def _listen_at_docker(found: ClusterReport, *targets: str, has_it: bool) -> ClusterReport:
    """All hosts have docker0, or only these; and these listen there."""
    hosts = tuple(
        replace(
            one,
            interfaces=(*one.interfaces, ("docker0", DOCKER)) if has_it or one.name in targets else one.interfaces,
            private=(DOCKER,) if has_it or one.name in targets else (),
            gloo_address=DOCKER if one.name in targets else one.gloo_address,
        )
        for one in found.hosts
    )
    links = tuple(
        replace(one, address=DOCKER, outcome="refused" if has_it else "timeout") if one.target in targets else one
        for one in found.links
    )
    return replace(found, hosts=hosts, links=links)


@pytest.mark.parametrize("has_it", [True, False])
@pytest.mark.parametrize("targets", [("h1",), ("h0", "h1", "h2")])
def test_a_bridge_of_containers_is_told_as_that(targets: tuple[str, ...], has_it: bool) -> None:
    """Gloo at docker0 of one host, or of all: one reading with the interface, the variable as the fix, no word of a firewall."""
    (told,) = bad(_listen_at_docker(make_set(3), *targets, has_it=has_it))
    assert (told.verdict, told.hosts, told.class_id) == ("fail", targets, "")
    assert f"Gloo listens at {DOCKER} (docker0) on {join_names(targets)}" in told.what
    assert ("have that address, too" in told.what) == (has_it or len(targets) > 1)
    assert told.fix.splitlines()[:2] == [f"# on {targets[0]}:", "export GLOO_SOCKET_IFNAME=eth0"]
    assert "iptables" not in told.fix


def test_a_firewall_beside_a_bridge_is_told_as_well() -> None:
    """h1 listens at docker0, and h2 lets nobody in: two readings, each with its own host."""
    found = _listen_at_docker(make_set(4, outcome=lambda way: "timeout" if way[1] == 2 else "ok"), "h1", has_it=True)
    assert [one.hosts for one in bad(found)] == [("h1",), ("h2",)]


# ── /etc/hosts ──


def test_no_told_name_becomes_a_command() -> None:
    """A host that calls itself something with a quote in it gets no commands for that."""
    name = "x';reboot;'"
    found = replace(
        make_set(3),
        names=(NameLookup(source="h0", name=name, target="h2", got=("10.0.0.77",), is_written=True),),
    )
    (told,) = bad(found)
    assert all(line.startswith("#") for line in told.fix.splitlines())
