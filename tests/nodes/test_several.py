"""Jobs of two agents on this host, ours and torchrun's mixed: they meet, number their ranks and end together."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
from typing import TYPE_CHECKING

import pytest

from support import RANKWISE, TORCHRUN, Result, Running, free_port, wait_until, write_script

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.linux, pytest.mark.slow, pytest.mark.shared_server]

REDUCE = """
    import os, sys, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank() + 1)]); dist.all_reduce(total)
    env = os.environ
    line = [env[n] for n in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_RANK",
                             "ROLE_WORLD_SIZE", "TORCHELASTIC_RUN_ID")]
    sys.stdout.write(" ".join([*line, str(int(total))]) + "\\n")
    dist.destroy_process_group()
"""
LOCAL = {"GLOO_SOCKET_IFNAME": "lo"}


def start_agents(launchers: list[tuple[str, ...]], args: list[list[str]], folder: Path) -> list[Running]:
    """Start one agent for each launcher, in folders of their own."""
    agents = []
    for number, (launcher, own) in enumerate(zip(launchers, args, strict=True)):
        where = folder / f"node{number}"
        where.mkdir(exist_ok=True)
        agents.append(Running([*launcher, *own, str(folder / "train.py")], where, env=LOCAL))
    return agents


def finish_all(agents: list[Running], timeout_s: float = 60) -> list[Result]:
    """Wait for all agents; if one does not end, all are killed."""
    try:
        return [agent.finish(timeout_s) for agent in agents]
    finally:
        for agent in agents:
            if agent.process.poll() is None:
                agent.process.kill()
                agent.process.wait()
            with contextlib.suppress(ValueError):
                agent.close()


def static_args(port: int) -> list[list[str]]:
    """Return the flags of two agents with 2 and 1 ranks that meet statically."""
    common = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    return [[*common, "--node-rank", str(node), "--nproc-per-node", str(2 - node)] for node in range(2)]


def c10d_args(port: int) -> list[list[str]]:
    """Return the flags of two agents with 2 and 1 ranks that meet at a c10d store."""
    common = [
        "--nnodes",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"localhost:{port}",
        "--rdzv-id",
        "job5",
    ]
    return [[*common, "--nproc-per-node", str(2 - node)] for node in range(2)]


@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
@pytest.mark.parametrize(
    "launchers",
    [
        pytest.param([RANKWISE, RANKWISE], id="ours-ours"),
        pytest.param([RANKWISE, TORCHRUN], id="ours-torchrun"),
        pytest.param([TORCHRUN, RANKWISE], id="torchrun-ours"),
    ],
)
def test_two_agents_meet_and_reduce(rendezvous: str, launchers: list[tuple[str, ...]], tmp_path: Path) -> None:
    """2 + 1 ranks of two agents form one group: sum 6 on each, ranks 0-2, the same facts as told by torchrun."""
    write_script(tmp_path, REDUCE)
    args = static_args(free_port()) if rendezvous == "static" else c10d_args(free_port())
    results = finish_all(start_agents(launchers, args, tmp_path))
    assert [result.code for result in results] == [0, 0], "\n---\n".join(result.err for result in results)
    # Whoever ends first takes the store with it; torchrun warns of that on the other node.
    ours = [result.err for launcher, result in zip(launchers, results, strict=True) if launcher is RANKWISE]
    assert not any("shutdown the rendezvous" in err for err in ours)
    lines = sorted(line.split() for result in results for line in result.out.splitlines())
    assert [line[0] for line in lines] == ["0", "1", "2"]
    assert {line[8] for line in lines} == {"6"}
    assert {(line[2], line[4], line[6]) for line in lines} == {("3", "2", "3")}
    assert [line[5] for line in lines] == ["0", "1", "2"]
    assert {line[7] for line in lines} == {"none" if rendezvous == "static" else "job5"}
    assert sorted(line[3] for line in lines) == ["1", "2", "2"]


@pytest.mark.parametrize(
    ("rendezvous", "others_do"),
    [
        ("static", "__import__('time').sleep(600)"),
        ("c10d", "dist.all_reduce(total)"),
        ("c10d", "sys.stdout.flush(); os._exit(0)"),
    ],
    ids=["they notice nothing", "they lose a peer", "they are through"],
)
def test_a_failure_on_one_node_ends_both(rendezvous: str, others_do: str, tmp_path: Path) -> None:
    """An exception on node 1: both agents name it, and end, though the ranks of node 0 would wait for minutes, as over NCCL, have failed at a lost peer, or have done their work."""
    write_script(tmp_path, REDUCE.replace("    env = os.environ", f'    if os.environ["LOCAL_WORLD_SIZE"] == "1": __import__("time").sleep(1); raise ValueError("alone")\n    {others_do}\n    env = os.environ'))  # fmt: skip
    own = {"static": static_args, "c10d": c10d_args}[rendezvous](free_port())
    args = [["--report", "report.json", *words] for words in own]
    results = finish_all(start_agents([RANKWISE, RANKWISE], args, tmp_path))
    assert [result.code for result in results] == [1, 1]
    reports = [json.loads((tmp_path / f"node{number}" / "report.json").read_text()) for number in range(2)]
    (rank,) = reports[1]["culprits"]
    assert reports[1]["message"] == f"rank {rank}: ValueError: alone"
    assert reports[0]["culprits"] == []
    assert re.fullmatch(rf"on node \d \(.+\): rank {rank}: ValueError: alone", reports[0]["message"])


def test_a_killed_agent_takes_its_ranks_and_frees_the_other(tmp_path: Path) -> None:
    """Kill -9 of a node, its rank a moment before its agent: the other node's agent names the lost node, and no rank of its own."""
    text = REDUCE.replace("    env = os.environ", "    up = 'up' + os.environ['LOCAL_RANK']\n    open('new' + up, 'w').write(str(os.getpid()))\n    os.rename('new' + up, up)\n    if dist.get_rank() == 2: __import__('time').sleep(60)\n    dist.all_reduce(total)\n    env = os.environ")  # fmt: skip
    write_script(tmp_path, text)
    args = [["--report", "report.json", *words] for words in static_args(free_port())]
    agents = start_agents([RANKWISE, RANKWISE], args, tmp_path)
    try:
        wait_until((tmp_path / "node1" / "up0").exists, 40, "ranks")
        time.sleep(3)  # the others wait, and ask for news five times a second
        os.kill(int((tmp_path / "node1" / "up0").read_text()), signal.SIGKILL)
        time.sleep(0.3)
        os.kill(agents[1].process.pid, signal.SIGKILL)
    finally:
        results = finish_all(agents, 30)
    assert results[1].code == -9
    assert results[0].code != 0
    report = json.loads((tmp_path / "node0" / "report.json").read_text())
    assert report["kind"] == "failure"
    assert report["culprits"] == []
    assert "node 1 (host " in report["message"]
    assert "rank 2) is lost: its launcher has ended" in report["message"]


def test_a_signal_while_the_other_node_is_awaited(tmp_path: Path) -> None:
    """SIGTERM to an agent that waits for the other one: 143, and a report that no rank was running."""
    write_script(tmp_path, REDUCE)
    port = free_port()
    agents = start_agents([RANKWISE], [["--report", "report.json", *c10d_args(port)[0]]], tmp_path)
    try:
        wait_until(lambda: not is_free(port), 40, "the store of the rendezvous")
        agents[0].process.send_signal(signal.SIGTERM)
    finally:
        (result,) = finish_all(agents, 30)
    report = json.loads((tmp_path / "node0" / "report.json").read_text())
    assert (result.code, report["exit_code"]) == (143, 143), result.err
    assert report["message"] == "stopped by SIGTERM while no rank was running"


def is_free(port: int) -> bool:
    """Tell whether nobody listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0
