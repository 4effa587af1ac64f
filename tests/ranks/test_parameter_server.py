"""A parameter server when something goes wrong: wrong arguments, workers and servers that are killed or frozen, rules that raise."""

from __future__ import annotations

import itertools
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import rankwise
from rankwise.parallel.servers.dense import DenseValues
from rankwise.parallel.servers.layout import spread
from rankwise.parallel.servers.shard import Gradient, Rules, Shard
from rankwise.testing import run_ranks, try_ranks

if TYPE_CHECKING:
    from pathlib import Path


def make_sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def make_rules(**options: Any) -> Rules:
    chosen: dict[str, Any] = {
        "mode": "sync", "staleness": 0, "backup_workers": 0, "optimizer": make_sgd, "table_optimizer": make_sgd, "scheduler": None, "clip_norm": None, "timeout_s": 5.0,
    }  # fmt: skip
    return Rules(**{**chosen, **options})


# ------------------------------------------------------------------ one process


def test_parameters_are_spread_by_size() -> None:
    """Every element stands on one shard, tensors above the bound are cut, and shards differ by no more than the largest that is whole."""
    model = nn.Sequential(nn.Embedding(1000, 8), nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 8).half())
    model[1].bias.requires_grad_(False)
    layouts = spread(model, 3, split_bytes=20_000)
    held: dict[str, list[tuple[int, int]]] = {}
    for layout in layouts:
        for piece in layout.pieces:
            held.setdefault(piece.name, []).append((piece.start, piece.stop))
            assert piece.offset % 64 == 0
    for name, one in model.named_parameters():
        ranges = sorted(held.get(name, []))
        if not one.requires_grad:
            assert not ranges
            continue
        assert ranges[0][0] == 0
        assert ranges[-1][1] == one.numel()
        assert all(left[1] == right[0] for left, right in itertools.pairwise(ranges))
    assert len(held["0.weight"]) == 3
    sizes = [one.size_bytes for one in layouts]
    assert max(sizes) - min(sizes) <= 64 * 64 * 4
    assert sum(len(one.pieces) for one in spread(model, 3, split_bytes=None)) == len(held)


def make_shard(**options: Any) -> Shard:
    (layout,) = spread(nn.Linear(2, 1, bias=False), 1)
    rules = make_rules(**options)
    return Shard(0, DenseValues(layout, rules), rules, workers=[1, 2, 3])


def give(shard: Shard, worker: int, clock: int, value: float, seen: int = 0) -> bool:
    assert isinstance(shard.held, DenseValues)
    buffer = shard.held.take_buffer()
    shard.held.layout.view(buffer)[0].fill_(value)
    return shard.push(Gradient(worker, clock, seen, 1.0, buffer))


def test_a_gradient_is_applied_once() -> None:
    """The same step of the same worker a second time is an error, in every mode."""
    for mode in ("sync", "async"):
        shard = make_shard(mode=mode)
        give(shard, 1, 0, 3.0)
        with pytest.raises(rankwise.CollectiveError, match="a second time"):
            give(shard, 1, 0, 3.0)
        assert shard.counts.applied == (0 if mode == "sync" else 1)


def test_late_gradients_are_dropped_and_workers_that_leave_are_not_waited_for() -> None:
    """The slowest of three is a backup; then one leaves, and the version waits for none but the last."""
    shard = make_shard(backup_workers=1)
    assert give(shard, 1, 0, 3.0)
    assert shard.version == 0
    assert give(shard, 3, 0, 6.0)
    assert shard.version == 1
    assert shard.held.parameters[0].tolist() == [[pytest.approx(-0.45)] * 2]  # the mean of both, times 0.1
    assert not give(shard, 2, 0, 100.0)
    assert (shard.counts.applied, shard.counts.dropped) == (2, 1)
    give(shard, 1, 1, 0.0, seen=1)
    shard.leave(2)
    assert shard.version == 2


# ------------------------------------------------------------------ many ranks


