"""Which firewall runs on a host, its rules for the rendezvous port, and the commands that let TCP in and out."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

import pytest

from fake_hosts import make_host
from network_hosts import CABLE, ask, enter_network
from rankwise.doctor.host import JobShape, ProgramResult
from rankwise.doctor.network.firewalls import find_firewall, suggest

if TYPE_CHECKING:
    from pathlib import Path

NET = "10.0.0.0/24"
CLOSED = "*filter\n:INPUT DROP [0:0]\n:OUTPUT ACCEPT [0:0]\n:ufw-user - [0:0]\n-A INPUT -i lo -j ACCEPT\n-A INPUT -j ufw-user\n{}COMMIT\n"
OPEN = "*filter\n:INPUT ACCEPT [0:0]\nCOMMIT\n"
SAVED = "*filter\n:OUTPUT {} [0:0]\n{}COMMIT\n"
NFT = """table inet filter {{
	set open {{
		type inet_service
		elements = {{ 22, 29500 }}
	}}

	chain input {{
		type filter hook input priority filter; policy drop;
		ct state established,related accept
		tcp dport @open accept
{}	}}
}}
"""


def write_output(
    *rules: str, family: str = "inet", table: str = "t", name: str = "output", policy: str = "accept"
) -> dict[str, str]:
    lines = "".join(f"\t\t{rule}\n" for rule in rules)
    chain = f"\tchain {name} {{\n\t\ttype filter hook output priority filter; policy {policy};\n{lines}\t}}\n"
    called = "\tchain called {\n\t\tdrop\n\t}\n"
    return {"nft list ruleset": f"table {family} {table} {{\n{chain}{called}}}\n"}


@pytest.mark.parametrize(
    ("programs", "command"),
    [
        ({"ufw status": "Status: active\n", "iptables-save": CLOSED.format("")}, f"sudo ufw allow from {NET} proto tcp"),
        (
            {"firewall-cmd --state": "running\n"},
            f"sudo firewall-cmd --permanent --zone=trusted --add-source={NET}\nsudo firewall-cmd --reload",
        ),
        ({"iptables-save": CLOSED.format("")}, f"sudo iptables -I INPUT -p tcp -s {NET} -j ACCEPT"),
        ({"nft list ruleset": NFT.format("")}, f"sudo nft insert rule inet filter input ip saddr {NET} meta l4proto tcp accept"),
        ({}, f"# let TCP in from {NET}: in the firewall of this host, or of the cloud (security group)"),
    ],
)  # fmt: skip
def test_opening(tmp_path: Path, programs: dict[str, str], command: str) -> None:
    """The command that lets the others in is that of the firewall that runs there."""
    assert suggest(find_firewall(make_host(tmp_path, programs=programs)), [NET], "input") == command


@pytest.mark.parametrize(
    ("programs", "lines"),
    [
        ({}, [f"# let TCP out to {NET}: in the firewall of this host, or of the cloud (security group)"]),
        ({"iptables-save": SAVED.format("ACCEPT", "")}, ["# let TCP out"]),
        ({"iptables-save": SAVED.format("DROP", "")}, [f"sudo iptables -I OUTPUT -p tcp -d {NET} -j ACCEPT"]),
        ({"iptables-save": SAVED.format("ACCEPT", "-A OUTPUT -p tcp --dport 1024:65535 -j REJECT\n")}, ["sudo iptables -I OUTPUT"]),
        ({"iptables-save": SAVED.format("DROP", ""), "ufw status": "Status: active\n"}, [f"sudo ufw prepend allow out proto tcp to {NET}"]),
        (write_output("drop"), [f"sudo nft insert rule inet t output ip daddr {NET} meta l4proto tcp accept"]),
        (write_output(policy="drop"), ["sudo nft insert rule inet t output"]),
        (write_output("jump called"), ["sudo nft insert rule inet t output"]),
        (write_output("accept"), ["# let TCP out"]),
        ({"nft list ruleset": "no rules"}, ["# let TCP out"]),
        # What iptables keeps in nftables is opened by iptables alone; what others keep there is opened as well.
        ({"iptables-save": SAVED.format("DROP", ""), **write_output(policy="drop", family="ip", table="filter", name="OUTPUT")}, ["sudo iptables"]),
        ({"iptables-save": SAVED.format("DROP", ""), **write_output("reject")}, ["sudo iptables", "sudo nft insert"]),
    ],
)  # fmt: skip
def test_all_that_may_drop_is_opened(tmp_path: Path, programs: dict[str, str], lines: list[str]) -> None:
    """A drop in one chain is not undone in another: each outgoing chain that may drop has its command, no other one has."""
    printed = suggest(find_firewall(make_host(tmp_path, programs=programs)), [NET], "output").splitlines()
    assert len(printed) == len(lines)
    assert all(one.startswith(line) for one, line in zip(printed, lines, strict=True)), printed


def test_firewalld_has_its_own_commands(tmp_path: Path) -> None:
    """The table of firewalld belongs to it: a policy for what goes out, and then a reload."""
    host = make_host(tmp_path, programs=write_output("reject", table="firewalld"))
    printed = suggest(find_firewall(host), [NET], "output")
    assert "nft insert" not in printed
    assert f"destination address={NET} accept" in printed
    assert printed.endswith("sudo firewall-cmd --reload")


HANGS = ProgramResult(code=None, why="nft did not end within 5 s")
PORT = "-A INPUT -p tcp -m tcp --dport 29500 -j ACCEPT\n"


@pytest.mark.parametrize(
    ("programs", "verdict", "says"),
    [
        ({"iptables-save": OPEN}, "ok", "no firewall is running here"),
        ({"iptables-save": OPEN, "nft list": HANGS}, "skipped", "nft did not end within 5 s"),
        ({"iptables-save": OPEN, "nft list": ProgramResult(code=1, err="Protocol not supported")}, "ok", "no firewall is running here"),
        ({}, "skipped", "neither nft nor iptables can be queried here"),
        ({"iptables-save": CLOSED.format("")}, "warn", "no rule accepts 10.0.0.0/24; no rule names port 29500"),
        ({"iptables-save": CLOSED.format(PORT)}, "warn", "rules that name port 29500: -A INPUT -p tcp -m tcp --dport 29500 -j ACCEPT"),
        ({"iptables-save": CLOSED.format(PORT + "-A ufw-user -s 10.0.0.0/8 -j ACCEPT\n")}, "ok", "whether hosts reach each other is tried"),
        ({"iptables-save": CLOSED.format(PORT + "-A ufw-user -s 10.0.7.0/24 -j ACCEPT\n")}, "warn", "no rule accepts 10.0.0.0/24"),
        ({"iptables-save": OPEN.replace("COMMIT", PORT.replace("ACCEPT", "DROP") + "COMMIT")}, "ok", "--dport 29500 -j DROP"),
        ({"iptables-save": OPEN, "nft list": NFT.format("")}, "warn", "no rule accepts 10.0.0.0/24"),
        ({"nft list": NFT.format("\t\tip saddr 10.0.0.0/24 tcp dport 29500 accept\n")}, "warn", "ip saddr 10.0.0.0/24 tcp dport 29500 accept"),
        ({"nft list": NFT.format("\t\tip saddr 10.0.0.0/24 accept\n")}, "ok", "a firewall is running, by nftables"),
        ({"nft list": NFT.format("\t\treject with icmpx admin-prohibited\n").replace("policy drop", "policy accept")}, "warn", "drops what no rule accepts"),
        ({"iptables-save": ProgramResult(code=1, err="odd"), "nft list": NFT.format("")}, "warn", "drops what no rule accepts"),
    ],
)  # fmt: skip
def test_rules_are_shown_and_not_followed(
    tmp_path: Path, programs: dict[str, str | ProgramResult], verdict: str, says: str
) -> None:
    """The rules for the rendezvous port are shown; a firewall that is closed to this host's network is a warning; one that can't be read is skipped."""
    (found,) = ask("firewall", tmp_path, programs=programs)
    assert found.verdict == verdict
    assert says in f"{found.what}: {found.why}"


def test_one_host_needs_no_open_firewall(tmp_path: Path) -> None:
    """What a firewall drops from other hosts does not matter where there are none."""
    (found,) = ask("firewall", tmp_path, programs={"iptables-save": CLOSED.format("")}, job=JobShape())
    assert found.verdict == "ok"
    assert find_firewall(make_host(tmp_path, programs={"iptables-save": OPEN})).program == ""


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
    print(reading.verdict, reading.what, reading.fix, sep="|")
"""


@pytest.mark.parametrize(
    ("program", "rules"),
    [
        ("nft", f"nft -f - <<'E'\n{RULESET}E\n"),
        ("iptables", "iptables -P INPUT DROP\niptables -A INPUT -p tcp --dport 29500 -j ACCEPT\n"),
    ],
)
def test_real_firewalls(program: str, rules: str) -> None:
    """Real rules that let only the rendezvous port in are found; the proposed command, typed as it is, opens the rest."""
    if not shutil.which(program):
        pytest.skip(f"{program} is not installed")
    ask = f"{sys.executable} -c '{ASK_FIREWALL}'"
    first, *_, last = enter_network(
        f"{CABLE.format('wire')}{rules}{ask}\n{ask} | cut -d'|' -f3 | sed s/sudo// | bash -e\n{ask}"
    ).splitlines()
    assert first.startswith("warn|the firewall drops what no rule accepts"), first
    assert "rules that name port 29500: " in first
    assert program in first
    assert last.startswith("ok|a firewall is running"), last
