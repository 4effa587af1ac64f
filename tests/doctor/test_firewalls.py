"""What rules of a firewall do with a connection of another rank, and the command that lets it in."""

from __future__ import annotations

import json
import shutil
import sys
from typing import TYPE_CHECKING

import pytest

from fake_hosts import ETH0, LOOPBACK, make_host
from network_hosts import CABLE, ask, enter_network
from rankwise.doctor.host import Ran
from rankwise.doctor.network.firewalls import find_firewall, make_packet, suggest_opening
from rankwise.doctor.network.iptables import read_iptables
from rankwise.doctor.network.nftables import read_nftables
from rankwise.doctor.network.rules import Packet, follow

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rankwise.doctor.network.nftables import Table

IPTABLES = """*filter
:INPUT DROP [0:0]
:FORWARD ACCEPT [0:0]
:ufw-user - [0:0]
:limits - [0:0]
-A INPUT -i lo -j ACCEPT
-A INPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A INPUT -p tcp -m multiport --dports 22,8000:9000 -m comment --comment "for us" -j ACCEPT
-A INPUT -j LOG --log-prefix "in "
-A INPUT ! -s 10.0.0.0/8 -p tcp -j REJECT --reject-with tcp-reset
-A INPUT -j ufw-user
-A INPUT -p tcp --dport 6000:6100 -g limits
-A ufw-user -s 10.0.7.0/24 -p tcp -j ACCEPT
-A ufw-user -d 127.0.0.0/8 -j DROP
-A limits -m limit --limit 3/min -j ACCEPT
COMMIT
"""
NFT = [
    {"set": {"family": "inet", "table": "filter", "name": "open", "elem": [22, {"range": [8000, 9000]}]}},
    {"chain": {"family": "inet", "table": "filter", "name": "user"}},
    {"chain": {"family": "inet", "table": "filter", "name": "input", "type": "filter", "hook": "input", "prio": 0, "policy": "drop"}},
    *(
        {"rule": {"family": "inet", "table": "filter", "chain": chain, "expr": expr}}
        for chain, expr in [
            ("input", [{"match": {"op": "in", "left": {"ct": {"key": "state"}}, "right": ["established", "related"]}}, {"accept": None}]),
            ("input", [{"match": {"op": "==", "left": {"ct": {"key": "status"}}, "right": "dnat"}}, {"accept": None}]),
            ("input", [{"match": {"op": "==", "left": {"meta": {"key": "iifname"}}, "right": {"set": ["lo", "ib0"]}}}, {"accept": None}]),
            ("input", [{"match": {"op": "==", "left": {"payload": {"protocol": "tcp", "field": "dport"}}, "right": "@open"}}, {"accept": None}]),
            ("input", [{"match": {"op": ">", "left": {"payload": {"protocol": "tcp", "field": "dport"}}, "right": 60000}}, {"log": None}, {"reject": {}}]),
            ("input", [{"match": {"op": "==", "left": {"payload": {"protocol": "udp", "field": "dport"}}, "right": 53}}, {"accept": None}]),
            ("input", [{"jump": {"target": "user"}}]),
            ("user", [{"match": {"op": "==", "left": {"payload": {"protocol": "ip", "field": "saddr"}}, "right": {"prefix": {"addr": "10.0.7.0", "len": 24}}}}, {"accept": None}]),
            ("user", [{"match": {"op": "==", "left": {"payload": {"protocol": "tcp", "field": "dport"}}, "right": {"range": [6000, 6100]}}}, {"limit": {"rate": 3}}, {"accept": None}]),
        ]
    ),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["iptables", "nftables"])