def train(options: dict[str, Any], fault: Any = None, num_steps: int = 12) -> Any:
    """Three workers and some servers; a fault is what a rank does at step 5."""
    torch.set_num_threads(1)
    ctx = rankwise.init(device="cpu")
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    ps = rankwise.parameter_server(model, **{"optimizer": make_sgd, **options})
    if ps.is_server:
        report = ps.serve()
        if fault is not None and fault[0] is freeze:  # what it is for is over
            os.kill(int(ctx.store.get("pid")), signal.SIGKILL)
        return report
    versions = []
    for step in range(num_steps):
        if step == 5 and fault is not None and ctx.rank == fault[1]:
            ctx.store.set("pid", str(os.getpid()))
            fault[0]()
        versions.append(ps.pull())
        model(torch.ones(2, 4)).square().sum().backward()
        ps.push()
    ps.close()
    return versions


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"servers": 0}, "servers=0"),
        ({"servers": 2}, "this job has 2 ranks, and needs 3 or more: 2 servers, at least 1 worker"),
        (
            {"coordinator": True, "mode": "async"},
            "needs 3 or more: 1 server, 1 coordinator, at least 1 worker",
        ),
        ({"mode": "fast"}, "mode='fast'"),
        ({"mode": "stale"}, "staleness=None"),
        ({"staleness": 1}, "staleness=1 with mode='sync'"),
        ({"backup_workers": 1}, "backup_workers=1 of 1 workers"),
        ({"mode": "async", "backup_workers": 1}, "mode='async'"),
        ({"clip_norm": 0}, "clip_norm=0"),
        ({"clip_norm": 1.0, "servers": 2}, "clip_norm=1.0 with mode='sync' and 2 servers: no server knows"),
        ({"timeout_s": 0}, "timeout_s=0"),
        ({"split_bytes": 0}, "split_bytes=0"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], told: str) -> None:
    """Each is one error on every rank, with the value."""
    for outcome in try_ranks(train, 3 if "clip_norm=1.0" in told else 2, options):
        assert isinstance(outcome.error, rankwise.UsageError)
        assert told in str(outcome.error)


def train_other_models() -> None:
    ctx = rankwise.init(device="cpu")
    ps = rankwise.parameter_server(nn.Linear(4, 3 + ctx.rank), make_sgd)
    ps.serve()


def test_another_model_is_refused() -> None:
    """Both sides say so, and end."""
    for outcome in try_ranks(train_other_models, 2):
        assert "another model" in str(outcome.error)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_killed_worker_does_not_stop_the_others(mode: str) -> None:
    """The others make all their steps, the server counts what came, and tells who was lost."""
    outcomes = try_ranks(train, 5, {"mode": mode, "servers": 2}, (die, 3), grace_s=60)
    assert outcomes[3].exit_code == -signal.SIGKILL
    for server in (0, 1):
        report = outcomes[server].value
        assert list(report["lost"]) == [3]
        assert report["ended"] == [2, 4]
        assert report["shards"][server]["applied"] == 2 * 12 + 5
    for worker in (2, 4):
        assert len(outcomes[worker].value) == 12


def test_a_frozen_worker_is_left_out() -> None:
    """After timeout_s the others go on, and the server ends without it."""
    outcomes = try_ranks(train, 4, {"timeout_s": 2.0}, (freeze, 2), grace_s=60)
    assert outcomes[0].value["shards"][0]["expelled"] == [2]
    assert outcomes[0].value["ended"] == [1, 3]
    assert [len(outcomes[worker].value) for worker in (1, 3)] == [12, 12]
    assert outcomes[2].exit_code == -signal.SIGKILL


