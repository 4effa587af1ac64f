"""What is told to people and programs: text that says the same once, and a record of all of it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rankwise.doctor.json_records import to_json
from rankwise.doctor.multi_host.cluster_report import (
    AllReduce,
    ClusterReport,
    HostReport,
    Link,
    Measure,
    from_json,
)
from rankwise.doctor.probe import Reading, ok, skipped
from rankwise.doctor.reporters import text
from rankwise.doctor.reporters.grouping import count_verdicts, group, judge, name_hosts
from rankwise.doctor.reporters.record import record
from rankwise.doctor.units import format_rate, format_seconds

BLOCKED = Reading(
    verdict="fail", what="nothing reaches <node2>'s ports", why="the first collective hangs", fix="# on node2:\nsudo ufw allow from 10.0.0.0/24",
    class_id="I8", probe="links", hosts=("node2",),
)  # fmt: skip


def make(num: int = 4, **facts: Any) -> ClusterReport:
    """Make a set of hosts, node2 blocked, node1 slow."""
    names = [f"node{number}" for number in range(num)]
    pairs = [(a, b) for a in names for b in names if a != b]
    hosts = tuple(
        HostReport(name=name, address=f"10.0.0.{number + 1}", clock_ahead_s=0.001 * number, readings=(
            ok("/dev/shm has 64 GiB").of("shared-memory", name), skipped("no NVIDIA driver here", "no GPU").of("gpus-seen", name),
        ))
        for number, name in enumerate(names)
    )  # fmt: skip
    links = tuple(
        Link(source=a, target=b, plane="gloo", address="10.0.0.1", port=40001, outcome="timeout" if b == "node2" else "ok") for a, b in pairs
    )  # fmt: skip
    measures = tuple(
        Measure(source=a, target=b, latency_s=1e-4, bytes_per_s=1e8 if a == "node1" else 1e9, resent=0.02 if b == "node3" else 0.0) for a, b in pairs
    )  # fmt: skip
    return ClusterReport(
        **{
            "hosts": hosts,
            "links": links,
            "measures": measures,
            "readings": (BLOCKED,),
            "took_s": 3.21,
            **facts,
        }
    )


def test_what_all_hosts_say_is_told_once_and_the_worst_first() -> None:
    """Readings that are equal on several hosts become one line; what fails stands on top, with its fix as it is typed."""
    told = text.render(make(), verbose=True)
    lines = told.splitlines()
    assert lines[0] == "rankwise doctor: 4 hosts: node0, node1, node2 and node3"
    assert lines[1].split(maxsplit=2) == ["FAIL", "links", "node2: nothing reaches <node2>'s ports [I8]"]
    assert [line.strip() for line in lines[2:5]] == [
        "the first collective hangs",
        "do  # on node2:",
        "sudo ufw allow from 10.0.0.0/24",
    ]
    assert told.count("/dev/shm has 64 GiB") == 1
    assert "all 4 hosts: /dev/shm has 64 GiB" in told
    assert lines[-1] == "1 fail, 4 ok, 4 skipped, in 3.2 s; for details: rankwise rule links"


def test_of_several_hosts_only_what_is_not_well_is_told_and_the_links_are_a_matrix() -> None:
    """Without --verbose good readings are counted by host; the matrix has a row for each source."""
    told = text.render(
        make(all_reduce=AllReduce(backend="gloo", num_ranks=4, latency_s=3e-4, bytes_per_s=4e8, size_bytes=32 << 20))
    )
    assert "/dev/shm has 64 GiB" not in told
    assert re.search(r"^  node1 +10\.0\.0\.2 +clock \+0\.001 s +ok +1 ok, 1 skipped$", told, re.MULTILINE)
    assert re.search(r"^  node1 +800 Mbit/s, 100 us +\. +800 Mbit/s, 100 us", told, re.MULTILINE)
    assert "all-reduce by torch (gloo, 4 ranks): 300 us for 4 bytes, 3.2 Gbit/s for 32 MiB" in told


def test_one_host_is_told_whole_unless_quiet() -> None:
    """Every reading is a line; with --quiet only those that are not well, and the counts."""
    one = make(1, links=(), measures=(), readings=())
    told = text.render(one).splitlines()
    assert told[0] == "rankwise doctor: node0"
    assert [line.split()[0] for line in told[1:3]] == ["ok", "skip"]
    assert "(no GPU)" in told[2]
    assert text.render(one, quiet=True).splitlines() == ["rankwise doctor: node0", "1 ok, 1 skipped"]


def test_what_was_skipped_for_one_reason_is_one_line() -> None:
    """Five probes without a GPU are one line that names them."""
    readings = tuple(skipped("no NVIDIA driver here", "no GPU").of(f"gpu{number}", "node0") for number in range(5))
    told = text.render(ClusterReport(hosts=(HostReport(name="node0", readings=readings),)))
    assert told.splitlines()[1:] == [
        "  skip  5 probes  no NVIDIA driver here: gpu0, gpu1, gpu2, gpu3, gpu4 (no GPU)",
        "5 skipped",
    ]


def test_a_host_is_not_named_twice() -> None:
    """Where the sentence begins with the host's name, that is enough."""
    lost = Reading(
        verdict="fail", what="node1 was lost: it is frozen", fix="# look", probe="rendezvous", hosts=("node1",)
    )
    told = text.render(make(3, readings=(lost,))).splitlines()[1]
    assert told.split(maxsplit=2)[2] == "node1 was lost: it is frozen"


