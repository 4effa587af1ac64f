"""rankwise.init() between two hosts that have networks and names of their own."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from nodes.hosts import Host, open_hosts
from support import write_script

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.linux, pytest.mark.slow]

PROGRAM = """
    import sys, torch, rankwise
    with rankwise.init(arrival_timeout_s=20) as ctx:
        total = rankwise.all_reduce(torch.tensor([ctx.rank + 1.0]))
        sys.stdout.write(f"{ctx.rank} {ctx.local_rank} {ctx.local_world_size} {ctx.node_rank} {ctx.num_nodes} {total.item()}\\n")
"""
LOOPBACK = "127.0.0.1 localhost\n127.0.1.1 host0 host1\n"
GOOD = "127.0.0.1 localhost\n10.77.0.1 host0\n10.77.0.2 host1\n"


def run_on(hosts: list[Host], script: Path, **more: str) -> list[tuple[int, str]]:
    """Run one rank on each host, by hand, and return exit codes and outputs."""
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500", **more}
    ranks = [host.start([sys.executable, str(script)], {**env, "RANK": str(rank)}) for rank, host in enumerate(hosts)]
    outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    return [(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]


def test_ranks_of_two_hosts_find_their_places(tmp_path: Path) -> None:
    """Two hosts, one rank each, only RANK and WORLD_SIZE told: each is local rank 0 of 1, on its own node."""
    script = write_script(tmp_path, PROGRAM)
    with open_hosts([GOOD, GOOD], tmp_path) as hosts:
        ends = run_on(hosts, script)
    # torch may warn before it that an address has no name.
    assert [(code, output.splitlines()[-1]) for code, output in ends] == [
        (0, "0 0 1 0 2 3.0"),
        (0, "1 0 1 1 2 3.0"),
    ]


def test_hosts_that_know_themselves_by_a_loopback_address_are_named(tmp_path: Path) -> None:
    """I5: with its own name at 127.0.1.1, Gloo would listen where no other host comes; GLOO_SOCKET_IFNAME cures it."""
    script = write_script(tmp_path, PROGRAM)
    with open_hosts([LOOPBACK, LOOPBACK], tmp_path) as hosts:
        for code, output in run_on(hosts, script):
            assert code == 1
            assert "host0 is 127.0.1.1, host1 is 127.0.1.1" in output, output
            assert "set GLOO_SOCKET_IFNAME" in output
        cured = run_on(hosts, script, GLOO_SOCKET_IFNAME="cable")
    assert [code for code, _ in cured] == [0, 0], cured


def test_an_address_that_no_host_answers_is_named(tmp_path: Path) -> None:
    """I2: rank 1 looks for the store at an address that nobody has; the error tells the address and why."""
    script = write_script(tmp_path, PROGRAM.replace("arrival_timeout_s=20", "arrival_timeout_s=2"))
    with open_hosts([GOOD, GOOD], tmp_path) as hosts:
        env = {"WORLD_SIZE": "2", "MASTER_ADDR": "10.77.0.9", "MASTER_PORT": "29500", "RANK": "1"}
        output = hosts[1].start([sys.executable, str(script)], env).communicate(timeout=60)[0]
    assert "rank 0 was not found at 10.77.0.9:29500 within 2 s: " in output
    assert "MASTER_ADDR" in output