def make_failing(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = make_sgd(parameters)

    def fail() -> None:
        raise ZeroDivisionError("the rule fails")

    optimizer.step = fail  # type: ignore[method-assign, assignment]
    return optimizer


def train_with_failing_rule() -> None:
    ctx = rankwise.init(device="cpu")
    model = nn.Linear(4, 3)
    ps = rankwise.parameter_server(model, make_failing)
    if ctx.rank == 0:
        ps.serve()
    for _ in range(10):
        ps.pull()
        model(torch.ones(2, 4)).sum().backward()
        ps.push()


def test_an_update_rule_that_raises_ends_all() -> None:
    """The server raises the rule's own error, the workers name the server and that error."""
    outcomes = try_ranks(train_with_failing_rule, 3)
    assert isinstance(outcomes[0].error, ZeroDivisionError)
    for outcome in outcomes[1:]:
        assert isinstance(outcome.error, rankwise.CollectiveError)


def train_beside_dead_server() -> None:
    ctx = rankwise.init(device="cpu")
    model = nn.Linear(4, 3)
    ps = rankwise.parameter_server(model, make_sgd, servers=2)
    if ctx.rank == 1:
        signal.signal(signal.SIGALRM, lambda *_: die())
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    if ps.is_server:
        ps.serve()
        return
    while True:
        ps.pull()
        model(torch.ones(2, 4)).sum().backward()
        ps.push()


def test_a_killed_server_is_named() -> None:
    """Without checkpoints its parameters are lost: the workers end with its name, and the other server after them."""
    outcomes = try_ranks(train_beside_dead_server, 4, grace_s=60)
    for outcome in outcomes[2:]:
        assert isinstance(outcome.error, rankwise.CollectiveError)
        assert "server 1 (rank 1)" in str(outcome.error)
    assert "all workers are gone" in str(outcomes[0].error)


def use_wrong_side() -> list[str]:
    rankwise.init(device="cpu")
    model, told = nn.Linear(4, 3), []
    ps = rankwise.parameter_server(model, make_sgd)
    for call in (ps.pull, ps.push) if ps.is_server else (ps.serve, ps.push):
        with pytest.raises(rankwise.UsageError) as caught:
            call()
        told.append(caught.value.message)
    if ps.is_server:
        ps.serve()
    ps.close()
    if not ps.is_server:
        with pytest.raises(rankwise.UsageError) as caught:
            ps.pull()
        told.append(caught.value.message)
    return told


def test_each_side_has_its_calls() -> None:
    """A server does not pull, a worker does not serve, pulls before it pushes, and does neither when it has ended."""
    server, worker = run_ranks(use_wrong_side, 2)
    assert server == ["pull() on server 0", "push() on server 0"]
    assert worker == ["serve() on worker 0", "push() before the first pull()", "pull() after close()"]


def train_by_role(folder: Path) -> Any:
    """What the ranks are they say themselves; worker 2 writes a checkpoint, which a plain model and optimizer read."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = "3"  # torchrun's, which starts all ranks again
    ctx = rankwise.init(device="cpu", role="ps" if rank < 2 else "worker")
    assert not ctx.returns
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    ps = rankwise.parameter_server(model, lambda ones: torch.optim.Adam(ones, lr=0.1))
    if ps.is_server:
        return ps.num_servers, ps.serve()["ended"]
    for _ in range(5):
        ps.pull()
        model(torch.ones(2, 4)).square().sum().backward()
        ps.push()
    if rank == 2:
        state = {"model": model, "optimizer": ps.gather()}
        rankwise.checkpoint.save(folder, state, step=5, alone=True)
    with pytest.raises(rankwise.UsageError, match="have roles") as caught:
        rankwise.all_reduce(torch.ones(1))
    with pytest.raises(rankwise.UsageError, match="already joined"):
        rankwise.init()
    ctx.close()
    return caught.value.rank


def test_roles_by_hand_and_a_checkpoint_for_one_process(tmp_path: Path) -> None:
    """Ranks find each other by what each says that it is; what the servers hold is a checkpoint of a plain model and optimizer."""
    outcomes = run_ranks(train_by_role, 4, tmp_path)
    assert outcomes == [(2, [2, 3]), (2, [2, 3]), 2, 3]
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    own = torch.optim.Adam(plain.parameters(), lr=0.1)
    for _ in range(5):
        own.zero_grad()
        plain(torch.ones(2, 4)).square().sum().backward()
        own.step()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    assert rankwise.checkpoint.load(tmp_path, {"model": model, "optimizer": optimizer}) == 5
    for left, right in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(left, right, atol=1e-6)
        assert torch.allclose(optimizer.state[left]["exp_avg_sq"], own.state[right]["exp_avg_sq"], atol=1e-6)
