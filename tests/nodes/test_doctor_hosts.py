"""Several hosts look at each other, with networks and names of their own: faults are named with the right host, and no others."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nodes.hosts import Host, make_hosts_file, open_hosts
from support import wait_until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator, Mapping, Sequence

pytestmark = [pytest.mark.linux, pytest.mark.slow]

MEMBER = str(Path(__file__).with_name("rendezvous_member.py"))
PORT = 29500
needs_nft = pytest.mark.skipif(not shutil.which("nft"), reason="needs nft")
needs_tc = pytest.mark.skipif(not shutil.which("tc"), reason="needs tc")


class Rendezvous:
    """Members that run on hosts, and their lines as they come."""

    def __init__(
        self,
        hosts: Sequence[Host],
        *,
        members: Sequence[int] | None = None,
        env: Mapping[int, Mapping[str, str]] | None = None,
        **plan: Any,
    ) -> None:
        self.lines: dict[int, list[str]] = {}
        self.processes: dict[int, subprocess.Popen[str]] = {}
        self._readers: list[threading.Thread] = []
        own = plan.pop("own", {})
        for number in range(len(hosts)) if members is None else members:
            told = {
                "endpoint_host": "host0", "endpoint_port": PORT, "num_hosts": len(hosts), "node_rank": number, "measure": False, **plan,
                **own.get(number, {}),
            }  # fmt: skip
            process = hosts[number].start([sys.executable, MEMBER, json.dumps(told)], (env or {}).get(number))
            self.processes[number] = process
            self.lines[number] = []
            self._readers.append(threading.Thread(target=self._read, args=(process, self.lines[number]), daemon=True))
            self._readers[-1].start()

    @staticmethod
    def _read(process: subprocess.Popen[str], lines: list[str]) -> None:
        assert process.stdout is not None
        with process.stdout as stream:
            lines.extend(line.rstrip() for line in stream)

    def wait_line(self, number: int, words: str) -> None:
        """Wait until a member has said something."""
        wait_until(lambda: any(words in line for line in self.lines[number]), what=f"{words!r} of host {number}")

    def finish(self, number: int) -> dict[str, Any]:
        """Return what a member has found."""
        process = self.processes[number]
        process.wait(timeout=60)
        wait_until(
            lambda: self.lines[number] and self.lines[number][-1].startswith("{"),
            what=f"a result of host {number}",
        )
        found: dict[str, Any] = json.loads(self.lines[number][-1])
        return found

    def close(self) -> None:
        """Kill those that are left, and wait for their ends."""
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
        for reader in self._readers:
            reader.join(timeout=10)


@contextlib.contextmanager
def meet(hosts: Sequence[Host], **plan: Any) -> Iterator[Rendezvous]:
    rendezvous = Rendezvous(hosts, **plan)
    try:
        yield rendezvous
    finally:
        rendezvous.close()


def examine(hosts: Sequence[Host], **plan: Any) -> dict[str, Any]:
    """Let all hosts meet, and return what all of them have found."""
    with meet(hosts, **plan) as rendezvous:
        found = [rendezvous.finish(number) for number in rendezvous.processes]
    assert all(one == found[0] for one in found), "not all hosts were told the same"
    assert "error" not in found[0], found[0]
    return found[0]


def bad(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what was judged to be bad."""
    return [one for one in found["readings"] if one["verdict"] in {"warn", "fail"}]


