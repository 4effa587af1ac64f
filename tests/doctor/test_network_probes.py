"""What the network probes tell of hosts in all kinds of states, and that they are silent on a healthy one."""

from __future__ import annotations

import shlex
import socket
from typing import TYPE_CHECKING

import pytest

from clocks import FakeClock
from fake_hosts import ETH0, LOOPBACK, look, make_host, make_interface
from network_hosts import (
    DOCKER0,
    ETH1,
    GPU,
    IB,
    NAMES,
    SECOND,
    TWO,
    VPN,
    ask,
    compare,
    facts_of,
    find,
    find_bad,
    find_one,
)
from rankwise.doctor.host import Host, JobShape
from rankwise.doctor.network.interfaces import read_interfaces
from rankwise.doctor.probes import master_address, ports

if TYPE_CHECKING:
    from pathlib import Path

IDS = ("hostname", "interfaces", "gloo-variables", "nccl-variables", "torch-variables", "ports", "firewall", "infiniband",
       "master-address")  # fmt: skip


@pytest.mark.parametrize("probe", IDS)
@pytest.mark.parametrize(
    "job",
    [JobShape(), JobShape(num_nodes=1, num_ranks=2, master_addr="localhost", master_port=29500), TWO, SECOND],
    ids=["none", "one", "first", "second"],
)
def test_a_healthy_host_is_well(tmp_path: Path, probe: str, job: JobShape) -> None:
    """Of a host with GPUs, InfiniBand, docker and a VPN, well set up, nothing bad is told, whatever the job is."""
    names = {"host0": ["10.0.0.2" if job is SECOND else "10.0.0.1"], "node0": ["10.0.0.1"]}
    eth0 = make_interface("eth0", "10.0.0.2/24", "fe80::2/64") if job is SECOND else ETH0
    down = make_interface("docker0", "172.17.0.1/16", kind="container", is_up=False)
    env = {"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_IB_HCA": "mlx5", "OMP_NUM_THREADS": "8",
           "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "NCCL_ALGO": "^nvls", "NCCL_OFI_NIC_DUP": "1", "NCCL_VERSION": "2.27"}  # fmt: skip
    programs = {"timedatectl show": "yes\n", "iptables-save": "*filter\n:INPUT ACCEPT [0:0]\nCOMMIT\n"}
    for one in (env, {}):
        told = ask(
            probe, tmp_path, job=job, names=names, interfaces=[LOOPBACK, eth0, down, VPN], env=one, files={**GPU, **IB}, programs=programs
        )  # fmt: skip
        assert not find_bad(told), told


@pytest.mark.parametrize("probe", IDS)
def test_this_host_can_be_asked(probe: str) -> None:
    """Each probe tells something of the real host, and nothing fails there with a job of one host."""
    told = look(find(probe), Host(env={}))
    assert told
    assert not [one for one in told if one.verdict == "fail"]


@pytest.mark.parametrize("probe", IDS)
def test_an_empty_host_is_no_mistake(tmp_path: Path, probe: str) -> None:
    """Where nothing can be read, probes say so, and do not raise."""
    assert look(find(probe), make_host(tmp_path))


# -- hostname


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["127.0.1.1"], "host0 is 127.0.1.1"),
        ([], "has no address"),
        (["10.0.0.9"], "which is on no interface here"),
    ],
)
def test_names_that_lead_to_loopback(tmp_path: Path, names: list[str], words: str) -> None:
    """With several hosts a name without an address of its own is I5; what is pasted as a whole sets the variable, and a remark tells the line of the file."""
    told = find_one(ask("hostname", tmp_path, names={"host0": names}))
    assert (told.verdict, told.class_id) == ("fail", "I5")
    assert words in told.what
    assert shlex.split(told.fix, comments=True) == ["export", "GLOO_SOCKET_IFNAME=eth0"]
    assert told.fix.splitlines()[1:] == ["# or, for good:", "# in /etc/hosts, host0 must stand in one line only: 10.0.0.1 host0"]  # fmt: skip


def test_a_host_with_a_name_that_is_a_command(tmp_path: Path) -> None:
    """What the host calls itself becomes no command: the file is told what is to stand there."""
    host = make_host(tmp_path, name="x';touch f", names={}, job=TWO, interfaces=[LOOPBACK, ETH0])
    assert "touch" not in find_one(look(find("hostname"), host)).fix


