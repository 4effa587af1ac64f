"""The judge of several hosts: what lies between groups of them, addresses that are another place on each host, and fixes that are run."""

from __future__ import annotations

import random
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from doctor.test_judge_hosts import bad, make_set, ways
from rankwise.doctor.json_records import to_json
from rankwise.doctor.multi_host import cluster_report
from rankwise.doctor.multi_host.blaming import find_blames
from rankwise.doctor.multi_host.cluster_report import NameLookup
from rankwise.doctor.network.names import remove_name
from rankwise.doctor.probe import Reading
from rankwise.doctor.units import join_names

if TYPE_CHECKING:
    from pathlib import Path

    from rankwise.doctor.multi_host.cluster_report import ClusterReport
    from rankwise.doctor.probe import Verdict

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
    assert ("nothing passes from h0" if is_one_way else "nothing passes between the two") in told.what
    assert "switch" in told.why
    assert "iptables -I" not in told.fix
    assert "ip route get 10.0.0." in told.fix


def _give_firewall(found: ClusterReport, verdict: Verdict, *names: str) -> ClusterReport:
    told = Reading(
        verdict=verdict, what="w", why="y", fix="sudo open it" if verdict == "warn" else "", probe="firewall"
    )
    hosts = tuple(replace(one, readings=(told,)) if one.name in names else one for one in found.hosts)
    return replace(found, hosts=hosts)


