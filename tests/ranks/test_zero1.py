"""apply_zero1: each rank keeps its share of the states; what can't be cut says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import rankwise
from rankwise import checkpoint
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()


def keep_share(folder: Path) -> tuple[int, int, list[str]]:
    """Two steps, a save, and what the rank holds; then the same from the checkpoint."""
    with rankwise.init(device="cpu"):
        model = rankwise.apply_ddp(build())
        groups = [{"params": [*model.parameters()][:6], "lr": 0.1}, {"params": [*model.parameters()][6:]}]
        optimizer = rankwise.apply_zero1(torch.optim.AdamW(groups, lr=0.01))
        for _ in range(2):
            step(model, optimizer)
        checkpoint.save(folder, {"model": model, "optimizer": optimizer}, step=2)
        held = sum(value.numel() for state in optimizer.optim.state.values() for value in state.values())
        step(model, optimizer)
        other = rankwise.apply_ddp(build())
        groups = [{"params": [*other.parameters()][:6], "lr": 0.3}, {"params": [*other.parameters()][6:]}]
        again = rankwise.apply_zero1(torch.optim.AdamW(groups, lr=0.02))
        checkpoint.load(folder, {"model": other, "optimizer": again})
        again_held = sum(value.numel() for state in again.optim.state.values() for value in state.values())
        step(other, again)
        assert again_held == held
        assert [group["lr"] for group in again.param_groups] == [0.1, 0.01]
        return held, sum(one.numel() for one in model.parameters()), [
            name for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True) if not torch.equal(one, two)
        ]  # fmt: skip


@pytest.mark.parametrize("world_size", [1, 3, 5])
def test_each_rank_keeps_its_share(world_size: int, tmp_path: Path) -> None:
    """AdamW's states take 2/n of the weights' elements on each rank; saved and loaded, a step later all weights are equal to the bit."""
    for held, size, differing in run_ranks(keep_share, world_size, tmp_path / "run"):
        assert held <= 2 * (size / world_size + 64) + 12  # a weight is not cut
        assert not differing


def train_by_adagrad() -> list[torch.Tensor]:
    with rankwise.init(device="cpu"):
        model = rankwise.apply_ddp(build())
        optimizer = rankwise.apply_zero1(torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5))
        for _ in range(3):
            step(model, optimizer)
        return [one.detach() for one in model.parameters()]


def test_states_that_an_optimizer_begins_with_are_no_steps() -> None:
    """Adagrad makes its states when it is built; its weights are those of one process."""
    model = build()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
    for _ in range(3):
        step(model, optimizer)
    for found in run_ranks(train_by_adagrad, 2):
        torch.testing.assert_close(found, [one.detach() for one in model.parameters()])


def load_whole(folder: Path) -> list[float]:
    """Without any launcher: a plain optimizer takes the state."""
    model = build()
    groups = [{"params": [*model.parameters()][:6]}, {"params": [*model.parameters()][6:]}]
    optimizer = torch.optim.AdamW(groups)
    checkpoint.load(folder, {"model": model, "optimizer": optimizer})
    return [float(state["exp_avg"].abs().sum()) for state in optimizer.state.values()]


def test_a_plain_optimizer_takes_the_state(tmp_path: Path) -> None:
    """What three ranks kept in parts is whole for one."""
    run_ranks(keep_share, 3, tmp_path / "run")
    found = run_ranks(load_whole, 1, tmp_path / "run")[0]
    assert len(found) == 12
    assert all(found)


def misuse(case: str) -> str:
    with rankwise.init(device="cpu") as ctx:
        model = build()
        make: Callable[[], Any] = lambda: torch.optim.AdamW(model.parameters())  # noqa: E731
        if case == "sharded":
            rankwise.apply_fsdp(model)
        elif case == "dtypes":
            model[0].double()
        optimizer = make()
        if case == "twice":
            optimizer = rankwise.apply_zero1(optimizer)
        elif case == "stepped":
            step(model, optimizer)
        elif case == "scheduler":
            torch.optim.lr_scheduler.StepLR(optimizer, 3)
        elif case == "other":
            optimizer = torch.optim.SGD(model.parameters()) if ctx.rank else optimizer
        with pytest.raises(rankwise.RankwiseError) as caught:
            rankwise.apply_zero1(optimizer)
        return str(caught.value)


MISTAKES = {
    "twice": "sharded already",
    "stepped": "has made steps",
    "scheduler": "a scheduler was built over this AdamW",
    "sharded": "the parameters of this AdamW are sharded",
    "dtypes": "float32 on cpu, float64 on cpu",
    "other": "do not agree on the optimizer that apply_zero1 cuts",
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_one_clear_error(case: str) -> None:
    """The same error on every rank, before anything is cut."""
    for text in run_ranks(misuse, 2, case):
        assert MISTAKES[case] in text
