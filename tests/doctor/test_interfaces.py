"""The rules by which Gloo and NCCL choose an address, and what interfaces are."""

from __future__ import annotations

import json
import sys
from collections import namedtuple
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from fake_hosts import ETH0, LOOPBACK, make_host, make_interface
from network_hosts import CABLE, enter_network
from rankwise.doctor.host import Host, resolve
from rankwise.doctor.network.gloo_nccl import (
    choose_nccl_interfaces,
    find_gloo_address,
    match_names,
    read_settings,
)
from rankwise.doctor.network.interfaces import (
    choose_best,
    find_kind,
    read_interfaces,
)

if TYPE_CHECKING:
    from pathlib import Path

DOCKER0 = make_interface("docker0", "172.17.0.1/16", kind="container")
IB0 = make_interface("ib0", "10.9.0.1/24", kind="infiniband")
NAMES = {"host0": ["127.0.1.1"]}


@pytest.mark.parametrize(
    ("name", "files", "kind"),
    [
        ("lo", {"type": "772"}, "loopback"),
        ("ib0", {"type": "32"}, "infiniband"),
        ("docker0", {"type": "1", "bridge/bridge_id": "x"}, "container"),
        ("br-0123456789ab", {"type": "1", "bridge/bridge_id": "x"}, "container"),
        ("br-ex", {"type": "1"}, "virtual"),
        ("br0", {"type": "1", "bridge/bridge_id": "x"}, "bridge"),
        ("veth12ab", {"type": "1"}, "container"),
        ("tailscale0", {"type": "65534", "tun_flags": "0x1001"}, "vpn"),
        ("wg0", {"type": "65534"}, "vpn"),
        ("office", {"type": "1", "tun_flags": "0x1001"}, "vpn"),
        ("wlp3s0", {"type": "1", "wireless/x": "", "device/x": ""}, "wireless"),
        ("eth0", {"type": "1"}, "virtual"),
        ("bond0", {"type": "1"}, "virtual"),
        ("enp1s0", {"type": "1", "device/vendor": "0x8086"}, "ethernet"),
        ("en0", {}, "ethernet"),
    ],
)
def test_kinds(tmp_path: Path, name: str, files: dict[str, str], kind: str) -> None:
    """The kernel's files and the names that programs give tell what an interface is; without any it is taken for a cable."""
    host = make_host(tmp_path, files={f"/sys/class/net/{name}/{path}": text for path, text in files.items()})
    assert find_kind(host, name) == kind


def test_this_host_has_loopback() -> None:
    """On a real host loopback is found, with its address and its kind."""
    lo = next(one for one in Host().ask(read_interfaces) if one.kind == "loopback")
    assert "127.0.0.1" in [str(address.ip) for address in lo.addresses]
    assert resolve("127.0.0.1") == ("127.0.0.1",)
    assert resolve("no-such-host.invalid") == ()


@pytest.mark.parametrize(
    ("variable", "names", "address"),
    [
        (None, ["127.0.1.1"], "127.0.1.1"),
        (None, ["10.0.0.1", "127.0.1.1"], "10.0.0.1"),
        (None, ["10.0.0.9", "10.0.0.1"], "10.0.0.1"),
        (None, ["10.0.0.9"], "127.0.0.1"),
        (None, [], "127.0.0.1"),
        ("eth0", ["127.0.1.1"], "10.0.0.1"),
        ("eth0,lo", ["127.0.1.1"], "10.0.0.1"),
        ("e", ["10.0.0.1"], "10.0.0.1"),
        ("eth9", ["10.0.0.1"], ""),
        (" eth0", ["10.0.0.1"], ""),
        ("^docker0", ["10.0.0.1"], ""),
    ],
)
def test_gloo_address(tmp_path: Path, variable: str | None, names: list[str], address: str) -> None:
    """Gloo takes the variable letter by letter, else the first of the name's addresses that is ours, else loopback."""
    env = {"GLOO_SOCKET_IFNAME": variable} if variable is not None else {}
    host = make_host(tmp_path, env=env, names={"host0": names}, interfaces=[LOOPBACK, ETH0])
    assert find_gloo_address(host, host.ask(read_interfaces)) == address