def test_names_on_one_host(tmp_path: Path) -> None:
    """On one host any answer will do; with the variable set nobody asks for the name; NCCL alone makes it a warning."""
    for names in (["127.0.1.1"], [], ["10.0.0.9"]):
        assert not find_bad(ask("hostname", tmp_path, names={"host0": names}, job=JobShape()))
    loop = {"host0": ["127.0.1.1"]}
    assert not find_bad(ask("hostname", tmp_path, names=loop, env={"GLOO_SOCKET_IFNAME": "eth0"}))
    nccl = JobShape(num_nodes=2, backend="nccl")
    assert find_one(ask("hostname", tmp_path, names=loop, job=nccl)).verdict == "warn"


def test_a_host_nobody_can_reach(tmp_path: Path) -> None:
    """Without an interface for other hosts no variable is proposed."""
    told = find_one(ask("hostname", tmp_path, names={}, interfaces=[LOOPBACK, DOCKER0]))
    assert told.fix.startswith("ip -br addr")


def test_a_slow_name_server(tmp_path: Path) -> None:
    """A look-up of three seconds is told, with its time."""
    clock = FakeClock()

    def look_up(name: str) -> tuple[str, ...]:
        clock.sleep(3.0)
        return ("10.0.0.1",)

    host = Host(
        env={}, root=tmp_path, name="host0", clock=clock, lookup=look_up, answers={read_interfaces: (LOOPBACK, ETH0)}
    )
    told = find_one(look(find("hostname"), host))
    assert told.what == "looking up host0 took 3.0 s"


def test_two_hosts_of_one_name() -> None:
    """Hosts that have the same name are told with their distinct names."""
    (told,) = compare("hostname", {"a": {"name": "node"}, "b": {"name": "node"}, "c": {"name": "other"}})
    assert told.hosts == ("a", "b")
    assert not compare("hostname", {"a": {"name": "a"}, "b": {"name": "b"}})


# -- interfaces


def test_gloo_on_a_bridge_of_containers(tmp_path: Path) -> None:
    """A name that leads to docker0 while there is a real interface breaks jobs of several hosts; named by the variable it is meant."""
    names = {"host0": ["172.17.0.1"], "node0": ["10.0.0.1"]}
    told = find_one(ask("interfaces", tmp_path, names=names, interfaces=[LOOPBACK, DOCKER0, ETH0]))
    assert told.verdict == "fail"
    assert told.fix == "export GLOO_SOCKET_IFNAME=eth0"
    assert not find_bad(ask("interfaces", tmp_path, names=names, interfaces=[LOOPBACK, DOCKER0, ETH0], job=JobShape()))


def test_nccl_takes_a_vpn(tmp_path: Path) -> None:
    """NCCL on a VPN first is I7: sure if the master is elsewhere, doubtful if not known, and right if the master is there."""
    interfaces, gloo = (
        [LOOPBACK, VPN, ETH0, make_interface("eth01", "10.7.0.1/24")],
        {"GLOO_SOCKET_IFNAME": "eth0"},
    )
    told = find_one(ask("interfaces", tmp_path, interfaces=interfaces, files=GPU, env=gloo))
    assert (told.verdict, told.class_id) == ("fail", "I7")
    assert told.fix == "export NCCL_SOCKET_IFNAME==eth0"  # eth0 would fit eth01, too
    unknown = JobShape(num_nodes=2)
    assert (
        find_one(ask("interfaces", tmp_path, interfaces=interfaces, files=GPU, env=gloo, job=unknown)).verdict == "warn"
    )
    meant = JobShape(num_nodes=2, master_addr="100.64.0.3")
    assert not find_bad(ask("interfaces", tmp_path, interfaces=interfaces, files=GPU, env=gloo, job=meant))
    named = {**gloo, "NCCL_SOCKET_IFNAME": "tailscale0"}
    assert not find_bad(ask("interfaces", tmp_path, interfaces=interfaces, files=GPU, env=named))


