"""The judge of several hosts, on made-up facts of 2 to 64 hosts: whose fault it is, and no alarm where there is none."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rankwise.doctor.multi_host.blaming import find_blames
from rankwise.doctor.multi_host.cluster_report import (
    AllReduce,
    ClusterReport,
    HostReport,
    Link,
    Measure,
    NameLookup,
    Outcome,
)
from rankwise.doctor.multi_host.judging import judge
from rankwise.doctor.multi_host.judging_speed import find_suspects
from rankwise.doctor.multi_host.plan import Plan
from rankwise.doctor.multi_host.wire import INVALID_ANSWER

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.doctor.probe import Reading

PLAN = Plan(endpoint_host="h0", endpoint_port=29500)
SIZES = [2, 3, 4, 5, 8, 16, 64]
Way = tuple[int, int]


def ways(count: int) -> list[Way]:
    return [(a, b) for a in range(count) for b in range(count) if a != b]


def make_set(
    count: int,
    *,
    outcome: Callable[[Way], Outcome] = lambda _: "ok",
    speed: Callable[[Way], float] = lambda _: 1e9,
    latency_s: Callable[[Way], float] = lambda _: 1e-4,
    resent: Callable[[Way], float] = lambda _: 0.0,
    tries: int = 3,
) -> ClusterReport:
    """Make facts: all is well but for what is given."""
    hosts = tuple(
        HostReport(
            name=f"h{n}",
            own_name=f"h{n}",
            address=f"10.0.0.{n + 1}",
            gloo_address=f"10.0.0.{n + 1}",
            clock_ahead_s=0.0,
            interfaces=(("eth0", f"10.0.0.{n + 1}"),),
        )
        for n in range(count)
    )
    links = tuple(
        Link(
            source=f"h{a}",
            target=f"h{b}",
            plane="gloo",
            address=hosts[b].address,
            port=40000,
            outcome=outcome((a, b)),
        )
        for a, b in ways(count)
    )
    measures = tuple(
        Measure(
            source=f"h{a}", target=f"h{b}", latency_s=latency_s((a, b)), bytes_per_s=speed((a, b)), resent=resent((a, b)), tries=tries
        )
        for a, b in ways(count)
    )  # fmt: skip
    return ClusterReport(hosts=hosts, links=links, measures=measures)


def bad(found: ClusterReport, plan: Plan = PLAN) -> list[Reading]:
    return [one for one in judge(found, plan) if one.verdict in {"warn", "fail"}]


@pytest.mark.parametrize("count", SIZES)
def test_a_healthy_set_raises_no_alarm(count: int) -> None:
    """Speeds that vary three times, latencies fifty times, and some packets sent again, as on a busy host: nothing is said."""
    for seed in range(20):
        chance = random.Random(seed)
        found = make_set(
            count,
            speed=lambda _, chance=chance: 0.4e9 * 3 ** chance.random(),
            latency_s=lambda _, chance=chance: 1e-4 * 50 ** chance.random(),
            resent=lambda _, chance=chance: 0.0009 * chance.random(),
        )
        assert bad(found) == []
        assert find_suspects(found) == []


@pytest.mark.parametrize("count", SIZES)
def test_what_was_measured_once_blames_nobody(count: int) -> None:
    """Any slowness and loss of a first measurement makes suspects only: they are measured again, some of each host."""
    found = make_set(
        count,
        speed=lambda way: 1e6 if way[0] == 1 else 1e9,
        resent=lambda way: 0.05 if way[1] == 0 else 0.0,
        tries=1,
    )
    assert bad(found) == []
    suspects = find_suspects(found)
    assert 0 < len(suspects) <= 7
    assert any(one.is_lossy for one in suspects)


@pytest.mark.parametrize("count", [3, 4, 5, 8, 16, 64])
@pytest.mark.parametrize("outcome", ["timeout", "refused", "unreachable", "reset"])
def test_a_host_that_lets_nobody_in_is_named(count: int, outcome: Outcome) -> None:
    """I8: all ways into one host fail: one reading, with that host, and a fix that is typed there."""
    victim = count - 1
    found = make_set(count, outcome=lambda way: outcome if way[1] == victim else "ok")
    (told,) = bad(found)
    assert (told.class_id, told.hosts, told.verdict) == ("I8", (f"h{victim}",), "fail")
    assert f"{count - 1} of {count - 1} hosts to h{victim}" in told.what
    assert told.fix.startswith(f"# on h{victim}:\n# let TCP in from 10.0.0.0/24, at all ports")
    assert ("dropped" in told.what) == (outcome == "timeout")


@pytest.mark.parametrize("count", [3, 4, 8, 64])
def test_a_host_that_lets_nothing_out_is_named(count: int) -> None:
    """All ways out of one host fail, and others reach the same targets: it is that host, and its way out is opened."""
    found = make_set(count, outcome=lambda way: "timeout" if way[0] == 1 else "ok")
    (told,) = bad(found)
    assert told.hosts == ("h1",)
    assert "from h1 to" in told.what
    assert "# let TCP out to 10.0.0.0/24" in told.fix


@pytest.mark.parametrize("count", [3, 4, 8, 64])
def test_a_host_that_is_cut_off_both_ways_is_one_reading(count: int) -> None:
    """Nothing in and nothing out: one reading, with the host."""
    found = make_set(count, outcome=lambda way: "timeout" if 2 in way else "ok")
    (told,) = bad(found)
    assert told.hosts == ("h2",)
    assert "from and to h2" in told.what


@pytest.mark.parametrize("count", [3, 4, 8, 64])
def test_a_single_link_blames_no_host(count: int) -> None:
    """One way between two hosts that reach all others: both are named, as a link."""
    (told,) = bad(make_set(count, outcome=lambda way: "timeout" if way == (0, 1) else "ok"))
    assert told.hosts == ("h0", "h1")
    assert "from h0 to h1" in told.what
    assert told.fix.startswith("# on h1:")


@pytest.mark.parametrize("count", [3, 8, 64])
def test_if_everything_is_shut_no_host_is_singled_out(count: int) -> None:
    """Every way fails: one reading for all, not one for each link."""
    (told,) = bad(make_set(count, outcome=lambda _: "timeout"))
    assert told.hosts == tuple(sorted(f"h{n}" for n in range(count)))


def test_with_two_hosts_either_side_may_be_it() -> None:
    """Two hosts, one way shut: nobody can tell whose firewall it is, and that is said."""
    (told,) = bad(make_set(2, outcome=lambda way: "timeout" if way == (0, 1) else "ok"))
    assert told.hosts == ("h0", "h1")
    assert "With two hosts either side may be the cause: h1 lets nothing in, or h0 nothing out" in told.why


def test_a_plane_of_its_own_is_told_as_that() -> None:
    """I7: Gloo's address works and NCCL's does not: the interface that NCCL should take is in the fix."""
    found = make_set(3)
    nccl = tuple(
        replace(one, plane="nccl", address="172.17.0.1", outcome="refused" if one.target == "h2" else "ok")
        for one in found.links
    )
    (told,) = bad(replace(found, links=found.links + nccl))
    assert (told.class_id, told.hosts) == ("I7", ("h2",))
    assert "export NCCL_SOCKET_IFNAME=eth0" in told.fix


def test_another_host_at_an_address_is_told() -> None:
    """Two hosts have docker0's address: who connects to the other finds itself."""
    found = make_set(2)
    nccl = replace(found.links[0], plane="nccl", address="172.17.0.1", outcome="other host", detail="h0")
    (told,) = bad(replace(found, links=(*found.links, nccl)))
    assert told.class_id == "I7"
    assert "h0 finds h0" in told.what