def test_numbers_that_differ_do_not_fill_the_screen() -> None:
    """Of 64 hosts that say the same with other numbers the first is quoted, the others are named; few are told one by one."""

    def tell(num: int) -> list[str]:
        readings = [
            Reading(verdict="warn", what=f"a process {number} holds {number * 7} MiB", fix=f"kill {number}").of(
                "leftovers", f"node{number}"
            )
            for number in range(num)
        ]
        hosts = tuple(HostReport(name=f"node{number}", readings=(readings[number],)) for number in range(num))
        return text.render(ClusterReport(hosts=hosts)).splitlines()

    many = tell(64)
    assert sum("holds" in line for line in many) == 1
    assert any(
        "node0 (and alike on node1, node2, node3, node4, node5 and 58 more): a process 0 holds 0 MiB" in line
        for line in many
    )
    assert sum("holds" in line for line in tell(3)) == 3


def test_many_hosts_are_listed_only_if_not_well() -> None:
    """Of 40 hosts the one that is blocked and the one that was lost are listed, the others are counted; of a wide matrix only the slowest links are shown."""
    together = make(40)
    lost = (*together.hosts[:39], HostReport(name="node39", lost="it has not answered for 5 s"))
    told = text.render(make(40, hosts=lost))
    assert "38 of 40 hosts are ok" in told
    assert re.search(r"^  node2 +10\.0\.0\.3", told, re.MULTILINE)
    assert not re.search(r"^  node3 ", told, re.MULTILINE)
    assert "1560 links measured; --format json has all of them" in told
    assert "--format json" not in text.render(make(4))
    assert "6 links measured; --format json" in text.render(make(3), width=62)


def test_missing_and_lost_hosts_are_named() -> None:
    """Who did not arrive, and who was lost on the way, stands in the list of hosts."""
    hosts = (*make(2).hosts, HostReport(name="node7", lost="it has not answered for 5 s"))
    together = make(2, hosts=hosts, missing=("node8",))
    told = text.render(together)
    assert "1 of 4 missing" in told
    assert re.search(r"^  node7 +lost +it has not answered for 5 s$", told, re.MULTILINE)
    assert re.search(r"^  node8 +did not arrive$", told, re.MULTILINE)


def test_a_hosts_counts_fit_its_state() -> None:
    """What was found between hosts is counted with the host that it is about, and with no other."""
    slow = Reading(verdict="warn", what="slow", fix="# look", probe="speed", hosts=tuple(f"node{n}" for n in range(4)))
    together = make(readings=(BLOCKED, slow))
    told = text.render(together)
    assert re.search(r"FAIL  1 ok, 1 skipped, 1 fail with others$", told, re.MULTILINE)
    assert len(re.findall(r"ok    1 ok, 1 skipped$", told, re.MULTILINE)) == 3


