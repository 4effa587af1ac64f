"""Nodes that meet at a real etcd: all that holds with torch's own store holds there, and the host of the store is nobody of theirs."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from support import RANKWISE, Running, free_port, make_env, wait_until, write_script

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.linux,
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("etcd") is None or importlib.util.find_spec("etcd") is None,
        reason="needs etcd (apt-get install etcd-server) and its client (pip install python-etcd)",
    ),
]

STEP = """
    import os, time, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    with open(f"steps{os.environ['NODE']}", "a", buffering=1) as out:
        while not os.path.exists("enough"):
            total = torch.ones(1)
            dist.all_reduce(total)
            out.write(f"{int(total)}\\n")
            time.sleep(0.05)
    os._exit(0)
"""


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    port, peer = free_port(), free_port()
    own, others = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer}"
    command = ["etcd", "--enable-v2=true", "--data-dir", str(tmp_path / "etcd"), "--listen-client-urls", own, "--advertise-client-urls", own,
               "--listen-peer-urls", others, "--initial-advertise-peer-urls", others, "--initial-cluster", f"default={others}"]  # fmt: skip
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=make_env())
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def test_nodes_that_met_at_etcd_go_on_when_one_of_them_is_lost(endpoint: str, tmp_path: Path) -> None:
    """Three nodes meet; one is killed with all its processes: the others name it at once, and go on without it."""
    write_script(tmp_path, STEP)
    args = ["--nnodes", "1:3", "--rdzv-backend", "etcd-v2", "--rdzv-endpoint", endpoint, "--rdzv-id", "lost", "--rdzv-conf", "last_call_timeout=3", "train.py"]  # fmt: skip
    jobs = [
        Running([*RANKWISE, *args], tmp_path, env={"NODE": str(node), "GLOO_SOCKET_IFNAME": "lo"})
        for node in range(3)
    ]

    def has_stepped(node: int, world: int) -> bool:
        path = tmp_path / f"steps{node}"
        return path.exists() and path.read_text().split()[-1:] == [str(world)]

    try:
        wait_until(lambda: all(has_stepped(node, 3) for node in range(3)), 60, "steps of three")
        os.killpg(jobs[1].process.pid, signal.SIGKILL)
        wait_until(lambda: all(has_stepped(node, 2) for node in (0, 2)), 60, "steps of two")
        (tmp_path / "enough").touch()
        results = [jobs[node].finish(30) for node in (0, 1, 2)]
    finally:
        for job in jobs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.process.pid, signal.SIGKILL)
            job.process.wait()
    del results[1]
    assert [result.code for result in results] == [0, 0], "\n".join(result.err for result in results)
    for result in results:
        assert "is lost: its launcher has ended: " in result.err
        assert "all ranks restart on the 2 remaining nodes" in result.err