def test_links_of_a_host_that_died_accuse_nobody() -> None:
    """A host that was lost fails on all its ways: it is told as lost, not as a firewall."""
    found = make_set(4, outcome=lambda way: "timeout" if 3 in way else "ok")
    hosts = (*found.hosts[:3], replace(found.hosts[3], lost="its connection ended"))
    (told,) = bad(replace(found, hosts=hosts))
    assert "h3 was lost" in told.what


@pytest.mark.parametrize("count", [3, 4, 5, 8, 16, 64])
@pytest.mark.parametrize("side", ["in", "out", "both"])
def test_a_slow_host_is_named_and_no_other(count: int, side: str) -> None:
    """A cable at 100 Mbit/s, in one way or in both: that host, even with three hosts, where it has a part in most links."""

    def is_slow(way: Way) -> bool:
        return (side != "in" and way[0] == 1) or (side != "out" and way[1] == 1)

    (told,) = bad(make_set(count, speed=lambda way: 12e6 if is_slow(way) else 1e9))
    assert (told.hosts, told.verdict) == (("h1",), "warn")
    assert {"in": "receives at", "out": "sends at", "both": "sends and receives at"}[side] in told.what


@pytest.mark.parametrize("count", [3, 4, 8, 64])
def test_a_slow_link_is_told_as_a_link(count: int) -> None:
    """Both ways between two hosts are slow: the link is."""
    (told,) = bad(make_set(count, speed=lambda way: 5e6 if set(way) == {0, 2} else 1e9))
    assert told.hosts == ("h0", "h2")
    assert "between h0 and h2" in told.what


