"""c10d between hosts whose names the name service does not know."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nodes.hosts import open_hosts
from support import RANKWISE, write_script

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.linux]

NAMELESS = "127.0.0.1 localhost\n"
SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("sum", int(total))
dist.destroy_process_group()
"""


def test_hosts_whose_own_names_have_no_address_meet_by_their_addresses(tmp_path: Path) -> None:
    """Neither host's name can be looked up, where torchrun ends with a gaierror: both meet at the endpoint's address, and each says so."""
    script = write_script(tmp_path, SCRIPT)
    meet = [
        "--nnodes",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "10.77.0.1:29500",
        "--rdzv-id",
        "job",
    ]
    with open_hosts([NAMELESS, NAMELESS], tmp_path) as hosts:
        agents = [host.start([*RANKWISE, *meet, str(script)], {"GLOO_SOCKET_IFNAME": "cable"}) for host in hosts]
        outputs = [agent.communicate(timeout=90)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    for number, output in enumerate(outputs):
        assert "sum 2" in output, output
        name = f"this host's own name host{number} has no address; 10.77.0.{number + 1} is used"
        assert name in output, output


def test_an_endpoint_without_an_address_is_named_while_the_node_waits_and_at_its_end(tmp_path: Path) -> None:
    """The line while it waits says that the name has no address here and what to do; the error names the endpoint, without a stack of C++."""
    script = write_script(tmp_path, SCRIPT)
    flags = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "nowhere.invalid:29500"]
    with open_hosts([NAMELESS, NAMELESS], tmp_path) as hosts:
        agent = hosts[0].start([*RANKWISE, *flags, "--rdzv-conf", "read_timeout=1", str(script)])
        output = agent.communicate(timeout=90)[0]
    assert agent.returncode == 1, output
    assert "the master's name nowhere.invalid has no address here -> " in output
    assert "did not reach the store at nowhere.invalid:29500 (c10d): RendezvousConnectionError" in output
    assert "frame #" not in output
