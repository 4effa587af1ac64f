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

from support import RANKWISE, Result, Running, free_port, make_env, wait_until, write_script

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.linux,
    pytest.mark.slow,
    pytest.mark.shared_server,
    pytest.mark.skipif(
        shutil.which("etcd") is None or importlib.util.find_spec("etcd") is None,
        reason="needs etcd (apt-get install etcd-server) and its client (pip install python-etcd)",
    ),
]

STEP = """
    import os, time, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    with open(f"steps{os.environ['NODE']}", "a", buffering=1) as out:
        is_enough = False
        while not is_enough:
            total = torch.tensor([1.0, os.path.exists("enough")])
            dist.all_reduce(total)
            is_enough = bool(total[1])  # all leave after the same step
            out.write(f"{int(total[0])}\\n")
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
    """Three nodes meet, and two more stand by. One is killed with all its processes: the others name it at once, and go on with one that stood by. The last one ends well with the job."""
    write_script(tmp_path, STEP)
    args = ["--nnodes", "1:3", "--rdzv-backend", "etcd-v2", "--rdzv-endpoint", endpoint, "--rdzv-id", "lost", "--rdzv-conf", "last_call_timeout=3", "train.py"]  # fmt: skip
    jobs: list[Running] = []
    ends: list[Result] = []

    def start(node: int) -> None:
        jobs.append(Running([*RANKWISE, *args], tmp_path, env={"NODE": str(node), "GLOO_SOCKET_IFNAME": "lo"}))

    def read(node: int) -> str:
        return ends[node].err if node < len(ends) else jobs[node].err

    def has_stepped(node: int) -> bool:
        path = tmp_path / f"steps{node}"
        return path.exists() and path.read_text().split()[-1:] == ["3"]

    def wait_steps(nodes: list[int], others: list[int]) -> None:
        try:
            wait_until(lambda: all(map(has_stepped, nodes)) and any(map(has_stepped, others)), 60, "steps of 3")
        except AssertionError as error:
            raise AssertionError(f"{error}: {[read(node) for node in range(len(jobs))]}") from None

    try:
        for node in range(3):
            start(node)
        wait_steps([0, 1], [2])
        for node in (3, 4):
            start(node)
            wait_until(lambda node=node: "this node stands by" in read(node), 30, "a node that stands by")
        os.killpg(jobs[1].process.pid, signal.SIGKILL)
        # The first that stands by takes the place, or the second where the host is so busy that the first is silent for 3 s.
        wait_steps([0, 2], [3, 4])
        assert "is lost: its launcher has ended: " in read(0)
        assert "all ranks restart on the 2 remaining nodes" in read(0)
        (tmp_path / "enough").touch()
        ends += [job.finish(30) for job in jobs]
    finally:
        for job in jobs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.process.pid, signal.SIGKILL)
            job.process.wait()
    assert [end.code for end in ends] == [0, -signal.SIGKILL, 0, 0, 0], [read(node) for node in range(5)]
    assert "the job has ended; this node stood by" in read(3 if has_stepped(4) else 4)