@pytest.mark.parametrize(
    ("source", "port", "interface", "outcomes"),
    [
        ("10.0.0.9", 40000, "eth0", {"drop"}),
        ("10.0.0.9", 8500, "eth0", {"accept"}),
        ("10.0.0.9", 22, "eth0", {"accept"}),
        ("10.0.7.9", 40000, "eth0", {"accept"}),
        ("10.0.0.9", 40000, "lo", {"accept"}),
        ("10.0.0.9", 6050, "eth0", {"accept", "drop"}),
    ],
)
def test_rules_are_followed(kind: str, source: str, port: int, interface: str, outcomes: set[str]) -> None:
    """Rules of both kinds are followed to the same end: ports, networks, interfaces, chains; what depends on a rate is uncertain."""
    packet = Packet(source=source, target="10.0.0.1", interface=interface, port=port)
    if kind == "iptables":
        found = follow(read_iptables(IPTABLES), "INPUT", packet)
    else:
        (table,) = read_nftables(json.dumps({"nftables": NFT}))
        assert table.inputs == ["input"]
        found = follow(table.chains, "input", packet)
    assert found == outcomes


def test_rules_that_cannot_be_read() -> None:
    """What is no JSON, or no rules, is no table."""
    assert read_nftables("Error: syntax") == []
    assert read_nftables("[]") == []
    assert read_iptables("") == {}


@pytest.mark.parametrize(
    ("programs", "command"),
    [
        (
            {"ufw status": "Status: active\n", "iptables-save": IPTABLES},
            "sudo ufw allow from 10.0.0.0/24 proto tcp",
        ),
        (
            {"firewall-cmd --state": "running\n", "nft --json": "{}"},
            "sudo firewall-cmd --permanent --zone=trusted --add-source=10.0.0.0/24\nsudo firewall-cmd --reload",
        ),
        ({"iptables-save": IPTABLES}, "sudo iptables -I INPUT -s 10.0.0.0/24 -p tcp -j ACCEPT"),
        (
            {"nft --json": json.dumps({"nftables": NFT})},
            "sudo nft insert rule inet filter input ip saddr 10.0.0.0/24 meta l4proto tcp accept",
        ),
        ({}, "# let TCP in from 10.0.0.0/24: in the firewall of this host, or of the cloud (security group)"),
    ],
)
def test_opening(tmp_path: Path, programs: dict[str, str], command: str) -> None:
    """The command that lets the others in is the one of the firewall that runs there."""
    host = make_host(tmp_path, programs=programs, interfaces=[LOOPBACK, ETH0])
    assert suggest_opening(host, ["10.0.0.0/24"]) == command


RULESET = """table inet filter {
  chain input {
    type filter hook input priority 0; policy drop;
    ct state established,related accept
    iifname lo accept
    tcp dport { 22, 29500 } accept
  }
}
"""
ASK_FIREWALL = """
import sys
from rankwise.doctor.host import Host, JobShape
from rankwise.doctor.network.firewalls import suggest_opening
from rankwise.doctor.probes.firewall import PROBE
host = Host(job=JobShape(num_nodes=2, master_addr="10.5.0.1", master_port=29500, is_master=True))
for reading in PROBE.look(host):
    print(reading.verdict, reading.what, reading.fix, sep="|")
"""


@pytest.mark.parametrize(
    ("program", "rules", "cured"),
    [
        ("nft", f"nft -f - <<'E'\n{RULESET}E\n", "nft"),
        (
            "iptables",
            "iptables -P INPUT DROP\niptables -A INPUT -p tcp --dport 29500 -j ACCEPT\n",
            "iptables",
        ),
    ],
)
def test_real_firewalls(program: str, rules: str, cured: str) -> None:
    """Real rules that let only the meeting port in are found; the proposed command, typed as it is, cures them."""
    if not shutil.which(program):
        pytest.skip(f"{program} is not installed")
    setup = CABLE.format("wire")
    ask = f"{sys.executable} -c '{ASK_FIREWALL}'"
    told = enter_network(
        f"{setup}{rules}{ask}\n{ask} | cut -d'|' -f3 | sed s/sudo// | bash -e\n{ask}"
    ).splitlines()
    assert told[0].startswith("warn|the firewall drops TCP from neighbours"), told
    assert "where Gloo and NCCL listen" in told[0]
    assert "port 29500" not in told[0]
    assert cured in told[0]
    assert told[-1].startswith("ok|no rule blocks"), told