def test_nccl_takes_bridges_besides(tmp_path: Path) -> None:
    """A bridge of containers besides the right interface is a warning, but not where data goes by InfiniBand, or NCCL is not used."""
    bridge = make_interface("br-0123456789ab", "172.18.0.1/16", kind="container")
    told = find_one(ask("interfaces", tmp_path, interfaces=[LOOPBACK, ETH0, bridge], files=GPU))
    assert (told.verdict, told.class_id) == ("warn", "I7")
    assert "besides eth0" in told.what
    assert told.fix == "export NCCL_SOCKET_IFNAME=eth0"
    fast = {**GPU, **IB}
    assert not find_bad(ask("interfaces", tmp_path / "fast", interfaces=[LOOPBACK, ETH0, bridge], files=fast))
    off = {"NCCL_IB_DISABLE": "1"}
    assert find_bad(ask("interfaces", tmp_path / "fast", interfaces=[LOOPBACK, ETH0, bridge], env=off))
    assert not find_bad(ask("interfaces", tmp_path / "cpu", interfaces=[LOOPBACK, ETH0, bridge]))


def test_no_interface_for_other_hosts(tmp_path: Path) -> None:
    """A host whose cable is down, or has an address for the cable only, can't join; one with a VPN can."""
    down = make_interface("eth0", is_up=False)
    local = make_interface("eth1", "169.254.3.4/16")
    told = find_one(ask("interfaces", tmp_path, interfaces=[LOOPBACK, down, local]))
    assert told.verdict == "fail"
    assert "eth0 down; eth1 with a link-local address only" in told.what
    assert told.fix == "sudo ip link set dev eth0 up"
    assert not find_bad(ask("interfaces", tmp_path, interfaces=[LOOPBACK, VPN]))


def test_the_pods_of_a_node_do_not_bury_its_own_interfaces(tmp_path: Path) -> None:
    """A node of Kubernetes has a cable for each pod, with an address for that cable only: they are not listed."""
    pods = [make_interface(f"cali{number:011x}", "fe80::1/64", kind="container") for number in range(200)]
    own = (LOOPBACK, ETH0, *pods)
    (told,) = [one for one in ask("interfaces", tmp_path, interfaces=own) if one.verdict == "ok"]
    assert told.what.startswith("eth0 (10.0.0.1)")
    assert "cali" not in told.what
    told = find_one(ask("nccl-variables", tmp_path, interfaces=own, env={"NCCL_SOCKET_IFNAME": "wlan"}))
    assert "there are: lo, eth0, cali" in told.what
    assert told.what.endswith(" more")


# -- ports, master


def test_a_master_of_ipv6(tmp_path: Path) -> None:
    """A master that is IPv6 first is told where this host has none; one that is nothing else fails; with a route all is well."""
    both = {**NAMES, "node0": ["fd00::1", "10.0.0.1"]}
    told = find_one(ask("master-address", tmp_path, names=both))
    assert (told.verdict, told.class_id, told.fix) == (
        "warn",
        "I22",
        "export MASTER_ADDR=10.0.0.1  # on all hosts",
    )
    only = {**NAMES, "node0": ["fd00::1"]}
    assert find_one(ask("master-address", tmp_path, names=only, job=JobShape(num_nodes=2, master_addr="node0"))).verdict == "fail"  # fmt: skip
    routed = make_interface("eth0", "10.0.0.1/24", "fd00::2/64")
    assert not find_bad(ask("master-address", tmp_path, names=both, interfaces=[LOOPBACK, routed]))


LISTENING = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:733C 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0 100 0 0 10 0
"""


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    """Who holds the master's port is named, with a way out; only where the ranks meet it matters."""
    files = {"/proc/net/tcp": LISTENING, "/proc/77/cmdline": "python\0old.py\0"}
    told = find_one(ask("ports", tmp_path, files=files))
    assert (told.verdict, told.class_id) == ("fail", "I9")
    assert "a process of another user" in told.what
    assert told.fix == "export MASTER_PORT=29501  # on all hosts"
    (tmp_path / "proc/77/fd").mkdir()
    (tmp_path / "proc/77/fd/3").symlink_to("socket:[4711]")
    told = find_one(ask("ports", tmp_path))
    assert "pid 77 (python old.py)" in told.what
    assert told.fix == "kill 77  # if it is left over"
    (skipped,) = ask("ports", tmp_path, job=SECOND)
    assert skipped.verdict == "skipped"