@pytest.mark.parametrize(("share", "verdict"), [(0.004, "warn"), (0.03, "fail")])
@pytest.mark.parametrize("count", [3, 8, 64])
def test_a_host_that_loses_packets_is_named(count: int, share: float, verdict: str) -> None:
    """What is sent to one host gets lost: it is named, and how bad it is depends on the share."""
    (told,) = bad(make_set(count, resent=lambda way: share if way[1] == 1 else 0.0))
    assert (told.hosts, told.verdict) == (("h1",), verdict)
    assert f"{share:.1%}" in told.what


def test_what_loss_makes_slow_is_told_once() -> None:
    """Ways into a host lose packets and are slow, and so is a way back: it is the loss, not three things."""
    found = make_set(
        3,
        resent=lambda way: 0.05 if way[1] == 1 else 0.0,
        speed=lambda way: 1e6 if way in {(0, 1), (1, 0)} else 1e9,
        latency_s=lambda way: 0.2 if way == (2, 1) else 1e-4,
    )
    (told,) = bad(found)
    assert told.hosts == ("h1",)
    assert "packets to h1 get lost" in told.what


def test_far_hosts_are_told() -> None:
    """A host behind 80 ms among others at 0.1 ms."""
    (told,) = bad(make_set(4, latency_s=lambda way: 0.08 if 3 in way else 1e-4))
    assert told.hosts == ("h3",)
    assert "80 ms" in told.what


def test_slow_ways_everywhere_are_told_once() -> None:
    """Ten megabytes in a second on all ways: one line, no host."""
    (told,) = bad(make_set(4, speed=lambda _: 5e6))
    assert "40 Mbit/s" in told.what


@pytest.mark.parametrize("rate", [1e9, 2e7])
def test_a_stream_that_stalls_at_one_host_is_told_with_its_interface(rate: float) -> None:
    """Small messages pass and large ones do not: the host, and an MTU to try; how little passed there makes no other link slow, and is no loss."""
    stalled = lambda way: way[1] == 2  # noqa: E731
    (told,) = bad(
        make_set(
            3,
            outcome=lambda way: "stalled" if stalled(way) else "ok",
            speed=lambda way: 0.0 if stalled(way) else rate,
            resent=lambda way: 0.4 if stalled(way) else 0.0,
        )
    )
    assert told.hosts == ("h2",)
    assert "sudo ip link set dev eth0 mtu 1400" in told.fix


@pytest.mark.parametrize(("aheads", "hosts", "verdict"), [
    ((0.0, 0.3, -0.4), None, ""), ((0.0, 3.0, 0.0), ("h1",), "warn"), ((0.0, 60.0, 60.1), ("h0",), "fail"), ((0.0, -20.0), ("h0", "h1"), "fail"),
])  # fmt: skip
def test_the_clock_that_most_do_not_share_is_wrong(
    aheads: tuple[float, ...], hosts: tuple[str, ...] | None, verdict: str
) -> None:
    """Clocks are held against the middle one; with two nobody knows which is right."""
    found = make_set(len(aheads))
    cards = tuple(replace(card, clock_ahead_s=ahead) for card, ahead in zip(found.hosts, aheads, strict=True))
    told = bad(replace(found, hosts=cards))
    assert [(one.hosts, one.verdict) for one in told] == ([] if hosts is None else [(hosts, verdict)])