INPUT = "*filter\n:INPUT DROP [0:0]\n:OUTPUT ACCEPT [0:0]\n-A INPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n"


@pytest.mark.parametrize(
    ("rule", "outcomes"),
    [
        ("-p tcp -m tcp --dport 1024:65535 --tcp-flags FIN,SYN,RST,ACK SYN -j ACCEPT", {"accept"}),
        ("-p tcp -m tcp --tcp-flags FIN,SYN,RST,ACK ACK -j ACCEPT", {"drop"}),
        ("-p tcp -m tcp ! --tcp-flags FIN,SYN,RST,ACK SYN -j ACCEPT", {"drop"}),
        ("-m set --match-set cluster src -j ACCEPT", {"accept", "drop"}),
        ("-m socket --transparent -j ACCEPT", {"accept", "drop"}),
        ("-m socket -j ACCEPT", {"accept", "drop"}),
        ("-s 10.0.0.0/24 -m physdev --physdev-is-in -j ACCEPT", {"accept", "drop"}),
        ("-m addrtype --src-type UNICAST --limit-iface-in -j ACCEPT", {"accept", "drop"}),
        ("-m time --timestart 01:00 --kerneltz -j ACCEPT", {"accept", "drop"}),
        ("-s 10.0.0.0/255.0.255.0 -j ACCEPT", {"accept", "drop"}),
        ("-s 10.0.0.0/24 something -j ACCEPT", {"accept", "drop"}),
        ('-s 10.0.0.0/24 -m comment --comment "-j DROP" -j ACCEPT', {"accept"}),
        ('-s 10.0.0.0/24 -m comment --comment "-j -j ACCEPT', {"drop", "unknown"}),
        ("-s ! 10.9.0.0/24 -j ACCEPT", {"accept", "drop"}),
    ],
)
def test_options_take_the_words_that_belong_to_them(rule: str, outcomes: set[str]) -> None:
    """Options without a word, with two, and unknown ones never swallow what follows; what is not known is never certain."""
    packet = Packet(source="10.0.0.5", target="10.0.0.7", interface="eth0", port=45000)
    assert follow(read_iptables(f"{INPUT}-A INPUT {rule}\nCOMMIT\n"), "INPUT", packet) == outcomes


def read_nft(*rules: list[object], more: Sequence[object] = ()) -> Table:
    """Read a table of nftables whose input chain drops what no rule takes."""
    chain = {
        "family": "inet",
        "table": "filter",
        "name": "input",
        "type": "filter",
        "hook": "input",
        "policy": "drop",
    }
    told = [{"rule": {"family": "inet", "table": "filter", "chain": "input", "expr": expr}} for expr in rules]
    (table,) = read_nftables(json.dumps({"nftables": [*more, {"chain": chain}, *told]}))
    return table


STATE = {"ct": {"key": "state"}}
PORTS = [[22, {"accept": None}], [{"range": [40000, 50000]}, {"jump": {"target": "user"}}]]
BY_PORT = {"vmap": {"key": {"payload": {"protocol": "tcp", "field": "dport"}}, "data": "@ports"}}
USER = {"rule": {"family": "inet", "table": "filter", "chain": "user", "expr": [{"accept": None}]}}


