"""Parameter servers and workers on two hosts: each node starts its own ranks again alone, and tells the other when it can't."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

import pytest

from launch.test_parameter_server_stop import TRAIN as STOPPED
from nodes.hosts import make_hosts_file, open_hosts, serve_resident
from support import RANKWISE, free_port, wait_until, write_script

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from nodes.hosts import Host

pytestmark = [pytest.mark.linux, pytest.mark.slow]

#: A parameter is the number of gradients that were applied. Ranks kill themselves at the step that is given for them, so many times.
TRAIN = """
    import hashlib, json, os, signal, sys
    from pathlib import Path
    import torch
    from torch import nn
    import rankwise

    num_steps, victims, has_copies = int(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
    ctx = rankwise.init(device="cpu")
    torch.set_num_threads(1)
    torch.manual_seed(0)

    def die(step):
        at, times = victims.get(str(ctx.rank), (0, 0))
        died = Path(f"died-{ctx.rank}")
        if step == at and (len(died.read_text()) if died.exists() else 0) < times:
            with died.open("a") as file:
                file.write(".")
            os.kill(os.getpid(), signal.SIGKILL)

    class DyingSGD(torch.optim.SGD):
        num_steps = 0
        def step(self):
            super().step()
            DyingSGD.num_steps += 1
            die(DyingSGD.num_steps)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.count = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    model = Model()
    if not has_copies:
        os.environ["RANKWISE_MEMORY"] = "/nowhere"
    ps = rankwise.parameter_server(
        model, lambda ones: DyingSGD(ones, lr=1.0), mode="async" if has_copies else "sync", save_every=1
    )
    said = {"rank": ctx.rank, "node": ctx.node_rank, "secret": hashlib.sha256(os.environ["RANKWISE_JOB_SECRET"].encode()).hexdigest()}
    if ps.is_server:
        said["applied"] = ps.serve()["shards"][0]["applied"]
    else:
        sent = Path(f"sent-{ctx.rank}")
        sent.touch()
        for step in range(num_steps):
            ps.pull()
            model.count.grad = -torch.ones(1, dtype=torch.float64)
            die(step)
            with sent.open("a") as file:
                file.write(".")
            ps.push()
        ps.gather()
        said["count"] = model.count.item()
    sys.stdout.write(json.dumps(said) + "\\n")
    ctx.close()
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    folder = tmp_path_factory.mktemp("hosts")
    with open_hosts([make_hosts_file(2)] * 2, folder) as made, serve_resident(made, folder):
        yield made


def train(
    hosts: list[Host],
    folder: Path,
    max_restarts: int,
    *words: str,
    roles: str = "ps=1,worker=3",
    rendezvous: str = "static",
    script: str = TRAIN,
    disturb: Callable[[list[subprocess.Popen[str]]], None] | None = None,
) -> list[tuple[int, str]]:
    """Run a job of two nodes, and return how each launcher ended and all that it printed."""
    write_script(folder, script)
    port, nodes = free_port(), list[Any]()
    for number, host in enumerate(hosts):
        meet = ["--node-rank", str(number), "--master-addr", hosts[0].address, "--master-port", str(port)]
        if rendezvous == "c10d":
            endpoint = f"{hosts[0].address}:{port}"
            meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "served"]
        command = [*RANKWISE, "--nnodes", "2", *meet, "--role-counts", roles, "--max-restarts", str(max_restarts),
                   "--report", str(folder / f"report.{number}.json"), str(folder / "train.py"), *words]  # fmt: skip
        nodes.append(host.start(command, {"RANKWISE_JOB_SECRET": None}, folder=folder))
    try:
        if disturb is not None:
            disturb(nodes)
        outs = [node.communicate(timeout=120)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    return [(node.returncode, out) for node, out in zip(nodes, outs, strict=True)]


def read_said(outs: list[tuple[int, str]]) -> list[dict[str, Any]]:
    lines = [line for _, out in outs for line in out.splitlines() if line.startswith("{")]
    return sorted((json.loads(line) for line in lines), key=lambda one: one["rank"])


@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_each_node_starts_its_own_ranks_again_alone(rendezvous: str, hosts: list[Host], tmp_path: Path) -> None:
    """The server on node 0 and a worker on node 1 are killed: only they start again, each by its node, and no gradient is lost or doubled.

    The ranks of both nodes have the same secret, which nobody gave by hand; `--role-counts` alone says how many ranks a node has.
    """
    outs = train(hosts, tmp_path, 3, "40", '{"0": [50, 1], "3": [7, 1]}', "true", rendezvous=rendezvous)
    assert [code for code, _ in outs] == [0, 0], "\n---\n".join(out for _, out in outs)
    said = read_said(outs)
    assert [one["node"] for one in said] == [0, 0, 1, 1]
    assert len({one["secret"] for one in said}) == 1
    num_sent = sum(path.stat().st_size for path in tmp_path.glob("sent-*"))
    assert num_sent == 40 + 40 + 40 + 7
    assert said[0]["applied"] == num_sent
    assert max(one["count"] for one in said[1:]) == num_sent
    for (_, out), who in zip(outs, ("server 0 (rank 0)", "worker 2 (rank 3)"), strict=True):
        assert f"rankwise: {who}: killed by SIGKILL" in out
        assert out.count("it is restarted alone") == 1
        assert "restart 1 of 3" in out


def test_a_node_that_gives_up_tells_the_other(hosts: list[Host], tmp_path: Path) -> None:
    """A worker of node 1 dies once too often: node 0 stops its ranks and ends, names the worker, and waits for nobody."""
    outs = train(hosts, tmp_path, 1, "100000", '{"3": [7, 2]}', "true")
    assert [code for code, _ in outs] == [137, 137], "\n---\n".join(out for _, out in outs)
    reports = [json.loads((tmp_path / f"report.{number}.json").read_text()) for number in range(2)]
    assert reports[1]["culprits"] == [3]
    assert reports[0]["culprits"] == []
    assert "on node 1 (host1): worker 2 (rank 3): killed by SIGKILL" in reports[0]["message"]
    assert "that node does not restart its ranks" in outs[0][1]


def test_what_can_not_be_made_up_for_alone_starts_all_nodes_again(hosts: list[Host], tmp_path: Path) -> None:
    """A server without copies is killed after a worker of the other node was: all ranks of both nodes start again, and train to the end."""
    outs = train(hosts, tmp_path, 3, "20", '{"0": [12, 1], "3": [7, 1]}', "false")
    assert [code for code, _ in outs] == [0, 0], "\n---\n".join(out for _, out in outs)
    said = read_said(outs)
    assert [one["rank"] for one in said] == [0, 1, 2, 3]
    assert {one["count"] for one in said[1:]} == {20.0}
    assert "it is restarted alone" in outs[1][1]
    assert "on node 0 (host0): server 0 (rank 0): killed by SIGKILL" in outs[1][1]


def test_a_notice_to_one_node_stops_both(hosts: list[Host], tmp_path: Path) -> None:
    """SIGTERM to the launcher of node 1, which has workers only: workers of both nodes stop, the server on node 0 saves after them, both exit with 75."""

    def preempt(nodes: list[subprocess.Popen[str]]) -> None:
        wait_until(lambda: sum(path.stat().st_size for path in tmp_path.glob("sent-*")) >= 40, 60, "steps")
        nodes[1].send_signal(signal.SIGTERM)

    outs = train(hosts, tmp_path, 3, "true", script=STOPPED, disturb=preempt)
    assert [code for code, _ in outs] == [75, 75], "\n---\n".join(out for _, out in outs)
    num_sent = sum(path.stat().st_size for path in tmp_path.glob("sent-*"))
    assert f"shard 0 is saved at version {num_sent}" in outs[0][1]
    assert not any("is restarted alone" in out for _, out in outs)


def test_roles_and_ranks_that_do_not_fit_are_an_error(hosts: list[Host], tmp_path: Path) -> None:
    """Five ranks can't be shared out evenly, and each node has one: both say how many there are and how many there should be."""
    outs = train(hosts, tmp_path, 1, "1", "{}", "true", roles="ps=2,worker=3")
    assert all(code for code, _ in outs)
    for _, out in outs:
        assert "2 nodes have 2 ranks in all, and --role-counts ps=2,worker=3 makes 5" in out
