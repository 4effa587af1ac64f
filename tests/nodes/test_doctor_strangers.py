"""Hosts that are no friends of a rendezvous, or are gone: strangers that lie, programs that say nothing, ranks that are told twice."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from nodes.hosts import Host, make_hosts_file, open_hosts
from nodes.test_doctor_hosts import Rendezvous, bad, meet, only

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.linux, pytest.mark.slow]

#: Says that it is node 2, answers each order with what it is told to, and says when it was dropped.
_STRANGER = r"""
import json, socket, sys, time
answers = json.loads(sys.argv[1])
while True:
    try:
        sock = socket.create_connection(("10.77.0.1", 29500))
        break
    except OSError:
        time.sleep(0.05)
name = "evil\x1b[2J\x1b]0;t\x07\n# rm"
hello = {"rankwise-doctor": 4, "token": "", "name": name, "node_rank": 2, "num_hosts": 3, "own": "", "is_own": True}
sock.sendall(json.dumps(hello).encode() + b"\n")
sock.settimeout(0.3)
told = b""
while True:
    try:
        data = sock.recv(65536)
        if not data:
            break
        told += data
    except TimeoutError:
        pass
    except OSError:
        break
    try:
        sock.sendall(b'{"beat":1}\n')
        while b"\n" in told:
            line, _, told = told.partition(b"\n")
            order = json.loads(line).get("do")
            if order:
                sock.sendall(json.dumps({"at": time.time(), **answers.get(order, {}), "answer": order}).encode() + b"\n")
    except OSError:
        break
print("dropped")
"""
_OPENED = {
    "host": {
        "name": "evil",
        "own_name": "evil",
        "listening": [{"plane": "gloo", "address": "10.77.0.3", "ports": [45454]}],
    }
}
_READING = {
    "probe": "limits", "verdict": "fail", "what": "x\x1b[2Jx\ny", "why": "", "fix": "# on x\r\nreboot", "class": "", "hosts": ["host0"],
    "facts": {},
}  # fmt: skip


def start_stranger(host: Host, answers: dict[str, Any]) -> Any:
    return host.start([sys.executable, "-c", _STRANGER, json.dumps(answers)])


@pytest.mark.parametrize(
    "answers",
    [
        {
            "open": {
                "host": {"name": "evil", "listening": [{"plane": "gloo", "address": "10.77.0.3", "ports": ["x; rm"]}]}
            }
        },
        {
            "open": _OPENED,
            "connect": {
                "tried": {
                    "links": [
                        {
                            "source": "evil",
                            "target": "nobody",
                            "plane": "gloo",
                            "address": "",
                            "port": 1,
                            "outcome": "ok",
                        }
                    ]
                }
            },
        },
    ],
    ids=["a port that is none", "a link to nobody"],
)
def test_who_tells_nonsense_is_lost_and_nobody_else(tmp_path: Path, answers: dict[str, Any]) -> None:
    """A host whose answer no doctor would give: it alone is lost, the other two have their result, and it is told why."""
    with open_hosts([make_hosts_file(3)] * 3, tmp_path) as hosts:
        stranger = start_stranger(hosts[2], answers)
        try:
            with meet(hosts, members=[0, 1]) as rendezvous:
                found = [rendezvous.finish(number) for number in (0, 1)]
        finally:
            stranger.kill()
            stranger.communicate()
    assert found[0] == found[1]
    assert "error" not in found[0], found[0]
    assert [bool(one["lost"]) for one in found[0]["hosts"]] == [False, False, True]
    assert "its answer makes no sense" in found[0]["hosts"][2]["lost"]
    assert {one["outcome"] for one in found[0]["links"] if "evil" not in one["source"] + one["target"]} == {"ok"}


def test_what_a_terminal_would_obey_does_not_arrive(tmp_path: Path) -> None:
    """A host's name and its readings with escape sequences and line breaks: none of them is left in the others' results."""
    with open_hosts([make_hosts_file(3)] * 3, tmp_path) as hosts:
        stranger = start_stranger(
            hosts[2], {"open": _OPENED, "connect": {"tried": {}}, "readings": {"readings": [_READING]}}
        )
        try:
            with meet(hosts, members=[0, 1]) as rendezvous:
                found = [rendezvous.finish(number) for number in (0, 1)]
        finally:
            stranger.kill()
            stranger.communicate()
    assert found[0] == found[1]
    evil = found[0]["hosts"][2]
    assert evil["name"] == "evil--2J--0-t--# rm"
    (told,) = evil["readings"]
    assert (told["what"], told["fix"], told["hosts"]) == (
        "x?[2Jx y",
        "# on x?\nreboot",
        [evil["name"]],
    )
    assert not {char for char in json.dumps(found[0], ensure_ascii=False) if ord(char) < 32}


def test_two_nodes_0_are_told_though_each_holds_a_rendezvous(tmp_path: Path) -> None:
    """I10: host2 claims node rank 0, too, and the master is host0: it is sent away there, and no rank is said to be missing."""
    with (
        open_hosts([make_hosts_file(3)] * 3, tmp_path) as hosts,
        meet(
            hosts,
            own={0: {"is_coordinator": True}, 2: {"node_rank": 0, "is_coordinator": True}},
            arrival_timeout_s=4,
        ) as rendezvous,
    ):
        ends = [rendezvous.finish(number) for number in range(3)]
    assert ends[2]["class"] == "I10"
    assert "host0 (10.77.0.1) and host2 (10.77.0.3) both claim node rank 0" in ends[2]["error"]
    assert ends[0] == ends[1]
    assert (only(ends[0])["class"], ends[0]["missing"]) == ("I10", [])


def test_who_waits_at_a_holder_that_is_sent_away_hears_why(tmp_path: Path) -> None:
    """I10: host1 came to host2, which is no node 0: it is told of the two, and not that anybody interrupted anything."""
    own = {
        0: {"is_coordinator": True}, 1: {"endpoint_host": "host2", "is_coordinator": False}, 2: {"node_rank": 0, "is_coordinator": True},
    }  # fmt: skip
    with (
        open_hosts([make_hosts_file(3)] * 3, tmp_path) as hosts,
        meet(hosts, own=own, arrival_timeout_s=6, members=[2, 1]) as rendezvous,
    ):
        rendezvous.wait_line(1, "waiting for")
        late = Rendezvous(hosts, own=own, arrival_timeout_s=6, members=[0])
        try:
            told = rendezvous.finish(1)
        finally:
            late.close()
    assert "host2, the host of the rendezvous, is gone: host0 " in told["error"]
    assert "both claim node rank 0" in told["error"]
    assert "interrupted" not in told["error"]


def test_a_master_that_is_another_hosts_address_is_told_with_its_line(tmp_path: Path) -> None:
    """I2: in host1's /etc/hosts host0 is host2: host1 says which address it tried, and which line says so."""
    files = [make_hosts_file(3), make_hosts_file(3, {"host0": "10.77.0.3"}), make_hosts_file(3)]
    with open_hosts(files, tmp_path) as hosts, meet(hosts, members=[1], arrival_timeout_s=2) as rendezvous:
        told = rendezvous.finish(1)
    assert (
        "nothing listened at host0:29500 within 2 s; host0 is 10.77.0.3 here, by line 2 of /etc/hosts"
        in (told["error"])
    )
    assert told["class"] == "I2"
    # The line may be right, and --master-addr wrong: what can be pasted changes nothing.
    who, first, last = told["reading"]["fix"].splitlines()
    assert who.startswith("# is host0 the first host?")
    assert first.startswith("getent hosts host0 ")
    assert last == "# on host0: start the doctor there at the same time"