@pytest.mark.parametrize(
    ("rule", "more", "outcomes"),
    [
        ({"vmap": {"key": STATE, "data": {"set": [["established", {"accept": None}], ["invalid", {"drop": None}]]}}}, [], {"drop"}),
        ({"vmap": {"key": STATE, "data": {"set": [["established", {"accept": None}], ["new", {"accept": None}]]}}}, [], {"accept"}),
        ({"vmap": {"key": STATE, "data": {"set": [["new", {"continue": None}]]}}}, [], {"drop"}),
        ({"vmap": {"key": {"meta": {"key": "mark"}}, "data": {"set": [[1, {"accept": None}]]}}}, [], {"accept", "drop"}),
        ({"vmap": {"key": STATE, "data": "@unseen"}}, [], {"drop", "unknown"}),
        (BY_PORT, [{"map": {"family": "inet", "table": "filter", "name": "ports", "elem": PORTS}}, USER], {"accept"}),
        (BY_PORT, [{"map": {"family": "ip", "table": "other", "name": "ports", "elem": PORTS}}, USER], {"drop", "unknown"}),
        ({"match": {"op": "==", "left": {"payload": {"protocol": "ether", "field": "saddr"}}, "right": "aa:bb"}}, [], {"accept", "drop"}),
    ],
)  # fmt: skip
def test_maps_of_verdicts(rule: object, more: Sequence[object], outcomes: set[str]) -> None:
    """A map of nftables is followed by the keys that are known, as the state of a new connection is; others leave it open."""
    packet = Packet(source="10.0.0.5", target="10.0.0.7", interface="eth0", port=45000)
    expr = [rule, {"accept": None}] if "match" in str(rule) else [rule]
    assert follow(read_nft(expr, more=more).chains, "input", packet) == outcomes


SAVED = "*filter\n:INPUT ACCEPT [0:0]\nCOMMIT\n"
UNSURE = "*filter\n:INPUT DROP [0:0]\n-A INPUT -m set --match-set cluster src -j ACCEPT\nCOMMIT\n"
SERVER = json.dumps({"nftables": [
    {"chain": {"family": "inet", "table": "filter", "name": "input", "type": "filter", "hook": "input", "policy": "drop"}},
    {"rule": {"family": "inet", "table": "filter", "chain": "input",
              "expr": [{"vmap": {"key": STATE, "data": {"set": [["established", {"accept": None}], ["related", {"accept": None}]]}}}]}},
]})  # fmt: skip
HANGS = Ran(code=None, why="nft did not end within 5 s")


@pytest.mark.parametrize(
    ("programs", "verdict", "says"),
    [
        ({"iptables-save": SAVED}, "ok", "no firewall is running here"),
        ({"iptables-save": SAVED, "nft --json": HANGS}, "skipped", "nft did not end within 5 s"),
        ({"iptables-save": SAVED, "nft --json": Ran(code=1, err="Protocol not supported")}, "ok", "no firewall is running here"),
        ({"iptables-save": UNSURE}, "skipped", "is not known, by iptables: eth0 (ports"),
        ({"iptables-save": SAVED, "nft --json": SERVER}, "warn", "drops TCP from neighbours, by nftables: eth0"),
        ({"iptables-save": Ran(code=1, err="odd"), "nft --json": SERVER}, "warn", "drops TCP from neighbours"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_not_called_well(
    tmp_path: Path, programs: dict[str, str | Ran], verdict: str, says: str
) -> None:
    """A program that did not tell its rules, and rules that can't be decided here, are no all-clear; a certainty is told in spite of them."""
    (told,) = ask("firewall", tmp_path, programs=programs)
    assert told.verdict == verdict
    assert says in f"{told.what}: {told.why}"


def test_hosts_without_rules(tmp_path: Path) -> None:
    """A firewall that may not be read is told as that, and one without rules drops nothing."""
    host = make_host(
        tmp_path,
        programs={
            "iptables-save": "*filter\n:INPUT ACCEPT [0:0]\nCOMMIT\n",
            "nft --json": '{"nftables": []}',
        },
    )
    firewall = find_firewall(host)
    packet = make_packet(ETH0, 40000)
    assert packet is not None
    assert packet.source == "10.0.0.2"
    assert not firewall.program
    assert firewall.drops(packet) is False
    assert make_packet(LOOPBACK, 40000) is None
    assert "neither nft nor iptables" in find_firewall(make_host(tmp_path)).why