@pytest.mark.parametrize(
    ("env", "taken"),
    [
        ({}, ["ib0"]),
        ({"NCCL_SOCKET_IFNAME": "eth"}, ["eth0", "eth10"]),
        ({"NCCL_SOCKET_IFNAME": "=eth0"}, ["eth0"]),
        ({"NCCL_SOCKET_IFNAME": "=eth0,docker0"}, ["docker0", "eth0"]),
        ({"NCCL_SOCKET_IFNAME": "^docker,lo"}, ["eth0", "eth10", "ib0"]),
        ({"NCCL_SOCKET_IFNAME": "^=eth0"}, ["lo", "docker0", "eth10", "ib0"]),
        ({"NCCL_SOCKET_IFNAME": "eno"}, []),
        ({"NCCL_SOCKET_IFNAME": "e"}, ["ib0"]),
        ({"NCCL_SOCKET_IFNAME": "eth", "NCCL_SOCKET_FAMILY": "AF_INET6"}, ["eth0"]),
    ],
)
def test_nccl_interfaces(tmp_path: Path, env: dict[str, str], taken: list[str]) -> None:
    """NCCL takes beginnings, whole names, or all but some, as its guide says; a value of one letter is none."""
    eth10, down = make_interface("eth10", "10.1.0.1/24"), make_interface("eth1", "10.2.0.1/24", is_up=False)
    interfaces = [LOOPBACK, DOCKER0, ETH0, eth10, down, IB0]
    host = make_host(tmp_path, env=env, interfaces=interfaces)
    assert [one.name for one, _ in choose_nccl_interfaces(host, interfaces)] == taken


def test_nccl_takes_docker_last(tmp_path: Path) -> None:
    """Without InfiniBand NCCL takes all but docker's and lo; then docker's; then lo; NCCL_COMM_ID chooses a network."""
    host = make_host(tmp_path)
    veth = make_interface("veth1", "fe80::5/64", kind="container")
    assert [one.name for one, _ in choose_nccl_interfaces(host, [LOOPBACK, DOCKER0, veth, ETH0])] == [
        "eth0",
        "veth1",
    ]
    assert [one.name for one, _ in choose_nccl_interfaces(host, [LOOPBACK, DOCKER0])] == ["docker0"]
    assert [str(address.ip) for _, address in choose_nccl_interfaces(host, [LOOPBACK])] == ["127.0.0.1"]
    assert choose_nccl_interfaces(host, []) == []
    near = make_host(tmp_path, env={"NCCL_COMM_ID": "10.3.0.9:4000"})
    other = make_interface("eth5", "10.3.0.1/24")
    assert [one.name for one, _ in choose_nccl_interfaces(near, [LOOPBACK, ETH0, other])] == ["eth5"]


def test_nccl_settings_by_their_order(tmp_path: Path) -> None:
    """The environment wins over the user's file, and that over /etc/nccl.conf."""
    files = {
        "/home/me/.nccl.conf": "NCCL_DEBUG=INFO\nNCCL_NTHREADS=256\n",
        "/etc/nccl.conf": "# all hosts\nNCCL_NTHREADS=64\nNCCL_PROTO=LL\n",
    }
    host = make_host(tmp_path, files=files, env={"NCCL_DEBUG": "WARN", "HOME": "/home/me"})
    told = {name: (one.value, one.source) for name, one in read_settings(host).items() if name != "HOME"}
    assert told == {
        "NCCL_DEBUG": ("WARN", ""), "NCCL_NTHREADS": ("256", "/home/me/.nccl.conf"), "NCCL_PROTO": ("LL", "/etc/nccl.conf"),
    }  # fmt: skip
    assert match_names("mlx5_1", ["mlx5_0", "mlx5_1", "mlx5_10"]) == ("mlx5_1", "mlx5_10")
    assert match_names("=mlx5_1:1", ["mlx5_0", "mlx5_1", "mlx5_10"]) == ("mlx5_1",)


def test_best_interface() -> None:
    """The one in the master's network is best; cables come before bridges; containers' and VPNs are never proposed."""
    second = make_interface("eth1", "192.168.7.4/24")
    vpn = make_interface("tailscale0", "100.64.0.3/32", kind="vpn")
    assert choose_best([LOOPBACK, DOCKER0, vpn, second, ETH0]) == second
    assert choose_best([LOOPBACK, second, ETH0], near=["10.0.0.77"]) == ETH0
    assert choose_best([LOOPBACK, DOCKER0, vpn]) is None


#: One process that asks torch and us by turns: which address does Gloo listen at?
ASK_GLOO = """
import json, os, sys, tempfile
import torch.distributed as dist
from rankwise.doctor.host import Host
from rankwise.doctor.network.gloo_nccl import find_gloo_address
from rankwise.doctor.network.interfaces import read_interfaces

def find_listening():
    found = set()
    for line in open("/proc/self/net/tcp").read().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A":
            number = words[1].split(":")[0]
            found.add(".".join(str(int(number[at : at + 2], 16)) for at in (6, 4, 2, 0)))
    return sorted(found)

answers = []
for hosts, variable in json.loads(sys.argv[1]):
    open("/etc/hosts", "w").write(hosts)
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    if variable:
        os.environ["GLOO_SOCKET_IFNAME"] = variable
    host = Host()
    ours = find_gloo_address(host, host.ask(read_interfaces))
    try:
        dist.init_process_group("gloo", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
        theirs = find_listening()
        dist.destroy_process_group()
    except RuntimeError:
        theirs = [""]
    answers.append([ours, theirs])
print(json.dumps(answers))
"""