def only(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the one thing that was judged to be bad."""
    assert len(bad(found)) == 1, bad(found)
    return bad(found)[0]


def open_all(count: int, folder: Path) -> contextlib.AbstractContextManager[list[Host]]:
    return open_hosts([make_hosts_file(count)] * count, folder)


def drop(host: Host, *rule: str) -> None:
    """Add a rule to what comes in at a host."""
    host.call("nft", "add", "table", "inet", "test")
    host.call("nft", "add", "chain", "inet", "test", "input", "{ type filter hook input priority 0 ; }")
    host.call("nft", "add", "rule", "inet", "test", "input", "iifname", "cable", *rule)


def test_healthy_hosts_raise_no_alarm(tmp_path: Path) -> None:
    """Five hosts on one switch: all links open, all is measured, clocks agree, and nothing is said to be bad."""
    with open_all(5, tmp_path) as hosts:
        found = examine(hosts, measure=True, seconds_per_link=0.1, backend="nccl")
    assert bad(found) == []
    assert {(one["source"], one["target"]) for one in found["measures"]} == {
        (f"host{a}", f"host{b}") for a in range(5) for b in range(5) if a != b
    }
    assert {one["plane"] for one in found["links"]} == {"gloo"}
    assert all(one["outcome"] == "ok" for one in found["links"])
    assert [one["name"] for one in found["hosts"]] == [f"host{number}" for number in range(5)]


@needs_nft
def test_a_blocked_range_of_ports_is_the_fault_of_its_host(tmp_path: Path) -> None:
    """I8: the rendezvous's port is open and high ones are dropped at host2: host2 is named, and what is to be let in."""
    with open_all(4, tmp_path) as hosts:
        drop(hosts[2], "tcp", "dport", "30000-60999", "ct", "state", "new", "drop")
        told = only(examine(hosts))
    assert (told["verdict"], told["class"], told["hosts"], told["probe"]) == (
        "fail",
        "I8",
        ["host2"],
        "links",
    )
    assert "3 of 3 hosts to host2" in told["what"]
    assert "dropped" in told["what"]
    assert told["fix"].startswith("# on host2:\n# let TCP in from 10.77.0.0/24")


@needs_nft
def test_one_refused_link_is_told_as_a_link(tmp_path: Path) -> None:
    """Only host1 is refused at host2: the link is named, not a host, and the fix is for the host that refuses."""
    with open_all(3, tmp_path) as hosts:
        drop(
            hosts[2],
            "ip",
            "saddr",
            hosts[1].address,
            "tcp",
            "dport",
            "30000-60999",
            "ct",
            "state",
            "new",
            "reject",
        )
        told = only(examine(hosts))
    assert (told["class"], told["hosts"]) == ("I8", ["host1", "host2"])
    assert "from host1 to host2" in told["what"]
    assert told["fix"].startswith("# on host2:")


@needs_tc
def test_a_host_that_sends_slowly_is_named(tmp_path: Path) -> None:
    """A cable that came up at 30 Mbit/s at host2: it is slow on all its ways out, and the others are not blamed."""
    with open_all(3, tmp_path) as hosts:
        hosts[2].call(
            "tc",
            "qdisc",
            "add",
            "dev",
            "cable",
            "root",
            "tbf",
            "rate",
            "30mbit",
            "burst",
            "32kbit",
            "latency",
            "50ms",
        )
        told = only(examine(hosts, measure=True, seconds_per_link=0.1))
    assert (told["verdict"], told["hosts"], told["probe"]) == ("warn", ["host2"], "speed")
    assert "host2 is slow: it sends at" in told["what"]
    assert told["fix"].startswith("# on host2:")


@needs_nft
def test_a_host_that_loses_packets_is_named(tmp_path: Path) -> None:
    """Five packets of a hundred are lost on their way into host1: it is named, with a share of about that."""
    with open_all(3, tmp_path) as hosts:
        drop(hosts[1], "numgen", "random", "mod", "100", "<", "5", "drop")
        # So long that on each of the two ways some packets are lost: what is seen on one way alone is either host's.
        found = examine(hosts, measure=True, seconds_per_link=0.6)
    told = [one for one in bad(found) if "get lost" in one["what"]]
    assert [one["hosts"] for one in told] == [["host1"]], bad(found)
    assert told[0]["verdict"] == "fail"
    assert "packets to host1" in told[0]["what"]
    assert all(one["hosts"] == ["host1"] for one in bad(found))


@needs_nft
def test_large_packets_that_vanish_are_told_from_slow_ones(tmp_path: Path) -> None:
    """A way that drops whole packets in silence: the rendezvous passes, the stream to host1 stalls, and host1 is named."""
    with open_all(3, tmp_path) as hosts:
        for host in hosts:
            host.call("ip", "link", "set", "dev", "cable", "gso_max_segs", "1")
        drop(hosts[1], "meta", "length", ">", "1300", "drop")
        found = examine(hosts, measure=True, seconds_per_link=0.05)
    # That all links are slow is true on a busy machine, which sends each small packet by itself.
    (told,) = [one for one in bad(found) if len(one["hosts"]) < len(hosts)]
    assert (told["verdict"], told["hosts"]) == ("fail", ["host1"])
    assert "sudo ip link set dev cable mtu 1400" in told["fix"]


def test_a_wrong_hosts_file_is_named_with_the_line_to_change(tmp_path: Path) -> None:
    """host1 has host2's name at host3's address: host1 is named, with the wrong and the right address."""
    files = [make_hosts_file(4)] * 4
    files[1] = make_hosts_file(4, {"host2": "10.77.0.4"})
    with open_hosts(files, tmp_path) as hosts:
        told = only(examine(hosts))
    assert (told["verdict"], told["hosts"], told["probe"]) == ("fail", ["host1"], "names")
    assert "in host1's /etc/hosts host2 is 10.77.0.4, and that is host3's address; host2 is 10.77.0.3" in told["what"]
    assert told["fix"] == "# on host1:\n# in /etc/hosts, host2 must stand in one line only: 10.77.0.3 host2"


def test_a_name_at_loopback_is_told_and_the_link_tried_all_the_same(tmp_path: Path) -> None:
    """I5: host1 knows itself by 127.0.1.1: it is named, and the way to its real address is known to be open."""
    files = [make_hosts_file(2), make_hosts_file(2, {"host1": "127.0.1.1"})]
    with open_hosts(files, tmp_path) as hosts:
        found = examine(hosts, probes=["hostname"])
    assert bad(found) == []
    (told,) = [one for host in found["hosts"] for one in host["readings"] if one["verdict"] != "ok"]
    assert (told["class"], told["hosts"]) == ("I5", ["host1"])
    assert "export GLOO_SOCKET_IFNAME=cable" in told["fix"]
    assert {(one["address"], one["outcome"]) for one in found["links"]} == {
        ("10.77.0.1", "ok"),
        ("10.77.0.2", "ok"),
    }


def test_a_wrong_clock_is_named_even_if_it_is_the_holders(tmp_path: Path) -> None:
    """I23: of three clocks, that of host0, where all meet, is 40 s ahead: host0 is named, not the two that agree."""
    with open_all(3, tmp_path) as hosts:
        told = only(examine(hosts, own={0: {"ahead_s": 40.0}}))
    assert (told["verdict"], told["class"], told["hosts"]) == ("fail", "I23", ["host0"])
    assert "host0's clock is 40.0 s ahead of the other hosts'" in told["what"]
    assert "sudo chronyc makestep" in told["fix"]


def test_two_versions_of_torch_are_told_by_host(tmp_path: Path) -> None:
    """R11: host1 has another torch than the other two: the comparison of the interpreters names it."""
    for version in ("2.8.0", "2.9.1"):
        package = tmp_path / version / "torch"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(
            f"__version__ = {version!r}\n__file__ = __file__\nclass version: cuda = None\n"
        )
        (package / "distributed.py").write_text("def is_available(): return False\n")
    versions = {0: "2.8.0", 1: "2.9.1", 2: "2.8.0"}
    env = {number: {"PYTHONPATH": str(tmp_path / version)} for number, version in versions.items()}
    with open_all(3, tmp_path) as hosts:
        found = examine(hosts, probes=["interpreter"], env=env)
    told = [one for one in bad(found) if one["class"] == "R11"]
    assert [one["hosts"] for one in told] == [["host1"]], bad(found)
    assert "2.9.1" in told[0]["what"]


def test_a_host_that_never_comes_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    """I1: of three, host1 is not started: after the time for arrival it is named, by the name it was expected by."""
    with open_all(3, tmp_path) as hosts:
        found = examine(hosts, members=[0, 2], expected=["host0", "host1", "host2"], arrival_timeout_s=3)
    told = only(found)
    assert found["missing"] == ["host1"]
    assert (told["class"], told["hosts"]) == ("I1", ["host1"])
    assert len(found["links"]) == 2


@pytest.mark.parametrize("fault", ["killed", "frozen", "cable cut", "interrupted"])
def test_a_host_that_dies_in_the_middle_is_named_and_the_others_finish(tmp_path: Path, fault: str) -> None:
    """Whether host2 is killed, stopped, cut off or interrupted while its probes are being waited for: it is lost, the others have a result."""
    with open_all(3, tmp_path) as hosts, meet(hosts, own={2: {"hangs": True}}) as rendezvous:
        rendezvous.wait_line(0, "looking at each host: waiting for host2")
        if fault == "cable cut":
            hosts[2].call("ip", "link", "set", "cable", "down")
        else:
            number = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}.get(fault, signal.SIGINT)
            rendezvous.processes[2].send_signal(number)
        found = [rendezvous.finish(number) for number in (0, 1)]
        if fault == "cable cut":
            assert "host0:29500 is gone" in rendezvous.finish(2)["error"]
    assert found[0] == found[1]
    told = only(found[0])
    assert told["hosts"] == ["host2"]
    assert "host2 was lost: " in told["what"]
    words = {
        "killed": "connection",
        "interrupted": "its doctor was interrupted there",
        "cable cut": "nothing received for|timed out",
    }
    assert re.search(words.get(fault, "nothing received for"), told["what"])
    assert ("is it up?" in told["fix"]) == (fault != "interrupted")
    assert [bool(one["lost"]) for one in found[0]["hosts"]] == [False, False, True]


