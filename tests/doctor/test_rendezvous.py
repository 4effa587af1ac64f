"""Hosts that meet, played by one process at addresses of 127.0.0.0/8; and the parts of a rendezvous one by one."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

from rankwise.doctor.host import Host
from rankwise.doctor.json_records import to_json
from rankwise.doctor.multi_host.cluster_report import (
    AllReduce,
    ClusterReport,
    HostReport,
    Link,
    Listening,
    Measure,
    NameLookup,
    from_json,
)
from rankwise.doctor.multi_host.connection import Connection
from rankwise.doctor.multi_host.examine_hosts import examine_hosts
from rankwise.doctor.multi_host.peer import short_name
from rankwise.doctor.multi_host.phases import plan_rounds
from rankwise.doctor.multi_host.plan import JoinError, Plan
from rankwise.doctor.multi_host.wire import GoneError, StrangerError
from rankwise.doctor.probe import Probe, Reading, ok
from support import free_port

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.linux  # elsewhere 127.0.0.2 is nobody's


def play(plans: Sequence[Plan], probes: Sequence[Probe] = (), names: Sequence[str] = ()) -> list[Any]:
    """Let hosts meet in threads, and return what each got: a result or its error."""
    ends: list[Any] = [None] * len(plans)

    def take_part(index: int) -> None:
        host = Host(name=names[index] if names else f"host{index}", env={})
        try:
            ends[index] = examine_hosts(host, probes, plans[index], lambda _: None)
        except JoinError as error:
            ends[index] = error

    threads = [threading.Thread(target=take_part, args=(index,)) for index in range(len(plans))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends


def make_plans(count: int, **changes: Any) -> list[Plan]:
    port = free_port()
    return [
        Plan(
            **{
                "endpoint_host": "127.0.0.1", "endpoint_port": port, "num_hosts": count, "node_rank": index, "is_coordinator": index == 0,
                "listen_address": f"127.0.0.{index + 1}", "measure": False, "arrival_timeout_s": 20.0, **changes,
            }
        )
        for index in range(count)
    ]  # fmt: skip


def test_all_hosts_get_the_same_result() -> None:
    """Six hosts: all pairs are tried, each host's probes are read, what differs between hosts is compared once."""

    def compare(facts: Any) -> list[Reading]:
        return [Reading(verdict="warn", what=f"{len(facts)} hosts differ")]

    probe = Probe(
        id="name", title="its name", topic="limits", speed="instant", compare=compare, look=lambda host: [ok("seen", name=host.name)]
    )  # fmt: skip
    ends = play(make_plans(6), [probe])
    assert all(isinstance(one, ClusterReport) for one in ends), ends
    assert all(one == ends[0] for one in ends)
    assert {(one.source, one.target) for one in ends[0].links} == set(
        itertools.permutations([f"host{n}" for n in range(6)], 2)
    )
    assert [[told.facts["name"] for told in one.readings] for one in ends[0].hosts] == [[f"host{n}"] for n in range(6)]
    assert [one.what for one in ends[0].readings if one.verdict != "ok"] == ["6 hosts differ"]


def test_of_many_hosts_the_holder_has_all_and_the_others_what_is_wrong() -> None:
    """34 hosts: all 1122 links are with the holder; another host gets its own links, and of the others' readings the bad ones."""

    def look(host: Host) -> list[Reading]:
        return [ok("seen"), *([Reading(verdict="warn", what="odd")] if host.name == "host7" else [])]

    probe = Probe(id="name", title="its name", topic="limits", speed="instant", look=look)
    ends = play(make_plans(34), [probe])
    assert all(isinstance(one, ClusterReport) for one in ends), ends
    assert len(ends[0].links) == 34 * 33
    assert {one.source for one in ends[3].links} == {"host3"}
    assert [len(one.readings) for one in ends[3].hosts] == [{3: 1, 7: 1}.get(index, 0) for index in range(34)]
    assert ends[3].readings == ends[0].readings


def test_every_pair_is_measured() -> None:
    """Three hosts: six ways, each with a latency and a speed."""
    ends = play(make_plans(3, measure=True, seconds_per_link=0.05))
    assert len(ends[0].measures) == 6
    assert all(one.latency_s > 0 and one.bytes_per_s > 0 for one in ends[0].measures)


def test_hosts_of_one_name_are_told_apart() -> None:
    """Two containers with the same host name: each has its address behind it."""
    ends = play(make_plans(3), names=["head", "node", "node"])
    assert [one.name for one in ends[0].hosts] == ["head", "node (127.0.0.2)", "node (127.0.0.3)"]


def test_another_meeting_at_the_same_port_is_not_mixed_in() -> None:
    """A host with another token is sent away, and is told why; the others go on without it."""
    plans = make_plans(3, arrival_timeout_s=2.0)
    own = [
        plans[0],
        plans[1],
        Plan(
            endpoint_host="127.0.0.1",
            endpoint_port=plans[0].endpoint_port,
            is_coordinator=False,
            token="other",
            listen_address="127.0.0.3",
        ),
    ]
    ends = play(own)
    assert isinstance(ends[2], JoinError)
    assert "another doctor has its rendezvous at this port" in ends[2].message
    assert ends[0].missing == ("node rank 2",)