def test_a_split_by_the_hosts_own_firewalls_is_told_as_that() -> None:
    """h2's own rules are read as dropping: it is named, its fix comes first, then the rules of another host, then the way."""
    found = make_set(4, outcome=lambda way: "timeout" if way[0] // 2 != way[1] // 2 else "ok")
    (told,) = bad(_give_firewall(found, "warn", "h2"))
    assert "; h2's own firewall drops it: see firewall" in told.what
    assert "no host is to blame" not in told.why
    lines = told.fix.splitlines()
    assert lines[:2] == ["# on h2:", "sudo open it"]
    assert lines[2].endswith("on h3:")
    assert lines[3] == "sudo nft list ruleset; sudo iptables-save"
    assert "ip route get 10.0.0.3" in lines
    (told,) = bad(_give_firewall(found, "warn", "h0", "h1", "h2", "h3"))
    assert "h0, h1, h2 and h3's own firewalls drop it" in told.what
    assert "nft" not in told.fix


@pytest.mark.parametrize("verdict", ["ok", "skipped"])
def test_in_a_split_their_own_firewalls_are_looked_at_second(verdict: Verdict) -> None:
    """No firewall is known to drop it: what lies between comes first, then the command that lists the rules of a host."""
    found = make_set(4, outcome=lambda way: "timeout" if way[0] // 2 != way[1] // 2 else "ok")
    (told,) = bad(_give_firewall(found, verdict, "h0", "h1", "h2", "h3"))
    assert "own firewall" not in told.what
    assert "security groups of a cloud, or their own firewalls" in told.why
    assert told.fix.splitlines()[-2:] == [
        "# or in their own firewalls. The rules, on h2:",
        "sudo nft list ruleset; sudo iptables-save",
    ]


def test_a_firewall_of_the_side_that_is_reached_explains_no_split() -> None:
    """h0's firewall is in nobody's way where only h2 and h3 can't be reached: it is not named here."""
    found = make_set(4, outcome=lambda way: "timeout" if way[0] < 2 <= way[1] else "ok")
    (told,) = bad(_give_firewall(found, "warn", "h0"))
    assert "own firewall" not in told.what


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


def test_a_host_that_lets_nothing_out_is_asked_for_what_it_has_at_its_way_out() -> None:
    """Its own chains are opened, as it has told them; and it is among those that are asked."""
    found = make_set(4, outcome=lambda way: "timeout" if way[0] == 2 else "ok")
    cards = tuple(replace(one, opening="open in", opening_out="open out") for one in found.hosts)
    (told,) = bad(replace(found, hosts=cards))
    assert told.fix == "# on h2:\nopen out"


def test_a_host_that_is_shut_both_ways_is_opened_both_ways() -> None:
    """Nothing in, nothing out: both commands of that host."""
    found = make_set(4, outcome=lambda way: "timeout" if 2 in way else "ok")
    cards = tuple(replace(one, opening="open in", opening_out="open out") for one in found.hosts)
    (told,) = bad(replace(found, hosts=cards))
    assert told.fix == "# on h2:\nopen in\nopen out"


def test_of_two_hosts_both_sides_are_opened() -> None:
    """With two hosts nobody knows which side it is: the commands of both are there, those of the target first."""
    found = make_set(2, outcome=lambda way: "timeout" if way == (0, 1) else "ok")
    cards = tuple(replace(one, opening="open in", opening_out="open out") for one in found.hosts)
    (told,) = bad(replace(found, hosts=cards))
    assert told.fix == "# on h1:\nopen in\n# or, if that does not help, on h0:\nopen out"


_CLEAN_IN, _CLEAN_OUT = "# let TCP in: …", "# let TCP out: …"


@pytest.mark.parametrize(
    ("ways", "opening", "opening_out", "fix"),
    [
        # The target's rules are clean, the source's way out is not.
        ({(2, 1)}, {}, {2: "open out"}, "# on h2:\nopen out"),
        ({(2, 1)}, {1: "open in"}, {}, "# on h1:\nopen in"),
        ({(2, 1)}, {1: "open in"}, {2: "open out"}, "# on h1:\nopen in\n# or, if that does not help, on h2:\nopen out"),
        ({(2, 1)}, {}, {}, f"# on h1:\n{_CLEAN_IN}\n# or, if that does not help, on h2:\n{_CLEAN_OUT}"),
        # What one host lets neither in nor out is that host's, both ways.
        ({(2, 1), (1, 2)}, {2: "open in"}, {2: "open out"}, "# on h2:\nopen in\n# or, if that does not help, on h2:\nopen out"),
    ],
)  # fmt: skip
def test_of_a_link_the_side_is_opened_whose_rules_are_in_the_way(
    ways: set[tuple[int, int]], opening: dict[int, str], opening_out: dict[int, str], fix: str
) -> None:
    """Both ends of a link are asked for their rules, and who has none in the way is not told to open anything."""
    found = make_set(3, outcome=lambda way: "timeout" if way in ways else "ok")
    cards = tuple(
        replace(one, opening=opening.get(n, _CLEAN_IN), opening_out=opening_out.get(n, _CLEAN_OUT))
        for n, one in enumerate(found.hosts)
    )
    (told,) = bad(replace(found, hosts=cards))
    assert told.fix == fix
    assert told.hosts == (("h2", "h1") if len(ways) == 1 else ("h1", "h2"))


def test_both_commands_pass_through_json() -> None:
    """What a host tells of itself comes back from JSON as it was."""
    found = make_set(2)
    cards = tuple(replace(one, opening="in", opening_out="out", private=("172.17.0.1",)) for one in found.hosts)
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


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("127.0.0.1 localhost host2\n", "127.0.0.1 localhost\n10.0.0.9 host2\n"),
        ("10.0.0.4\thost2 host2.cluster h2\n", "10.0.0.4 host2.cluster h2\n10.0.0.9 host2\n"),
        ("10.0.0.4 host2\n10.0.0.5 host3\n", "10.0.0.5 host3\n10.0.0.9 host2\n"),
        ("10.0.0.4 Host2 HOST2 host2  # host2 here\n", "10.0.0.9 host2\n"),
        (
            "  10.0.0.3 host2\n  10.0.0.4 host20 xhost2 host2-a\n",
            "10.0.0.4 host20 xhost2 host2-a\n10.0.0.9 host2\n",
        ),
        ("# 10.0.0.4 host2\n10.0.0.4 a#host2\n", "# 10.0.0.4 host2\n10.0.0.4 a#host2\n10.0.0.9 host2\n"),
        ("::1 localhost\n10.0.0.4 a host2", "::1 localhost\n10.0.0.4 a\n10.0.0.9 host2\n"),
    ],
)
def test_the_fix_of_a_hosts_file_takes_out_one_name_only(tmp_path: Path, before: str, after: str) -> None:
    """The very commands, run on a file: the other names of the line stay, and so does the file itself, which may be a mount."""
    found = replace(
        make_set(3),
        names=(NameLookup(source="h0", name="host2", target="h2", got=("10.0.0.77",), is_written=True),),
    )
    cards = (*found.hosts[:2], replace(found.hosts[2], address="10.0.0.9", own_name="host2"))
    (told,) = bad(replace(found, hosts=cards))
    path = tmp_path / "hosts"
    path.write_text(before)
    inode = path.stat().st_ino
    script = told.fix.replace("/etc/hosts", str(path)).replace("sudo ", "")
    subprocess.run(["sh", "-ec", script], check=True, capture_output=True, timeout=20)
    words = [line.split() for line in path.read_text().splitlines() if line.strip()]
    assert words == [line.split() for line in after.splitlines()]
    assert path.stat().st_ino == inode
    assert (tmp_path / "hosts.before").read_text() == before


def test_a_name_with_dots_is_meant_as_written() -> None:
    """A dot in a name stands for itself."""
    assert "host2[.]cluster" in remove_name("host2.cluster")


def test_no_told_name_becomes_a_command() -> None:
    """A host that calls itself something with a quote in it gets no commands for that."""
    name = "x';reboot;'"
    found = replace(
        make_set(3),
        names=(NameLookup(source="h0", name=name, target="h2", got=("10.0.0.77",), is_written=True),),
    )
    (told,) = bad(found)
    assert all(line.startswith("#") for line in told.fix.splitlines())
