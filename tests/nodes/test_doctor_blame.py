"""Who is to blame among several hosts, with networks of their own."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from nodes.test_doctor_hosts import drop, examine, only, open_all

if TYPE_CHECKING:
    from pathlib import Path

    from nodes.hosts import Host

pytestmark = [pytest.mark.linux, pytest.mark.slow]

HIGH = ("tcp", "dport", "30000-65535", "ct", "state", "new")
needs_nft = pytest.mark.skipif(not shutil.which("nft"), reason="needs nft")


def drop_out(host: Host, *rule: str) -> None:
    """Add a rule to what goes out at a host."""
    host.call("nft", "add", "table", "inet", "test")
    host.call("nft", "add", "chain", "inet", "test", "way-out", "{ type filter hook output priority 0 ; }")
    host.call("nft", "add", "rule", "inet", "test", "way-out", *rule)


@needs_nft
def test_two_groups_that_do_not_reach_each_other_accuse_no_host(tmp_path: Path) -> None:
    """Between {0,1} and {2,3} high ports are dropped, in both ways: one reading with both groups, and no firewall of a host."""
    with open_all(4, tmp_path) as hosts:
        for host, others in ((0, "10.77.0.3-10.77.0.4"), (1, "10.77.0.3-10.77.0.4"), (2, "10.77.0.1-10.77.0.2"), (3, "10.77.0.1-10.77.0.2")):  # fmt: skip
            drop(hosts[host], "ip", "saddr", others, *HIGH, "drop")
        told = only(examine(hosts))
    assert (told["probe"], told["class"], told["hosts"]) == ("links", "I8", ["host0", "host1", "host2", "host3"])  # fmt: skip
    assert "host0 and host1 reach each other; host2 and host3 reach each other; nothing passes between these groups" in told["what"]  # fmt: skip
    assert "switch" in told["why"]
    assert "iptables -I" not in told["fix"]


@needs_nft
def test_a_host_that_lets_nothing_out_is_told_to_let_it_out(tmp_path: Path) -> None:
    """A chain of its own drops what host2 sends: it is named, with the side that is to be opened."""
    with open_all(3, tmp_path) as hosts:
        drop_out(hosts[2], *HIGH, "drop")
        told = only(examine(hosts))
    assert told["hosts"] == ["host2"]
    assert "from host2 to 2 of 2 hosts" in told["what"]
    assert told["fix"].startswith("# on host2:\n# let TCP out to 10.77.0.0/24")


@needs_nft
def test_a_host_that_is_shut_both_ways_is_told_to_open_both(tmp_path: Path) -> None:
    """Dropped at its way in and at its way out: one reading, with both sides."""
    with open_all(3, tmp_path) as hosts:
        drop(hosts[2], *HIGH, "drop")
        drop_out(hosts[2], *HIGH, "drop")
        told = only(examine(hosts))
    assert told["hosts"] == ["host2"]
    assert "from and to host2" in told["what"]
    assert "# let TCP in from 10.77.0.0/24" in told["fix"]
    assert "# let TCP out to 10.77.0.0/24" in told["fix"]


@pytest.mark.parametrize("wrong", [[1], [0, 1, 2]], ids=["one host", "all hosts"])
def test_gloo_at_a_bridge_of_containers_is_told_as_that(tmp_path: Path, wrong: list[int]) -> None:
    """GLOO_SOCKET_IFNAME=docker0: the interface is named, and the variable is the fix; nobody's firewall is."""
    with open_all(3, tmp_path) as hosts:
        for host in hosts:
            host.call("sh", "-ec", "ip link add docker0 type bridge; ip addr add 172.17.0.1/16 dev docker0; ip link set docker0 up")  # fmt: skip
        told = only(examine(hosts, env={number: {"GLOO_SOCKET_IFNAME": "docker0"} for number in wrong}))
    assert (told["probe"], told["hosts"]) == ("links", [f"host{number}" for number in wrong])
    assert "Gloo listens at 172.17.0.1 (docker0) on " in told["what"]
    assert told["fix"].splitlines() == [
        line for number in wrong for line in (f"# on host{number}:", "export GLOO_SOCKET_IFNAME=cable")
    ]
