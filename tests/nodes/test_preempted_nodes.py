"""A notice to one node of a job: the ranks of all nodes save at one step, and no agent takes that for a failure."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING

import pytest

from support import RANKWISE, Running, free_port, list_marked, wait_until, write_script

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.linux, pytest.mark.slow, pytest.mark.shared_server]

TRAIN = """
    import pathlib, torch, rankwise
    with rankwise.init() as ctx:
        ctx.listen_for_stop(signals=("SIGTERM", "SIGINT"))
        for step in range(1_000_000):
            rankwise.all_reduce(torch.ones(1))
            if step == 3: pathlib.Path(f"up.{ctx.rank}").touch()
            if ctx.should_stop():
                pathlib.Path(f"saved.{ctx.rank}").write_text(f"{step} {ctx.stop_reason}")
                ctx.leave_for_requeue()
"""


@pytest.mark.parametrize(
    ("rendezvous", "preempted", "name"),
    [
        ("static", 0, "SIGINT"), ("static", 1, "SIGTERM"), ("c10d", 0, "SIGTERM"), ("c10d", 1, "SIGINT"),
        ("c10d", None, "SIGTERM"),
    ],
)  # fmt: skip
def test_a_notice_to_one_node_stops_all(rendezvous: str, preempted: int | None, name: str, tmp_path: Path) -> None:
    """SIGTERM, or a SIGINT that ranks listen to, for one agent of two: both exit with 75, without a restart, after one step for all three ranks.

    So do they if every process of both nodes gets it, as from Slurm: none of those that the ranks still need ends by it.
    """
    write_script(tmp_path, TRAIN)
    place = f"127.0.0.1:{free_port()}"
    host, port = place.split(":")
    agents = []
    for node in range(2):
        meet = ["--node-rank", str(node), "--master-addr", host, "--master-port", port]
        if rendezvous == "c10d":
            meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "job7"]
        args = ["--nnodes", "2", *meet, "--nproc-per-node", str(2 - node), "--max-restarts", "3"]
        agents.append(
            Running(
                [*RANKWISE, "--report", f"report.{node}.json", *args, "train.py"],
                tmp_path,
                env={"GLOO_SOCKET_IFNAME": "lo"},
            )
        )
    try:
        wait_until(lambda: len(list(tmp_path.glob("up.*"))) == 3, 40, "ranks")
        pids = (
            [int(line.split()[0]) for line in list_marked()] if preempted is None else [agents[preempted].process.pid]
        )
        for pid in pids:
            os.kill(pid, getattr(signal, name))
        results = [agent.finish(40) for agent in agents]
    finally:
        for agent in agents:
            agent.process.kill()
            agent.process.wait()
    assert [result.code for result in results] == [75, 75], "\n---\n".join(result.err for result in results)
    told = [path.read_text() for path in sorted(tmp_path.glob("saved.*"))]
    assert len(told) == 3
    assert len(set(told)) == 1
    reports = [json.loads((tmp_path / f"report.{node}.json").read_text()) for node in range(2)]
    assert [report["kind"] for report in reports] == ["requeue", "requeue"]
    assert [report["attempts"] for report in reports] == [1, 1]
    assert [report["stopped_by"] for report in reports] == [
        name if preempted in {node, None} else None for node in range(2)
    ]
    assert not [result.err for result in results if "the helper process" in result.err]


def test_a_joining_node_is_a_notice_too(tmp_path: Path) -> None:
    """When a second node joins, all ranks start again: those that listen save before, and no restart is used."""
    text = TRAIN.replace("ctx.should_stop():", "ctx.should_stop() or (ctx.world_size == 2 and step == 4):")
    text = text.replace(
        "ctx.leave_for_requeue()",
        "ctx.leave_for_requeue() if ctx.stop_reason else None\n                break",
    )
    text = text.replace("saved.{ctx.rank}", "saved.{ctx.world_size}.{ctx.rank}")
    write_script(tmp_path, text)
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", "job8"]
    args = ["--nnodes", "1:2", *meet, "--rdzv-conf", "last_call_timeout=1", "train.py"]
    agents = []
    try:
        for node in range(2):
            agents.append(Running([*RANKWISE, *args], tmp_path, env={"GLOO_SOCKET_IFNAME": "lo"}))
            if not node:
                wait_until((tmp_path / "up.0").exists, 40, "the first node's rank")
        results = [agent.finish(60) for agent in agents]
    finally:
        for agent in agents:
            agent.process.kill()
            agent.process.wait()
    assert [result.code for result in results] == [0, 0], "\n---\n".join(result.err for result in results)
    assert "another node joins: all ranks are restarted" in results[0].err
    assert "SIGTERM on rank 0" in (tmp_path / "saved.1.0").read_text()
    assert {path.name for path in tmp_path.glob("saved.2.*")} == {"saved.2.0", "saved.2.1"}
