"""Hosts with networks of IPv6 of their own: all is looked at as over IPv4, and half of it is named."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nodes.hosts import Host, make_hosts_file, open_hosts
from nodes.test_doctor_hosts import bad, drop, examine, only

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = [pytest.mark.linux, pytest.mark.slow]

IPV6 = [f"fd77::{number + 1}" for number in range(3)]
NAMES = make_hosts_file(3, {f"host{number}": ip for number, ip in enumerate(IPV6)})


def go_ipv6(hosts: Sequence[Host], *, keeps_ipv4: bool = False) -> None:
    """Give hosts addresses of IPv6."""
    if not Path("/proc/net/if_inet6").exists():
        pytest.skip("this kernel has no IPv6")
    for number, host in enumerate(hosts):
        if not keeps_ipv4:
            host.call("ip", "-4", "addr", "flush", "dev", "cable")
        host.call("ip", "-6", "addr", "add", f"{IPV6[number]}/64", "dev", "cable", "nodad")


@pytest.mark.skipif(not shutil.which("nft"), reason="needs nft")
def test_hosts_of_ipv6_alone(tmp_path: Path) -> None:
    """They meet, are measured, and nothing is bad; then one drops what comes to high ports: it is named, with what is to be let in."""
    with open_hosts([NAMES] * 3, tmp_path) as hosts:
        go_ipv6(hosts)
        found = examine(hosts, measure=True, seconds_per_link=0.1)
        assert bad(found) == []
        assert {one["address"] for one in found["links"] if one["plane"] == "gloo"} == set(IPV6)
        drop(hosts[2], "ip6", "saddr", "fd77::/64", "tcp", "dport", "1024-65535", "ct", "state", "new", "drop")
        told = only(examine(hosts, probes=["firewall"]))
        assert (told["probe"], told["hosts"], told["class"]) == ("links", ["host2"], "I8")
        assert "# let TCP in from fd77::/64" in told["fix"]


@pytest.mark.parametrize("lack", ["no address", "switched off"])
def test_a_host_that_lacks_ipv6_is_no_firewalls_fault(tmp_path: Path, lack: str) -> None:
    """I22: names have both addresses, and one host has IPv4 only: one thing is told, and what is to be typed where mends it."""
    both = NAMES + make_hosts_file(3)
    with open_hosts([both] * 3, tmp_path) as hosts:
        go_ipv6(hosts, keeps_ipv4=True)
        if lack == "no address":
            hosts[1].call("ip", "-6", "addr", "flush", "dev", "cable")
        else:
            hosts[1].call("sh", "-c", "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6")
        told = only(examine(hosts))
        assert (told["probe"], told["class"], told["hosts"]) == ("links", "I22", ["host0", "host2"])
        assert "firewall" not in told["fix"]
        env = {
            int(where.removeprefix("host")): dict([setting.split("=")])
            for setting, where in (line.removeprefix("export ").split("  # on ") for line in told["fix"].splitlines())
        }
        assert env == {number: {"GLOO_SOCKET_IFNAME": "cable"} for number in (0, 2)}
        assert bad(examine(hosts, env=env)) == []