def test_when_the_holder_dies_the_others_say_so(tmp_path: Path) -> None:
    """host0, which holds the rendezvous, is killed: the others end within seconds, with an error that names it."""
    with open_all(3, tmp_path) as hosts, meet(hosts, own={2: {"hangs": True}}) as rendezvous:
        rendezvous.wait_line(1, "looking at each host: waiting for host2")
        rendezvous.processes[0].kill()
        told = [rendezvous.finish(number)["error"] for number in (1,)]
    assert all("the host of the rendezvous at host0:29500 is gone" in one for one in told)


def test_nothing_is_left_behind_by_ctrl_c(tmp_path: Path) -> None:
    """SIGINT while hosts are waited for ends a member at once, and frees the port."""
    with open_all(3, tmp_path) as hosts, meet(hosts, members=[0, 1]) as rendezvous:
        rendezvous.wait_line(0, "waiting for node rank 2 (2 of 3 are here)")
        rendezvous.processes[0].send_signal(signal.SIGINT)
        assert rendezvous.processes[0].wait(timeout=15) != 0
        assert "is gone: its doctor was interrupted there" in rendezvous.finish(1)["error"]


@pytest.mark.parametrize(
    ("own", "members", "class_id", "words"),
    [
        (
            {"endpoint_host": "nowhere"},
            [1],
            "I3",
            "nowhere, the rendezvous address, has no address here",
        ),
        ({}, [1], "I2", "nothing listened at host0:29500 within 2 s"),
        ({"endpoint_host": "10.77.0.9"}, [1], "I2", "can't be reached (within 2 s): No route to host"),
    ],
)
def test_who_cannot_reach_the_endpoint_hears_why(
    tmp_path: Path, own: dict[str, str], members: list[int], class_id: str, words: str
) -> None:
    """A wrong name, a port where nobody listens, an address without a host: the error says which, in the time for arrival."""
    with open_all(2, tmp_path) as hosts, meet(hosts, members=members, arrival_timeout_s=2, **own) as rendezvous:
        told = rendezvous.finish(1)
    assert words in told["error"]
    assert told["class"] == class_id


