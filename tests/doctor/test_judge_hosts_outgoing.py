"""What lets a host's connections out: for each program that may be in the way; and what "up" means of an interface."""

from __future__ import annotations

import json
from collections import namedtuple
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from fake_hosts import make_host
from rankwise.doctor.network.interfaces import read_interfaces
from rankwise.doctor.network.outgoing import suggest_outgoing

if TYPE_CHECKING:
    from pathlib import Path

NET = "10.0.0.0/24"
TABLES = "*filter\n:INPUT ACCEPT [0:0]\n:OUTPUT {policy} [0:0]\n{rules}COMMIT\n"


def make_nft(
    table: str, *rules: str, family: str = "inet", policy: str = "accept", name: str = "output"
) -> str:
    chain = {
        "family": family,
        "table": table,
        "name": name,
        "type": "filter",
        "hook": "output",
        "prio": 0,
        "policy": policy,
    }
    told = [{"chain": chain}] + [
        {"rule": {"family": family, "table": table, "chain": name, "expr": [{one: None}]}} for one in rules
    ]
    return json.dumps({"nftables": told})


def save(policy: str = "ACCEPT", rules: str = "") -> str:
    return TABLES.format(policy=policy, rules=rules)


@pytest.mark.parametrize(
    ("programs", "lines"),
    [
        ({}, [f"# let TCP out to {NET}: in the firewall of this host, or of the cloud (security group)"]),
        ({"iptables-save": save()}, ["# let TCP out"]),
        ({"iptables-save": save("DROP")}, [f"sudo iptables -I OUTPUT -p tcp -d {NET} -j ACCEPT"]),
        ({"iptables-save": save(rules="-A OUTPUT -p tcp --dport 1024:65535 -j REJECT\n")}, ["sudo iptables -I OUTPUT"]),
        ({"iptables-save": save("DROP"), "ufw status": "Status: active\n"}, [f"sudo ufw prepend allow out proto tcp to {NET}"]),
        ({"nft --json list ruleset": make_nft("t", "drop")}, [f"sudo nft insert rule inet t output ip daddr {NET} meta l4proto tcp accept"]),
        ({"nft --json list ruleset": make_nft("t", policy="drop")}, ["sudo nft insert rule inet t output"]),
        ({"nft --json list ruleset": make_nft("t", "accept")}, ["# let TCP out"]),
        ({"nft --json list ruleset": "no json"}, ["# let TCP out"]),
        # What iptables keeps in nftables is opened by iptables alone; what others keep there is opened as well.
        ({"iptables-save": save("DROP"), "nft --json list ruleset": make_nft("filter", policy="drop", family="ip", name="OUTPUT")}, ["sudo iptables"]),
        ({"iptables-save": save("DROP"), "nft --json list ruleset": make_nft("t", "reject")}, ["sudo iptables", "sudo nft insert"]),
    ],
)  # fmt: skip
def test_all_that_may_drop_is_opened(tmp_path: Path, programs: dict[str, str], lines: list[str]) -> None:
    """A drop in one chain is not undone in another: each chain at the way out that may drop has its command, no other one has."""
    told = suggest_outgoing(make_host(tmp_path, programs=programs), [NET]).splitlines()
    assert len(told) == len(lines)
    assert all(one.startswith(line) for one, line in zip(told, lines, strict=True)), told


def test_firewalld_is_told_in_its_own_words(tmp_path: Path) -> None:
    """The table of firewalld belongs to it: a policy for what goes out, and then a reload."""
    told = suggest_outgoing(
        make_host(tmp_path, programs={"nft --json list ruleset": make_nft("firewalld", "reject")}), [NET]
    )
    assert "nft insert" not in told
    assert f"destination address={NET} accept" in told
    assert told.endswith("sudo firewall-cmd --reload")


Stats = namedtuple("Stats", ["isup", "mtu", "speed", "flags"])


@pytest.mark.parametrize(
    ("files", "flags", "is_running", "is_up"),
    [
        ({"flags": "0x1003", "carrier": "1"}, "up,broadcast,multicast", False, True),
        ({"flags": "0x1003", "carrier": "0"}, "up,broadcast,multicast", False, False),
        ({"flags": "0x1002"}, "broadcast,multicast", False, False),
        ({"flags": "0x1003", "carrier": "1"}, "up,broadcast,running,multicast", True, True),
        ({}, "up,broadcast,running", True, True),
        ({}, "broadcast", False, False),
    ],
)
def test_an_interface_is_up_as_soon_as_it_has_a_carrier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], flags: str, is_running: bool, is_up: bool
) -> None:  # fmt: skip
    """The system's "running" comes late after a cable is plugged in: what counts is that it was put up, and the carrier."""
    import psutil

    stats = Stats(isup=is_running, mtu=1500, speed=0, flags=flags)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"eth9": stats})
    address = SimpleNamespace(family=2, address="10.0.0.1", netmask="255.255.255.0")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth9": [address]})
    host = make_host(tmp_path, files={f"/sys/class/net/eth9/{name}": text for name, text in files.items()})
    (found,) = read_interfaces(host)
    assert found.is_up is is_up