def test_a_real_port_that_is_taken() -> None:
    """A port that this very process holds is taken to be the doctor's own; one of a child is not."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        job = JobShape(master_addr="127.0.0.1", master_port=port)
        assert not [one for one in look(ports.PROBE, Host(env={}, job=job)) if one.class_id == "I9"]


def test_ports_below_1024(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only root may open port 80, unless the kernel allows it."""
    job = JobShape(num_nodes=2, master_addr="node0", master_port=80, is_master=True)
    assert not find_bad(ask("ports", tmp_path, job=job)) or ports.os.geteuid() != 0
    monkeypatch.setattr(ports.os, "geteuid", lambda: 1000, raising=False)
    assert "below 1024" in find_one(ask("ports", tmp_path, job=job)).what
    files = {"/proc/sys/net/ipv4/ip_unprivileged_port_start": "0"}
    assert not find_bad(ask("ports", tmp_path, job=job, files=files))


def test_a_port_that_the_system_may_give_away(tmp_path: Path) -> None:
    """A port of the ephemeral range may be taken by chance: a warning with both numbers."""
    told = find_one(ask("ports", tmp_path, job=JobShape(num_nodes=2, master_port=40000)))
    assert told.verdict == "warn"
    assert "40000 is in the ephemeral range (32768 to 60999)" in told.what


@pytest.mark.parametrize(
    ("names", "job", "verdict", "class_id"),
    [
        ({}, TWO, "fail", "I3"),
        (NAMES, JobShape(num_nodes=2, master_addr="localhost"), "fail", "I4"),
        (NAMES, JobShape(num_nodes=2, master_addr="127.0.0.1", is_master=True), "fail", "I4"),
        (NAMES, JobShape(num_nodes=2, master_addr="0.0.0.0", is_master=False), "fail", "I4"),
        (NAMES, JobShape(num_nodes=2, master_addr="::", is_master=True), "warn", "I4"),
        (NAMES, JobShape(num_nodes=2, master_addr="node0:29500"), "fail", "I3"),
        (NAMES, JobShape(master_addr="127.0.0.1:29500"), "fail", "I3"),
        (NAMES, JobShape(num_nodes=2, master_addr="tcp://node0"), "fail", "I3"),
        ({"node0": ["127.0.1.1"]}, SECOND, "fail", "I2"),
        (NAMES, SECOND, "warn", "I2"),
        ({"node0": ["10.0.0.44"]}, TWO, "warn", "I2"),
    ],
)
def test_wrong_masters(tmp_path: Path, names: dict[str, list[str]], job: JobShape, verdict: str, class_id: str) -> None:
    """A master without an address, at localhost, at this host though it is another one, and the other way round, are told."""
    told = find_one(ask("master-address", tmp_path, names=names, job=job))
    assert (told.verdict, told.class_id) == (verdict, class_id)


@pytest.mark.parametrize(
    ("addr", "what", "fix"),
    [
        ("node0:123", "node0:123 is more than", "export MASTER_ADDR=node0 MASTER_PORT=123"),
        ("node0 ", "'node0 ' is more than", "export MASTER_ADDR=node0"),
        ("[fd00::1]", "[fd00::1] is more than", "export MASTER_ADDR=fd00::1"),
    ],
)
def test_more_than_a_name(tmp_path: Path, addr: str, what: str, fix: str) -> None:
    """A port, a blank that nobody sees, and brackets are told as what they are, and no line for /etc/hosts is made of them."""
    told = find_one(ask("master-address", tmp_path, names=NAMES, env={"MASTER_ADDR": addr}, job=JobShape()))
    assert (told.verdict, told.class_id) == ("fail", "I3")
    assert what in told.what
    assert told.fix.startswith(fix)
    assert "/etc/hosts" not in told.fix


def test_a_launcher_sets_the_address_anew(tmp_path: Path) -> None:
    """What MASTER_ADDR says matters to nobody where a launcher is to start, and its flags may have brackets."""
    launch = JobShape(master_addr="[fd00::1]", is_launch=True)
    own = [LOOPBACK, make_interface("eth0", "fd00::1/64")]
    env = {"MASTER_ADDR": "node0:123"}
    assert not find_bad(ask("master-address", tmp_path, env=env, job=launch, interfaces=own))


