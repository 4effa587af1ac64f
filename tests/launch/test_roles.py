"""Ranks with roles: what they are told, and that a server or a worker that is killed starts again alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from support import run_rankwise, run_reported, write_script

if TYPE_CHECKING:
    from pathlib import Path

    from support import Result

pytestmark = pytest.mark.linux

#: A parameter is the number of samples that were applied, as each gradient takes its own away: no counter of ours is believed.
TRAIN = """
    import json, os, signal, sys
    from pathlib import Path
    import torch
    from torch import nn
    import rankwise

    mode, num_steps, victims = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    ctx = rankwise.init(device="cpu")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    died = Path(f"died-{ctx.rank}")

    def die(step):
        if victims.get(str(ctx.rank)) == step and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 4)
            self.samples = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    class DyingSGD(torch.optim.SGD):
        num_steps = 0
        def step(self):
            super().step()
            DyingSGD.num_steps += 1
            die(DyingSGD.num_steps)

    model = Model()
    ps = rankwise.parameter_server(model, lambda ones: DyingSGD(ones, lr=0.25), mode=mode, save_every=1)
    told = {"rank": ctx.rank, "pid": os.getpid(), **{name: os.environ[name] for name in ("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "RANK")}}
    if ps.is_server:
        told["report"] = ps.serve()
    else:
        sent = Path(f"sent-{ctx.rank}")
        for step in range(num_steps):
            ps.pull()
            loss = (model.linear(torch.ones(2, 8) * ctx.rank) - 1).square().mean() / 100
            loss.backward()
            model.samples.grad = torch.full((1,), -4.0, dtype=torch.float64)
            die(step)
            with sent.open("a") as file:
                file.write(".")
            ps.push()
        ps.gather()
        told["samples"], told["weights"] = model.samples.item(), model.linear.weight.double().sum().item()
    sys.stdout.write(json.dumps(told) + "\\n")
    ctx.close()
"""


def train(
    folder: Path, mode: str, num_steps: int, victims: dict[int, int], *flags: str
) -> tuple[Result, list[dict[str, Any]]]:
    write_script(folder, TRAIN)
    result = run_rankwise(
        ["--role-counts", "ps=2,worker=3", *flags, "train.py", mode, str(num_steps), json.dumps(victims)],
        folder,
    )
    told = [json.loads(line) for line in result.out.splitlines() if line.startswith("{")]
    return result, sorted(told, key=lambda one: one["rank"])


def test_a_killed_server_goes_on_where_it_was(tmp_path: Path) -> None:
    """Roles are told as torchrun tells them; the weights are, to the last bit, those of a run without a kill between update and copy."""
    weights = []
    for name, victims in (("calm", {}), ("killed", {1: 9})):
        (tmp_path / name).mkdir()
        result, told = train(tmp_path / name, "sync", 30, victims, "--max-restarts", "2")
        assert result.code == 0, result.err
        assert [f"{one['ROLE_NAME']} {one['ROLE_RANK']} {one['ROLE_WORLD_SIZE']} {one['RANK']}" for one in told] == [
            "ps 0 2 0", "ps 1 2 1", "worker 0 3 2", "worker 1 3 3", "worker 2 3 4",
        ]  # fmt: skip
        assert [one["samples"] for one in told[2:]] == [30.0] * 3
        weights.append({one["weights"] for one in told[2:]})
        applied = [shard["applied"] for one in told[:2] for shard in one["report"]["shards"].values()]
        assert applied == [90, 90]
        assert ("server 1 resumes shard 1 at version 8" in result.err) == bool(victims)
        assert ("restart 1 of 2" in result.err) == bool(victims)
    assert weights[0] == weights[1]
    assert len(weights[0]) == 1


def test_killed_servers_and_workers_lose_and_repeat_nothing(tmp_path: Path) -> None:
    """Asynchronous, with a worker and both servers killed: what is in the parameters is what was sent, and only the killed start again."""
    result, told = train(tmp_path, "async", 40, {0: 25, 1: 60, 3: 7}, "--max-restarts", "5")
    assert result.code == 0, result.err
    sent = sum(path.stat().st_size for path in tmp_path.glob("sent-*"))
    assert sent == 40 + 40 + 7 + 40
    assert [shard["applied"] for one in told[:2] for shard in one["report"]["shards"].values()] == [
        sent,
        sent,
    ]
    assert max(one["samples"] for one in told[2:]) == sent
    assert result.err.count("it is restarted alone") == 3
    assert "restart 3 of 5" in result.err


def test_without_restarts_left_the_job_ends(tmp_path: Path) -> None:
    """The second kill is one too many: all ranks are stopped, and the report has the cause."""
    write_script(tmp_path, TRAIN)
    result, report = run_reported(
        [
            "--role-counts",
            "ps=1,worker=2",
            "--max-restarts",
            "1",
            "train.py",
            "async",
            "100000",
            '{"1": 5, "2": 50}',
        ],
        tmp_path,
    )
    assert result.code == 137
    assert report["kind"] == "failure"
    assert "killed by SIGKILL" in report["message"]
    assert report["message"].startswith(("worker 0 (rank 1): ", "worker 1 (rank 2): "))
    assert "the only restart is used up" in result.err


#: Worker 1 fails at its third step, with its `finally` between, and leaves a child; worker 2 fails when it has trained; the server's rule fails once.
FAIL = """
    import subprocess
    import sys
    import time
    from pathlib import Path
    import torch
    from torch import nn
    import rankwise

    def fail_once(name):
        mark = Path(f"failed-{name}")
        if not mark.exists():
            mark.touch()
            raise ValueError(f"at {name}")

    ctx = rankwise.init(device="cpu")
    torch.set_num_threads(1)
    torch.manual_seed(0)

    class FailingSGD(torch.optim.SGD):
        num_steps = 0
        def step(self):
            super().step()
            FailingSGD.num_steps += 1
            if FailingSGD.num_steps == 60:
                fail_once("rule")

    model = nn.Linear(2, 1)
    ps = rankwise.parameter_server(model, lambda ones: FailingSGD(ones, lr=0.1), mode="async", save_every=1)
    if ps.is_server:
        report = ps.serve()
        print("ended", report["ended"], "lost", sorted(report["lost"]), flush=True)
        sys.exit(0)
    try:
        while (step := ctx.store.add(f"steps of {ctx.rank}", 1)) <= 30:
            ps.pull()
            if step == 3 and ctx.rank == 1 and not Path("child").exists():
                Path("child").write_text(str(subprocess.Popen(["sleep", "600"]).pid))
                fail_once("step")
            if step == 4 and ctx.rank == 1:
                print("its child lives:", Path("/proc", Path("child").read_text()).exists(), flush=True)
            model(torch.ones(1, 2)).square().sum().backward()
            ps.push()
        print(f"worker {ctx.rank} has trained", flush=True)
        while ctx.rank == 3 and ctx.store.add("again", 0) == 0:
            time.sleep(0.05)  # else the servers end
    finally:
        if ctx.rank == 1:
            ctx.close()
    if ctx.rank == 2 and not Path("failed-exit").exists():
        Path("failed-exit").touch()
        sys.exit(3)  # nothing was closed
    if ctx.rank == 2:
        ctx.store.add("again", 1)
"""


def test_who_fails_has_not_ended_and_who_leaves_without_a_word_has(tmp_path: Path) -> None:
    """A worker that fails with its context closed in a `finally`, one that exits with a code, and a server whose rule raises are made up for.

    What the first one had started is gone when its successor runs. And two workers that never close their contexts have ended for the server, which waits for nobody.
    """
    write_script(tmp_path, FAIL)
    result = run_rankwise(["--role-counts", "ps=1,worker=3", "--max-restarts", "9", "train.py"], tmp_path)
    assert result.code == 0, result.err
    assert {path.name for path in tmp_path.glob("failed-*")} == {"failed-rule", "failed-step", "failed-exit"}
    assert "ended [1, 2, 3] lost []" in result.out
    assert {f"worker {one} has trained" for one in (1, 2, 3)} <= set(result.out.splitlines())
    assert "its child lives: False" in result.out
    assert "did not reach the server" not in result.err


#: The only worker is killed in its second function, when two have come that say nothing, or not who they are.
SCHEDULE = """
    import os, signal
    from pathlib import Path
    import torch
    from torch import nn
    import rankwise
    from rankwise.parallel.servers.listener import connect
    from rankwise.parallel.servers.link import Kind, Message

    def square(number):
        if number == 2 and not Path("died").exists():
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return number * number

    ctx = rankwise.init(device="cpu")
    torch.set_num_threads(1)
    ps = rankwise.parameter_server(
        nn.Linear(2, 1), lambda ones: torch.optim.SGD(ones, lr=0.1), mode="async", coordinator=True
    )
    if ps.is_server:
        ps.serve()
    elif ps.is_coordinator:
        strangers = [connect(ps._store, "coordinator", peer="us", rank=ctx.rank, timeout_s=5) for _ in range(2)]
        strangers[0].send(Message(Kind.HELLO), timeout_s=5)
        handles = [ps.schedule(square, (number,)) for number in range(4)]
        print([ps.fetch(one) for one in handles], [one.num_runs for one in handles], flush=True)
    else:
        ps.work()
"""


def test_a_coordinator_waits_for_its_only_worker_to_return(tmp_path: Path) -> None:
    """What the killed one had begun is done by its successor, whoever else is at the coordinator's listener meanwhile."""
    write_script(tmp_path, SCHEDULE)
    result = run_rankwise(["--role-counts", "ps=1,worker=2", "--max-restarts", "1", "train.py"], tmp_path)
    assert result.code == 0, result.err
    assert "[0, 1, 4, 9] [1, 1, 2, 1]" in result.out
    assert "restart 1 of 1" in result.err


#: The worker has ended with the end of its script, and its process fails all the same.
END = """
    import sys
    import torch
    import rankwise

    ctx = rankwise.init(device="cpu")
    ps = rankwise.parameter_server(torch.nn.Linear(2, 1), lambda ones: torch.optim.SGD(ones, lr=0.1), mode="async")
    if ps.is_server:
        ps.serve()
    else:
        assert ctx.returns
        ps.pull()
        sys.exit(3)
"""


def test_what_fails_when_the_servers_have_ended_fails_the_job(tmp_path: Path) -> None:
    """A worker that exits with a code behind its training is not taken for one that has nothing left to do."""
    write_script(tmp_path, END)
    result, report = run_reported(["--role-counts", "ps=1,worker=1", "--max-restarts", "1", "train.py"], tmp_path)
    assert result.code == 1
    assert "had ended, and then its process failed with exit code 3" in report["message"]


#: The coordinator is killed when some functions are done; it saves what the servers hold after each round.
COORDINATE = """
    import os, signal
    from pathlib import Path
    import torch
    from torch import nn
    import rankwise

    def step(number):
        ps.pull()
        model.weight.grad = torch.full((1, 1), -1.0)
        ps.push()
        return number

    ctx = rankwise.init(device="cpu")
    torch.set_num_threads(1)
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    done = rankwise.checkpoint.load("saved", {"model": model, "optimizer": optimizer}, alone=True) or 0
    ps = rankwise.parameter_server(
        model, lambda ones: torch.optim.SGD(ones, lr=1.0), mode="async", coordinator=True, resume=optimizer, num_updates=done
    )
    if ps.is_server:
        ps.serve()
    elif ps.is_coordinator:
        for done in range(done, 20, 5):
            for one in [ps.schedule(step, (number,)) for number in range(done, done + 5)]:
                ps.fetch(one)
            ps.gather()
            while model.weight.item() < done + 5:  # a push may still be on its way to its server
                ps.gather()
            if done == 10 and not Path("died").exists():
                Path("died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            rankwise.checkpoint.save("saved", {"model": model, "optimizer": ps.gather()}, step=done + 5, alone=True)
        print("sum", model.weight.item(), flush=True)
    else:
        ps.work()
    ctx.close()
"""


def test_a_killed_coordinator_has_all_ranks_start_again(tmp_path: Path) -> None:
    """What it has scheduled is in its memory: all ranks start again, and the script goes on from its last checkpoint, which has every update once."""
    write_script(tmp_path, COORDINATE)
    result = run_rankwise(["--role-counts", "ps=1,chief=1,worker=2", "--max-restarts", "2", "train.py"], tmp_path)
    assert result.code == 0, result.err
    assert "chief 0 (rank 1): killed by SIGKILL" in result.err
    assert "restarted alone" not in result.err
    assert "sum 20.0" in result.out