def test_two_hosts_with_one_node_rank_are_both_named(tmp_path: Path) -> None:
    """I10: the second host that claims node rank 1 is sent away with both names, and the others' result tells it, too."""
    with (
        open_all(3, tmp_path) as hosts,
        meet(hosts, own={2: {"node_rank": 1}}, arrival_timeout_s=3) as rendezvous,
    ):
        ends = [rendezvous.finish(number) for number in range(3)]
    refused = [one for one in ends if "error" in one]
    assert len(refused) == 1
    assert refused[0]["class"] == "I10"
    assert "both claim node rank 1" in refused[0]["error"]
    assert "I10" in [one["class"] for one in bad(ends[0])]


def test_a_stranger_at_the_port_is_told_as_one(tmp_path: Path) -> None:
    """I9: something else answers at the endpoint: its first words are in the error, and nobody waits for the time to end."""
    program = "import socket; s = socket.create_server(('', 29500)); print('up', flush=True)\nwhile True:\n c, _ = s.accept(); c.send(b'SSH-2.0-OpenSSH\\r\\n')"
    with open_all(2, tmp_path) as hosts:
        stranger = hosts[0].start([sys.executable, "-c", program])
        try:
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == "up\n"
            with meet(hosts) as rendezvous:
                ends = [rendezvous.finish(number) for number in range(2)]
        finally:
            stranger.kill()
            stranger.communicate()
    assert [one["class"] for one in ends] == ["I9", "I9"]
    assert all("SSH-2.0" in one["error"] for one in ends)


def test_torch_reduces_over_the_hosts(tmp_path: Path) -> None:
    """With torch on both hosts, the all-reduce is real: two ranks by Gloo, with a latency, a speed, and who was waited for."""
    with open_all(2, tmp_path) as hosts:
        found = examine(hosts, all_reduce=True)
    told = found["all_reduce"]
    assert (told["why"], told["backend"], told["num_ranks"]) == ("", "gloo", 2)
    assert told["bytes_per_s"] > 0
    assert told["latency_s"] > 0
    assert [name for name, _ in told["waited_s"]] == ["host0", "host1"]