def test_hosts_that_disagree_on_their_number_are_told() -> None:
    """I12: one waits for two hosts, the others for three: all three are waited for, and the odd one is named."""
    plans = make_plans(3)
    odd = Plan(
        endpoint_host="127.0.0.1", endpoint_port=plans[0].endpoint_port, num_hosts=2, node_rank=1, is_coordinator=False,
        listen_address="127.0.0.2", measure=False,
    )  # fmt: skip
    ends = play([plans[0], odd, plans[2]])
    assert [(one.class_id, one.hosts) for one in ends[0].readings if one.verdict == "fail"] == [("I12", ("host1",))]


def test_a_port_that_is_taken_is_told_with_its_holder() -> None:
    """I9: the endpoint's port is another program's: the error names that."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        (end,) = play(make_plans(1, endpoint_port=taken.getsockname()[1]))
    assert end.class_id == "I9"
    assert "is taken by pid " in end.message


def test_strangers_do_not_disturb_a_rendezvous() -> None:
    """Port scanners, browsers and half lines at the endpoint: the rendezvous goes on."""
    plans = make_plans(2)
    ends: list[Any] = []
    thread = threading.Thread(target=lambda: ends.extend(play(plans[:1])))
    thread.start()
    words = [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00" * 100,
        b"[]\n",
        b'{"rankwise-doctor": 1',
        b"{" * 100_000,
        b'{"rankwise-doctor": 99}\n',
        b"",
    ]
    strangers = []
    for word in words:
        while True:
            try:
                strangers.append(socket.create_connection(("127.0.0.1", plans[0].endpoint_port), timeout=5))
                break
            except ConnectionRefusedError:
                continue
        strangers[-1].sendall(word)
    other = play(plans[1:], names=["host1"])
    thread.join()
    for sock in strangers:
        sock.close()
    assert ends == other
    assert len(ends[0].hosts) == 2


def test_a_line_is_bounded_and_must_be_an_object() -> None:
    """What is no JSON object, or has no end, is a stranger's; what was sent before the end of a connection is still read."""

    async def receive(words: bytes, count: int = 1) -> list[Any]:
        ours, theirs = socket.socketpair()
        with theirs:
            connection = Connection(*await asyncio.open_connection(sock=ours))
            theirs.sendall(words)
            theirs.shutdown(socket.SHUT_WR)
            try:
                return [await connection.receive(5) for _ in range(count)]
            finally:
                await connection.wait_closed(1)

    for words in (b"SSH-2.0\r\n", b"[1]\n", b"[" * 50_000 + b"\n", b"x" * 70_000):
        with pytest.raises(StrangerError):
            asyncio.run(receive(words))
    assert asyncio.run(receive(b'{"a": 1}\n{"b": 2}\n', 2)) == [{"a": 1}, {"b": 2}]
    with pytest.raises(GoneError):
        asyncio.run(receive(b'{"a": 1}\n{"b": 2}\n', 3))


@pytest.mark.parametrize("count", range(2, 34))
def test_in_a_round_each_host_has_one_partner(count: int) -> None:
    """Each pair meets exactly once, nobody is in two pairs of a round, and there are as few rounds as can be."""
    rounds = plan_rounds(count)
    for pairs in rounds:
        seated = [host for pair in pairs for host in pair]
        assert len(seated) == len(set(seated))
    assert sorted(pair for pairs in rounds for pair in pairs) == list(itertools.combinations(range(count), 2))
    assert len(rounds) == count - 1 + count % 2


def test_of_many_hosts_each_has_enough_partners() -> None:
    """256 hosts in 30 rounds: each is measured with 30 others."""
    rounds = plan_rounds(256, most=30)
    assert len(rounds) == 30
    assert all(len(pairs) == 128 for pairs in rounds)


@pytest.mark.parametrize(
    ("name", "short"),
    [("me@node1.cluster", "node1"), ("10.0.0.7", "10.0.0.7"), ("node1", "node1"), ("fe80::1", "fe80::1")],
)
def test_names_are_compared_without_user_and_domain(name: str, short: str) -> None:
    """Hosts that were expected by an address stay addresses."""
    assert short_name(name) == short


def test_a_result_survives_its_journey() -> None:
    """Together as JSON and back is the same, with every field set."""
    found = ClusterReport(
        hosts=(
            HostReport(
                name="a", address="10.0.0.1", readings=(ok("fine", n=1).of("p", "a"),), clock_ahead_s=0.5, clock_error_s=0.1, lost="gone",
                node_rank=0, num_hosts=2, interfaces=(("eth0", "10.0.0.1"),), gloo_address="10.0.0.1", nccl_address="10.1.0.1",
                own_name="a", listening=(Listening(plane="gloo", address="10.0.0.1", ports=(1, 2)),),
            ),
        ),
        missing=("b",), links=(Link(source="a", target="b", plane="nccl", address="10.0.0.2", port=1, outcome="other host", detail="d"),),
        measures=(Measure(source="a", target="b", latency_s=0.1, bytes_per_s=1.5, resent=0.2, tries=3),),
        all_reduce=AllReduce(
            backend="gloo", num_ranks=2, latency_s=0.1, bytes_per_s=2.0, size_bytes=3, waited_s=(("a", 0.5),), why="w", class_id="I8"
        ),
        readings=(Reading(verdict="fail", what="w", why="y", fix="f", class_id="I8", probe="links", hosts=("a",)),), took_s=1.5,
        names=(NameLookup(source="a", name="b", target="b", got=("1.2.3.4",), is_written=True),), doubled=(("a", "b", 1),),
    )  # fmt: skip
    assert from_json(json.loads(json.dumps(to_json(found)))) == found
    with pytest.raises(ValueError, match="is no such list"):
        from_json({"hosts": 3})
