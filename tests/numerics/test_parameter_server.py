"""Training over a parameter server: synchronous modes equal one process, the others are counted and converge."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import rankwise
from one_process import TOLERANCE, build_data, build_model, build_optimizer, compute_loss
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

NUM_STEPS, BATCH = 20, 12


def make_optimizer(kind: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return build_optimizer(kind, nn.ParameterList(parameters))


def decay(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.5)


def find_batch(kind: str, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    data = build_data(kind)
    rows = [(step * BATCH + place) % len(data) for place in range(BATCH)]
    return data.tensors[0][rows], data.tensors[1][rows]


def average(loss: Any) -> tuple[torch.Tensor, float]:
    """A mean, and how many terms are in it."""
    return (loss[0] / loss[1], float(loss[1])) if isinstance(loss, tuple) else (loss, 1.0)


def train_alone(kind: str, optimizer_kind: str, clip_norm: float | None) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    model = build_model(kind)
    optimizer = build_optimizer(optimizer_kind, model)
    schedule = decay(optimizer)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        average(compute_loss(model, find_batch(kind, step)))[0].backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        schedule.step()
    return model.state_dict()


def train(kind: str, optimizer_kind: str, options: dict[str, Any]) -> Any:
    """On a server its report, on a worker the parameters in the end."""
    torch.set_num_threads(1)
    with rankwise.init(device="cpu") as ctx:
        model = build_model(kind)
        if ctx.rank >= options.get("servers", 1):  # the servers' values count
            nn.init.zeros_(next(iter(model.parameters())))
        ps = rankwise.parameter_server(
            model, lambda parameters: make_optimizer(optimizer_kind, parameters), scheduler=decay, **options
        )
        if ps.is_server:
            return ps.serve()
        for step in range(NUM_STEPS):
            # Shares of different size.
            own = slice(ps.worker_index, None, ps.num_workers)
            inputs, targets = find_batch(kind, step)
            inputs, targets = inputs[own], targets[own]
            ps.pull()
            loss, weight = average(compute_loss(model, (inputs, targets)))
            loss.backward()
            ps.push(weight if kind == "transformer" else len(targets))
        ps.pull()
        return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("kind", "optimizer", "num_ranks", "options"),
    [
        ("mlp", "sgd", 2, {}),
        ("mlp", "sgd", 4, {"servers": 2, "split_bytes": 200}),
        ("mlp", "adamw", 3, {}),
        ("mlp", "adamw", 4, {"servers": 2, "mode": "stale", "staleness": 0}),
        ("transformer", "sgd", 4, {"clip_norm": 0.3}),
        ("transformer", "sgd", 4, {"servers": 2, "split_bytes": None}),
    ],
)
def test_synchronous_equals_one_process(kind: str, optimizer: str, num_ranks: int, options: dict[str, Any]) -> None:
    """Any number of servers and workers, ranges of tensors, uneven shares, clipping, a schedule: the parameters of one process in float64."""
    expected = train_alone(kind, optimizer, options.get("clip_norm"))
    num_servers = options.get("servers", 1)
    found = run_ranks(train, num_ranks, kind, optimizer, {"servers": 1, **options})
    for ours in found[num_servers:]:
        for name, value in expected.items():
            scale = float(value.abs().max()) or 1.0
            torch.testing.assert_close(ours[name] / scale, value / scale, rtol=0, atol=TOLERANCE[optimizer])
    for report in found[:num_servers]:
        (shard,) = report["shards"].values()
        applied = NUM_STEPS * (num_ranks - num_servers)
        assert shard == {
            "version": NUM_STEPS,
            "applied": applied,
            "dropped": 0,
            "staleness": {0: applied},
            "expelled": [],
        }


def find_loss(parameters: dict[str, torch.Tensor]) -> float:
    model = build_model("mlp")
    model.load_state_dict(parameters)
    return float(
        nn.functional.cross_entropy(model(build_data("mlp").tensors[0]), build_data("mlp").tensors[1]).detach()
    )


@pytest.mark.parametrize("staleness", [1, 3])
def test_staleness_is_bounded_and_counted(staleness: int) -> None:
    """Each gradient counts once, none is older than the bound, and the loss falls."""
    report, *models = run_ranks(train, 4, "mlp", "sgd", {"mode": "stale", "staleness": staleness})
    shard = report["shards"][0]
    assert sum(shard["staleness"].values()) == shard["applied"] == 3 * NUM_STEPS
    assert max(shard["staleness"]) <= staleness
    assert max(find_loss(one) for one in models) < find_loss(build_model("mlp").state_dict())


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.5}, {"servers": 2}])
def test_asynchronous_applies_each_gradient_once_and_converges(options: dict[str, Any]) -> None:
    """As many updates as pushes, and a loss below the first one."""
    num_servers = options.get("servers", 1)
    found = run_ranks(train, 3 + num_servers - 1, "mlp", "sgd", {"mode": "async", **options})
    for report in found[:num_servers]:
        (shard,) = report["shards"].values()
        assert shard["version"] == shard["applied"] == sum(shard["staleness"].values()) == 2 * NUM_STEPS
    assert find_loss(found[-1]) < find_loss(build_model("mlp").state_dict())


def test_backup_workers_are_not_waited_for() -> None:
    """With one of three as a backup, each version has two gradients at least; what came late is dropped, and nothing is lost count of."""
    report, *_ = run_ranks(train, 4, "mlp", "sgd", {"mode": "sync", "backup_workers": 1})
    shard = report["shards"][0]
    assert shard["applied"] + shard["dropped"] == 3 * NUM_STEPS
    assert shard["staleness"] == {0: shard["applied"]}


def train_and_save(folder: Path, num_steps: int, options: dict[str, Any]) -> Any:
    """Go on from the last checkpoint, if there is one; save after the last step."""
    torch.set_num_threads(1)
    with rankwise.init(device="cpu") as ctx:
        model = build_model("mlp")
        optimizer = build_optimizer("adamw", model)
        first = rankwise.checkpoint.load(folder, {"model": model, "optimizer": optimizer}) or 0
        ps = rankwise.parameter_server(
            model,
            lambda parameters: make_optimizer("adamw", parameters),
            scheduler=decay,
            resume=optimizer,
            num_updates=first,
            **options,
        )
        if ps.is_server:
            return ps.serve()
        for step in range(first, first + num_steps):
            inputs, targets = find_batch("mlp", step)
            own = slice(ps.worker_index, None, ps.num_workers)
            ps.pull()
            nn.functional.cross_entropy(model(inputs[own]), targets[own]).backward()
            ps.push()
        if ps.worker_index == 0:
            state = {"model": model, "optimizer": ps.gather()}
            rankwise.checkpoint.save(folder, state, step=first + num_steps, alone=True)
        return ctx.rank


def test_checkpoints_are_those_of_one_process(tmp_path: Path) -> None:
    """Saved with two servers, gone on with one and then with three, loaded into a plain model and AdamW: one process's parameters and states."""
    for num_ranks, num_steps, options in (
        (4, 8, {"servers": 2, "split_bytes": 500}),
        (2, 5, {}),
        (5, 7, {"servers": 3, "split_bytes": 300}),
    ):
        run_ranks(train_and_save, num_ranks, tmp_path, num_steps, options)
    assert len(rankwise.checkpoint.list_checkpoints(tmp_path)) == 3
    model = build_model("mlp")
    optimizer = build_optimizer("adamw", model)
    assert rankwise.checkpoint.load(tmp_path, {"model": model, "optimizer": optimizer}) == NUM_STEPS
    for name, value in train_alone("mlp", "adamw", None).items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=TOLERANCE["adamw"])
    assert {int(state["step"]) for state in optimizer.state.values()} == {NUM_STEPS}
    assert len(optimizer.state) == len(list(model.parameters()))