def test_a_record_is_flat_and_keeps_what_hosts_tell_each_other() -> None:
    """A finding of several hosts is one entry that names them, other numbers are another one; who did not arrive fails; the rest is the wire's form."""
    low = [
        Reading(verdict="warn", what=what, fix="# free some").of("memory", f"node{number}")
        for number, what in enumerate(["1 GiB left", "1 GiB left", "2 GiB left", "3 GiB left", "4 GiB left"])
    ]
    together = make(5, hosts=tuple(HostReport(name=f"node{n}", readings=(low[n],)) for n in range(5)))
    told = record(together, version="1.2", made="2030-01-02T03:04:05Z", exit_code=1)
    findings = [(one["verdict"], one["hosts"], one["what"]) for one in told["findings"]]  # type: ignore[union-attr, index, call-overload]
    assert findings == [
        ("fail", ["node2"], BLOCKED.what),
        ("warn", ["node0", "node1"], "1 GiB left"),
        ("warn", ["node2"], "2 GiB left"),
        ("warn", ["node3"], "3 GiB left"),
        ("warn", ["node4"], "4 GiB left"),
    ]
    assert (told["verdict"], told["counts"]) == ("fail", {"fail": 1, "warn": 5, "skipped": 0, "ok": 0})
    assert {key: told[key] for key in to_json(together)} == to_json(together)
    assert from_json(told) == together


def test_a_verdict_is_the_worst_of_what_was_seen() -> None:
    """A probe that was skipped, as without a GPU, makes nothing worse; a set of which one did not arrive is not well."""
    assert judge(make(1, links=(), measures=(), readings=())) == "ok"
    assert judge(make(2, readings=(), missing=("node7",))) == "fail"
    only = HostReport(name="a", readings=(skipped("no driver", "no GPU").of("gpus-seen", "a"),))
    assert judge(ClusterReport(hosts=(only,))) == "skipped"


def test_a_terminal_gets_colours_and_whole_commands() -> None:
    """Sentences are wrapped to its width, and a command never is, so that it can be copied."""
    long = (
        "sudo nft insert rule inet filter input ip saddr 10.0.0.0/24 tcp dport 1024-65535 accept comment rankwise-ranks"
    )
    bad = Reading(verdict="warn", what="so " * 60, fix=long, probe="firewall", hosts=("node0",))
    told = text.render(make(1, links=(), measures=(), readings=(bad,)), color=True, width=80)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", told)
    assert f"do  {long}" in plain
    assert all(len(line) <= 80 for line in plain.splitlines() if long not in line)
    assert "\x1b[1;33m" in told


def test_hosts_are_named_or_counted() -> None:
    """Few hosts are named, all of them are called all, of many some are named and the others are counted."""
    names = [f"n{number}" for number in range(9)]
    assert name_hosts(names[:1], names) == "n0"
    assert name_hosts(names[:3], names) == "n0, n1 and n2"
    assert name_hosts(names, names) == "all 9 hosts"
    assert name_hosts(names[:2], names[:2]) == "both hosts"
    assert name_hosts(names[:8], names) == "n0, n1, n2, n3, n4 and 3 more"


def test_readings_with_other_values_stay_apart() -> None:
    """Two hosts that say different things are two lines."""
    lines = group([ok("2 GiB").of("memory", "a"), ok("3 GiB").of("memory", "b"), ok("2 GiB").of("memory", "c")])
    assert [(line.reading.what, line.hosts) for line in lines] == [("2 GiB", ("a", "c")), ("3 GiB", ("b",))]
    assert count_verdicts(line.reading for line in lines) == "2 ok"


@pytest.mark.parametrize(
    ("rate", "shown"),
    [
        (0.0, "0 bit/s"),
        (125.0, "1 kbit/s"),
        (1.25e6, "10 Mbit/s"),
        (1.17e9, "9.36 Gbit/s"),
        (50e9, "400 Gbit/s"),
    ],
)
def test_rates_are_told_in_bits(rate: float, shown: str) -> None:
    """Bytes a second are told as networks are sold."""
    assert format_rate(rate) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(85e-6, "85 us"), (0.0012, "1.2 ms"), (0.25, "250 ms"), (3.42, "3.42 s")]
)
def test_times_are_told_with_three_digits(seconds: float, shown: str) -> None:
    """Short times get the unit that reads best."""
    assert format_seconds(seconds) == shown
