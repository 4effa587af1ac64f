"""Hosts with networks for tests of the doctor: what one of them has, and what a probe tells of it."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from fake_hosts import ETH0, LOOPBACK, look, make_host, make_interface
from rankwise.doctor import registry
from rankwise.doctor.host import JobShape
from support import make_env

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rankwise.doctor.network.interfaces import Interface
    from rankwise.doctor.probe import Probe, Reading

ETH1 = make_interface("eth1", "192.168.7.1/24")
DOCKER0 = make_interface("docker0", "172.17.0.1/16", kind="container")
VPN = make_interface("tailscale0", "100.64.0.3/32", kind="vpn")
TWO = JobShape(num_nodes=2, num_ranks=4, master_addr="node0", master_port=29500, is_master=True)
SECOND = JobShape(num_nodes=2, num_ranks=4, master_addr="node0", master_port=29500, is_master=False)
NAMES = {"host0": ["10.0.0.1"], "node0": ["10.0.0.1"]}
IPTABLES = "*filter\n:INPUT DROP [0:0]\n-A INPUT -i lo -j ACCEPT\n-A INPUT -p tcp --dport 29500 -j ACCEPT\nCOMMIT\n"
GPU = {"/dev/nvidiactl": "", **{f"/proc/driver/nvidia/gpus/000{n}/information": "" for n in range(2)}}
IB = {
    "/sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
    "/sys/class/infiniband/mlx5_0/ports/1/phys_state": "5: LinkUp",
    "/sys/class/infiniband/mlx5_0/ports/1/rate": "200 Gb/sec (4X HDR)",
    "/sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand",
    "/dev/infiniband/uverbs0": "",
}


def find(id_: str) -> Probe:
    """Return a probe, and import no others."""
    return registry.find(id_)[0]


def ask(probe: str, root: Path, *, interfaces: Sequence[Interface] = (LOOPBACK, ETH0), names: Mapping[str, Sequence[str]] | None = None,
        job: JobShape = TWO, **more: object) -> list[Reading]:  # fmt: skip
    """Return what a probe tells of a host that is healthy but for what is given."""
    names = NAMES if names is None else names
    return look(find(probe), make_host(root, interfaces=interfaces, names=names, job=job, **more))  # type: ignore[arg-type]


def find_bad(readings: Sequence[Reading]) -> list[Reading]:
    """Return the readings that warn or fail."""
    return [one for one in readings if one.verdict in {"warn", "fail"}]


def find_one(readings: Sequence[Reading]) -> Reading:
    """Return the only reading that warns or fails."""
    (one,) = find_bad(readings)
    assert one.why
    assert one.fix
    return one


def compare(probe: str, facts: Mapping[str, Mapping[str, object]]) -> list[Reading]:
    """Return what a probe tells of several hosts."""
    ask_all = find(probe).compare
    assert ask_all is not None
    return list(ask_all(facts))  # type: ignore[arg-type]


def facts_of(readings: Sequence[Reading]) -> dict[str, object]:
    """Return the facts of all readings of one host."""
    return {name: value for one in readings for name, value in one.facts.items()}


#: Gives a network namespace a cable of that name, with 10.5.0.1.
CABLE = "ip link set lo up; ip link add {0} type veth peer name far; ip link set far up; ip addr add 10.5.0.1/24 dev {0}; ip link set {0} up\n"


def enter_network(script: str, *arguments: str, hosts: Path | None = None) -> str:
    """Run a shell script in a network of its own; skip the test where that is not allowed."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("ip"):
        pytest.skip("network namespaces need root, iproute2 and util-linux")
    if subprocess.run(["unshare", "--net", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this container may not make network namespaces")
    before = f"mount --bind {hosts} /etc/hosts; " if hosts else ""
    done = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "bash", "-ec", before + script, "bash", *arguments],
        env=make_env(), capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