def test_gloo_takes_what_we_say(tmp_path: Path) -> None:
    """In a real network torch listens where we say that it will: by the name's address, by its lack, and by the variable."""
    hosts = tmp_path / "hosts"
    hosts.write_text("")
    cases = [
        ("127.0.1.1 node7\n", ""), ("10.5.0.1 node7\n", ""), ("10.5.0.99 node7\n", ""), ("127.0.0.1 localhost\n", ""),
        ("127.0.1.1 node7\n", "wire"), ("127.0.1.1 node7\n", "wire,lo"), ("10.5.0.1 node7\n", "w"), ("10.5.0.1 node7\n", "nic"),
    ]  # fmt: skip
    told = enter_network(
        "hostname node7; ip link set lo up; ip link add wire type veth peer name far; ip link set far up; ip addr add 10.5.0.1/24 dev wire; ip link set wire up;"
        'exec "$0" "$@"'.replace("$0", sys.executable),
        "-c", ASK_GLOO, json.dumps(cases), hosts=hosts,
    )  # fmt: skip
    answers = json.loads(told.splitlines()[-1])
    expected = ["127.0.1.1", "10.5.0.1", "127.0.0.1", "127.0.0.1", "10.5.0.1", "10.5.0.1", "10.5.0.1", ""]
    assert [ours for ours, _ in answers] == expected
    for case, (ours, theirs) in zip(cases, answers, strict=True):
        assert ours in theirs, (case, ours, theirs)


ASK_PROBE = """
import sys
from rankwise.doctor import registry
from rankwise.doctor.host import Host, JobShape
for reading in registry.find(sys.argv[1])[0].look(Host(job=JobShape(num_nodes=2, backend=sys.argv[2]))):
    print(reading.verdict, reading.what, (reading.fix.splitlines() or [""])[0], sep="|")
"""


@pytest.mark.parametrize(
    ("probe", "wrong", "words"),
    [
        ("hostname", "", "fail|node7 is 127.0.1.1; Gloo takes 127.0.1.1"),
        (
            "gloo-variables",
            "export GLOO_SOCKET_IFNAME=wier",
            "fail|GLOO_SOCKET_IFNAME=wier: this host has no interface wier",
        ),
        ("gloo-variables", "export GLOO_SOCKET_IFNAME=^far", "fail|GLOO_SOCKET_IFNAME=^far"),
        (
            "nccl-variables",
            "export NCCL_SOCKET_IFNAME=eth",
            "fail|NCCL_SOCKET_IFNAME=eth matches no interface",
        ),
    ],
)
def test_real_hosts_are_cured(tmp_path: Path, probe: str, wrong: str, words: str) -> None:
    """In a real network, with a hosts file of its own, the mistake is found, and the first line of the fix cures it."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n127.0.1.1 node7\n")
    program = tmp_path / "ask.py"
    program.write_text(ASK_PROBE)
    ask = f"{sys.executable} {program} {probe} {'nccl' if probe == 'nccl-variables' else 'gloo'}"
    cure = f'eval "$({ask} | grep ^fail | cut -d"|" -f3)"'
    told = enter_network(
        f"hostname node7; {CABLE.format('wire')}{wrong}\n{ask}\n{cure}\necho cured\n{ask}", hosts=hosts
    )
    before, _, after = told.partition("cured\n")
    assert words in before
    assert "fail|" not in after
    assert after.startswith("ok|")


def test_real_kinds() -> None:
    """The kernel's own bridge, tunnel and pair of virtual cables are told apart."""
    script = (
        "mount -t sysfs none /sys; ip link set lo up; ip link add wire type veth peer name vethfar; ip link add home type bridge;"
        "ip tuntap add dev office mode tun 2>/dev/null || true\n"
    )
    ask = "import sys; from rankwise.doctor.host import Host; from rankwise.doctor.network.interfaces import read_interfaces; print(*(f'{i.name}={i.kind}' for i in Host().ask(read_interfaces)))"
    told = set(enter_network(f'{script}{sys.executable} -c "{ask}"').split())
    assert {"lo=loopback", "wire=virtual", "vethfar=container", "home=bridge"} <= told
    assert not any(one.startswith("office=") and one != "office=vpn" for one in told)


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


def test_loopback_is_known_by_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no file tells what an interface is, as on macOS (lo0) and Windows, loopback is no interface on which hosts could meet."""
    import psutil

    names = {"lo0": ("127.0.0.1", "255.0.0.0"), "en0": ("192.168.1.5", "255.255.255.0")}
    stats = Stats(isup=True, mtu=16384, speed=0, flags="up,running,multicast")
    monkeypatch.setattr(psutil, "net_if_stats", lambda: dict.fromkeys(names, stats))
    shown = {name: [SimpleNamespace(family=2, address=ip, netmask=mask)] for name, (ip, mask) in names.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: shown)
    found = read_interfaces(make_host(tmp_path))
    assert [(one.name, one.kind, one.is_candidate) for one in found] == [
        ("lo0", "loopback", False),
        ("en0", "ethernet", True),
    ]