def test_an_uncertain_clock_is_not_blamed() -> None:
    """Ahead by 2 s, give or take 3 s: nothing is known."""
    found = make_set(2)
    assert (
        bad(replace(found, hosts=(found.hosts[0], replace(found.hosts[1], clock_ahead_s=2.0, clock_error_s=3.0)))) == []
    )


@pytest.mark.parametrize(("got", "name", "expected"), [
    (("10.0.0.3",), "h1", "that is h2's address"), (("10.9.9.9",), "h1", "no host of these has that address"),
    (("127.0.1.1",), "h1", "that is h0 itself"), (("::1",), "h1", "that is h0 itself"), ((), "h1", ""), (("10.0.0.2",), "h1", ""),
])  # fmt: skip
def test_names_at_wrong_addresses_are_told_and_missing_ones_are_not(
    got: tuple[str, ...], name: str, expected: str
) -> None:
    """Another host's address, nobody's, or its own loopback is wrong; to know no address is not."""
    found = replace(make_set(3), names=(NameLookup(source="h0", name=name, target="h1", got=got, is_written=True),))
    told = bad(found)
    assert [expected in one.what for one in told] == ([True] if expected else [])
    assert all(one.hosts == ("h0",) and one.fix.startswith("# on h0:\n# in /etc/hosts, ") for one in told)


def test_numbers_that_do_not_fit_are_told() -> None:
    """I10, I11, I12: doubled, too large, and different counts of nodes."""
    found = make_set(3)
    cards = (
        replace(found.hosts[0], num_hosts=3, node_rank=0),
        replace(found.hosts[1], num_hosts=3, node_rank=7),
        replace(found.hosts[2], num_hosts=4, node_rank=2),
    )
    told = bad(replace(found, hosts=cards, doubled=(("h0", "hx", 0),)), replace(PLAN, num_hosts=3))
    assert [(one.class_id, one.hosts) for one in told] == [
        ("I10", ("h0", "hx")),
        ("I12", ("h2",)),
        ("I11", ("h1",)),
    ]


def test_localhost_as_the_endpoint_is_why_nobody_came() -> None:
    """I4: each host waits at its own loopback; the fix has the first host's real address."""
    found = replace(make_set(1), missing=("1 of 2 hosts",))
    (told,) = bad(found, replace(PLAN, endpoint_host="localhost", num_hosts=2))
    assert told.class_id == "I4"
    assert "export MASTER_ADDR=10.0.0.1" in told.fix


def test_an_all_reduce_that_failed_is_a_failure_and_one_that_was_not_tried_is_not() -> None:
    """With a backend it was tried; the host that the others waited for is named."""
    found = make_set(2)
    assert [one.verdict for one in bad(replace(found, all_reduce=AllReduce(backend="gloo", why="h1: boom")))] == [
        "fail"
    ]
    assert bad(replace(found, all_reduce=AllReduce(why="no torch"))) == []
    late = AllReduce(
        backend="gloo",
        num_ranks=2,
        latency_s=0.001,
        bytes_per_s=1e9,
        size_bytes=1 << 25,
        waited_s=(("h0", 0.0), ("h1", 2.0)),
    )
    assert [one.hosts for one in bad(replace(found, all_reduce=late))] == [("h1",)]


def test_blames_explain_all_that_is_bad() -> None:
    """Whatever is bad stands in exactly one blame, for any pattern."""
    for seed in range(200):
        chance = random.Random(seed)
        count = chance.randint(2, 9)
        tried = [(f"h{a}", f"h{b}") for a, b in ways(count)]
        wrong = {way for way in tried if chance.random() < chance.choice([0.1, 0.5, 0.9])}
        explained = [way for blame in find_blames(tried, wrong) for way in blame.bad]
        assert sorted(explained) == sorted(wrong)


def test_a_host_that_speaks_otherwise_is_asked_for_its_version() -> None:
    """Its answer made no sense: nobody died there, and the kernel's log tells nothing of it."""
    found = make_set(3)
    lost = f"{INVALID_ANSWER} (99 is not another host of 3): it is not a doctor of this version"
    (told,) = bad(replace(found, hosts=(*found.hosts[:2], replace(found.hosts[2], lost=lost))))
    assert "dies" not in told.why
    assert told.fix.splitlines()[-1] == "rankwise --version"
    assert "same version" in told.fix
    assert told.hosts == ("h2",)
