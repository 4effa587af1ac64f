"""The report of a job of several nodes says what is wrong with which host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nodes.hosts import open_hosts
from support import RANKWISE, write_script

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.linux]

HOSTS = "127.0.0.1 localhost\n10.77.0.1 host0\n10.77.0.2 host1\n"
FULL = ["sh", "-ec", "mount -t tmpfs -o size=2g tmpfs /dev/shm && fallocate -l 2000M /dev/shm/left"]
SCRIPT = """
import os, signal, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(3)
dist.all_reduce(one)
if os.environ["RANK"] == "1":
    {what}
dist.all_reduce(one)
"""


@pytest.mark.parametrize(
    "what", ["os.kill(os.getpid(), signal.SIGBUS)", "dist.broadcast(one, 1)"], ids=["killed", "hangs"]
)
def test_the_first_node_says_that_the_others_shared_memory_is_full(tmp_path: Path, what: str) -> None:
    """Whether rank 1 is killed there, or the job hangs: the report on host0 names host1, what is wrong there, and the way out."""
    script = write_script(tmp_path, SCRIPT.format(what=what))
    meet = ["--nnodes", "2", "--master-addr", "10.77.0.1", "--master-port", "29500"]
    with open_hosts([HOSTS, HOSTS], tmp_path) as hosts:
        hosts[1].call(*FULL)
        agents = [
            host.start([*RANKWISE, *meet, "--node-rank", str(number), str(script)]) for number, host in enumerate(hosts)
        ]
        told = [agent.communicate(timeout=60)[0] for agent in agents]
    assert all(agent.returncode for agent in agents)
    assert "also: on host1: /dev/shm has 2048 MiB, 48 MiB of it free" in told[0], told[0]
    assert "/dev/shm" in told[1].partition("rankwise: the job failed")[2], told[1]
