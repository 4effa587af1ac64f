"""Which firewall runs on a host, and its rules for the rendezvous port."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

import pytest

from network_hosts import CABLE, IPTABLES, ask, enter_network
from rankwise.doctor.host import JobShape, ProgramResult

if TYPE_CHECKING:
    from pathlib import Path

NFT = """table inet filter {
	set open {
		type inet_service
		elements = { 22, 29500 }
	}

	chain input {
		type filter hook input priority filter; policy drop;
		ip saddr 10.0.0.0/24 tcp dport 29500 accept
	}
}
"""
OPEN = "*filter\n:INPUT ACCEPT [0:0]\nCOMMIT\n"
HANGS = ProgramResult(code=None, why="nft did not end within 5 s")
REFUSED = ProgramResult(code=4, err="iptables-save v1.8.9 (nf_tables): Could not fetch rule set generation id: Permission denied (you must be root)\n")  # fmt: skip


@pytest.mark.parametrize(
    ("programs", "verdict", "says"),
    [
        ({"iptables-save": OPEN}, "ok", "rules that name port 29500: none"),
        ({"iptables-save": IPTABLES}, "ok", "rules that name port 29500: -A INPUT -p tcp --dport 29500 -j ACCEPT"),
        ({"nft list": NFT}, "ok", "elements = { 22, 29500 }; ip saddr 10.0.0.0/24 tcp dport 29500 accept"),
        ({"iptables-save": OPEN, "nft list": HANGS}, "ok", "neither ufw nor firewalld is running"),
        ({"iptables-save": OPEN, "ufw status": "Status: active\n"}, "ok", "ufw is running"),
        ({"iptables-save": OPEN, "firewall-cmd --state": "running\n"}, "ok", "firewalld is running"),
        ({"iptables-save": HANGS, "nft list": HANGS}, "skipped", "nft did not end within 5 s"),
        ({"iptables-save": REFUSED}, "skipped", "only root may read the rules"),
    ],
)  # fmt: skip
def test_rules_for_the_port_are_shown(tmp_path: Path, programs: dict[str, str | ProgramResult], verdict: str, says: str) -> None:  # fmt: skip
    """Which firewall runs, and the rules that name the rendezvous port; what can't be read is skipped with the reason."""
    (found,) = ask("firewall", tmp_path, programs=programs)
    assert found.verdict == verdict
    assert says in f"{found.what}: {found.why}"


def test_the_ranks_own_ports_are_told_where_there_are_several_hosts(tmp_path: Path) -> None:
    """The master's port is not enough: that is said where there are other hosts, and not for a single one."""
    programs = {"iptables-save": IPTABLES}
    (found,) = ask("firewall", tmp_path, programs=programs)
    assert found.what.endswith("Gloo and NCCL need ports 32768 to 60999, too: hosts that are checked together try them")
    (found,) = ask("firewall", tmp_path, programs=programs, job=JobShape())
    assert "Gloo" not in found.what


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
from rankwise.doctor.probes.firewall import PROBE
host = Host(job=JobShape(num_nodes=2, master_addr="10.5.0.1", master_port=29500, is_master=True))
for reading in PROBE.look(host):
    print(reading.verdict, reading.what, sep="|")
"""


@pytest.mark.parametrize(
    ("program", "rules"),
    [
        ("nft", f"nft -f - <<'E'\n{RULESET}E\n"),
        ("iptables", "iptables -P INPUT DROP\niptables -A INPUT -p tcp --dport 29500 -j ACCEPT\n"),
    ],
)
def test_real_firewalls(program: str, rules: str) -> None:
    """Real rules that let the rendezvous port in are shown."""
    if not shutil.which(program):
        pytest.skip(f"{program} is not installed")
    told = enter_network(f"{CABLE.format('wire')}{rules}{sys.executable} -c '{ASK_FIREWALL}'")
    assert told.startswith("ok|")
    shown = told.partition("rules that name port 29500: ")[2]
    assert "dport" in shown
    assert "accept" in shown.lower()