def test_right_masters(tmp_path: Path) -> None:
    """Loopback, and the address of all addresses, are right on one host, in the first pod, and by the first host's own name."""
    assert not find_bad(ask("master-address", tmp_path, job=JobShape(master_addr="0.0.0.0")))
    assert not find_bad(ask("master-address", tmp_path, job=JobShape(master_addr="localhost")))
    pod = JobShape(num_nodes=2, master_addr="localhost", is_master=True)
    assert not find_bad(ask("master-address", tmp_path, job=pod, env={"KUBERNETES_SERVICE_HOST": "10.96.0.1"}))
    assert not find_bad(ask("master-address", tmp_path, names={"node0": ["127.0.1.1"]}))
    assert not find_bad(ask("master-address", tmp_path, names={"node0": ["10.0.0.2"]}, job=SECOND))


def test_an_endpoint_that_nobody_owns(tmp_path: Path) -> None:
    """With c10d, an endpoint at another interface than the host's name is I21."""
    names = {"node0": ["192.168.7.1"], "host0": ["10.0.0.1"]}
    env = {"PET_RDZV_BACKEND": "c10d"}
    told = find_one(ask("master-address", tmp_path, names=names, env=env, interfaces=[LOOPBACK, ETH0, ETH1]))
    assert told.class_id == "I21"
    assert not find_bad(ask("master-address", tmp_path, env=env))


def test_a_master_given_by_its_address_is_no_name() -> None:
    """An address means itself: that is not told as if it had been looked up; of a name it is."""
    assert master_address._report_ips("10.77.0.1", ["10.77.0.1"]) == "the master's address is 10.77.0.1"
    assert master_address._report_ips("node0", ["10.77.0.1"]) == "node0 is 10.77.0.1"


# -- InfiniBand


def test_connections_of_others_that_have_ended_take_no_port(tmp_path: Path) -> None:
    """A busy proxy's ports in TIME_WAIT are each kept for one other address: connections of ranks find the same ports free."""
    files = {"/proc/net/sockstat": "sockets: used 9\nTCP: inuse 4 orphan 0 tw 28000 alloc 4 mem 1\n"}
    assert not find_bad(ask("ports", tmp_path, files=files))


def test_infiniband(tmp_path: Path) -> None:
    """Ports that are down, devices that a container lacks, and little memory to lock are warnings where NCCL is used."""
    assert not find_bad(ask("infiniband", tmp_path / "well", files={**GPU, **IB}))
    down = {
        **IB,
        "/sys/class/infiniband/mlx5_0/ports/1/state": "1: DOWN",
        "/sys/class/infiniband/mlx5_0/ports/1/phys_state": "3: Disabled",
    }
    assert "mlx5_0:1 DOWN (Disabled)" in find_one(ask("infiniband", tmp_path / "down", files={**GPU, **down})).what
    without = {path: text for path, text in IB.items() if not path.startswith("/dev")}
    assert "/dev/infiniband" in find_one(ask("infiniband", tmp_path / "box", files={**GPU, **without})).what
    limits = {
        "/proc/self/limits": "Limit  Soft Limit  Hard Limit  Units\nMax locked memory         65536                65536                bytes\n",
        "/proc/self/status": "CapEff:\t0000000000000000\n",
    }
    assert "lock 64.0 KiB of memory" in find_one(ask("limits", tmp_path / "tight", files={**GPU, **IB, **limits})).what
    root = {**limits, "/proc/self/status": "CapEff:\t000001ffffffffff\n"}
    assert not find_bad(ask("limits", tmp_path / "root", files={**GPU, **IB, **root}))
    efa = {"/sys/class/infiniband/rdmap0s31/ports/1/state": "4: ACTIVE"}
    assert ask("infiniband", tmp_path / "efa", files=efa)[0].verdict == "skipped"


def test_hosts_with_less_infiniband(tmp_path: Path) -> None:
    """A host without InfiniBand among those that have it is named."""
    facts = {
        "a": facts_of(ask("infiniband", tmp_path / "a", files=IB)),
        "b": facts_of(ask("infiniband", tmp_path / "b", files=IB)),
        "c": facts_of(ask("infiniband", tmp_path / "c")),
    }
    told = find_one(compare("infiniband", facts))
    assert told.hosts == ("c",)
    assert not compare("infiniband", {"c": facts["c"], "d": facts["c"]})