def test_a_program_that_says_nothing_at_the_port_is_told_as_one(tmp_path: Path) -> None:
    """I9: something accepts at the endpoint and is silent: it is taken for another program, and not for a cut cable."""
    program = "import socket; s = socket.create_server(('', 29500)); print('up', flush=True); c = []\nwhile True: c.append(s.accept())"
    with open_hosts([make_hosts_file(2)] * 2, tmp_path) as hosts:
        silent = hosts[0].start([sys.executable, "-c", program])
        try:
            assert silent.stdout is not None
            assert silent.stdout.readline() == "up\n"
            with meet(hosts, members=[1], arrival_timeout_s=3) as rendezvous:
                told = rendezvous.finish(1)
        finally:
            silent.kill()
            silent.communicate()
    assert told["class"] == "I9"
    assert "something listens that sends nothing (within 3 s)" in told["error"]
    assert "ss -ltnp" in told["reading"]["fix"]


def test_a_host_that_dies_in_the_all_reduce_ends_it_on_all_others(tmp_path: Path) -> None:
    """host1 is killed while torch reduces over three: it alone is told, and the others' ranks are not waited for."""
    # A torch that never comes to its end.
    package = tmp_path / "fake" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "__version__ = '2.9'\n__file__ = __file__\nclass version: cuda = None\ndevice = set_num_threads = print\n"
    )
    (package / "distributed.py").write_text(
        "def is_available(): return True\ndef is_gloo_available(): return True\ndef init_process_group(*_, **__):\n import time; time.sleep(600)\n"
    )
    env = {number: {"PYTHONPATH": str(tmp_path / "fake")} for number in range(3)}
    with (
        open_hosts([make_hosts_file(3)] * 3, tmp_path) as hosts,
        meet(hosts, all_reduce=True, env=env) as rendezvous,
    ):
        rendezvous.wait_line(0, "running torch's all-reduce: waiting for")
        rendezvous.processes[1].kill()
        found = [rendezvous.finish(number) for number in (0, 2)]
    assert found[0] == found[1]
    assert found[0]["all_reduce"]["why"] == "host1 was lost while it ran"
    assert [one["hosts"] for one in bad(found[0])] == [["host1"]]
    assert any("host1 was lost" in line for line in rendezvous.lines[2][:-1])
