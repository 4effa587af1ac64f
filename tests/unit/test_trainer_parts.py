"""The Trainer's parts that need no ranks: the configuration, the judgement of what is best, the choice of an optimizer's form, tables."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset, default_collate

import rankwise
from rankwise.data.map_reader import find_table
from rankwise.train.config import TrainerConfig
from rankwise.train.evaluating import Best
from rankwise.train.optimizers import choose_fused
from rankwise.train.pace import Pace


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "has neither epochs nor steps"),
        ({"epochs": 0}, "epochs=0"),
        ({"epochs": 2.5}, "epochs=2.5"),
        ({"epochs": True}, "epochs=True"),
        ({"epochs": 1, "log_every": None}, "log_every=None"),
        ({"epochs": 1, "save_every": "step"}, "save_every='step'"),
        ({"epochs": 1, "precision": "bf32"}, "precision='bf32'"),
        ({"epochs": 1, "clip_norm": 0.0}, "clip_norm=0.0"),
        ({"epochs": 1, "clip_norm": math.nan}, "clip_norm=nan"),
        ({"epochs": 1, "clip_norm": "1.0"}, "clip_norm='1.0'"),
        ({"epochs": 1, "patience": 3}, "patience=3 without a monitor"),
        ({"epochs": 1, "non_finite": "ignore"}, "non_finite='ignore'"),
        ({"epochs": 1, "scheduler_every": "batch"}, "scheduler_every='batch'"),
        ({"epochs": 1, "min_delta": -1.0}, "min_delta=-1.0"),
        ({"epochs": 1, "monitor": "accuracy"}, "monitor='accuracy' without a mode"),
        (
            {"epochs": 1, "monitor": "loss", "patience": 1, "evaluate_every": None},
            "nothing is ever evaluated",
        ),
    ],
)
def test_a_configuration_that_cannot_be_meant_is_refused(options: dict[str, Any], said: str) -> None:
    """The error names the field with its value, and what it may be."""
    with pytest.raises(rankwise.UsageError) as caught:
        TrainerConfig(**options)
    assert said in str(caught.value)
    assert caught.value.hint


def test_settings_are_plain_values() -> None:
    """What goes into the journal can be written as JSON."""
    settings = TrainerConfig(epochs=3, keep=rankwise.checkpoint.Keep(last=3), compile={"mode": "default"}).settings()
    assert settings["epochs"] == 3
    assert all(isinstance(value, (str, int, float, bool, type(None))) for value in settings.values())


def judge(values: list[float], **options: Any) -> tuple[list[bool], str | None, Best]:
    best = Best(TrainerConfig(epochs=1, monitor="m", **{"mode": "min", **options}))
    found = [best.judge({"m": value}, step) for step, value in enumerate(values)]
    return found, best.reason_to_stop, best


def test_the_best_is_judged_by_mode_and_delta() -> None:
    """Small or great as asked; a gain below min_delta and a NaN are none; the first number is the best so far."""
    assert judge([3.0, 2.0, 2.5, 1.0])[0] == [True, True, False, True]
    assert judge([3.0, 2.0, 2.5, 4.0], mode="max")[0] == [True, False, False, True]
    assert judge([3.0, 2.9, 2.4], min_delta=0.5)[0] == [True, False, True]
    assert judge([math.nan, 5.0, math.nan])[0] == [False, True, False]


def test_patience_counts_evaluations_in_a_row() -> None:
    """It is lost by evaluations without a gain, comes back with one, and outlives the process."""
    assert judge([3.0, 4.0, 2.0, 4.0], patience=2)[1] is None
    _, reason, best = judge([3.0, 4.0, 5.0], patience=2)
    assert reason == "no better m in 2 evaluations"
    again = Best(TrainerConfig(epochs=1, monitor="m", mode="min", patience=2))
    again.load_state_dict(best.state_dict())
    assert again.reason_to_stop == reason
    more_patient = Best(TrainerConfig(epochs=1, monitor="m", mode="min", patience=3))
    more_patient.load_state_dict(best.state_dict())
    assert more_patient.reason_to_stop is None


def train(optimizer_of: Any, *, fused: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    optimizer = optimizer_of(model.parameters())
    if fused:
        assert choose_fused(optimizer)
    for _ in range(5):
        model(torch.ones(2, 5, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "optimizer_of",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=0.1),
    ],
)
def test_fused_changes_the_speed_only(optimizer_of: Any) -> None:
    """An optimizer that was left open runs fused, and moves the weights to where it would have moved them."""
    for ours, theirs in zip(train(optimizer_of, fused=True), train(optimizer_of, fused=False), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_what_the_user_has_chosen_stays() -> None:
    """A chosen implementation, a class of one's own, and an optimizer that has made steps are left alone."""

    class Own(torch.optim.AdamW):
        pass

    parameters = [nn.Parameter(torch.ones(3))]
    stepped = torch.optim.AdamW(parameters)
    parameters[0].grad = torch.ones(3)
    stepped.step()
    chosen = (torch.optim.AdamW(parameters, foreach=True), torch.optim.AdamW(parameters, fused=False))
    for optimizer in (*chosen, Own(parameters), torch.optim.RMSprop(parameters), stepped):
        assert not choose_fused(optimizer)
        assert not optimizer.param_groups[0].get("fused")
    assert choose_fused(torch.optim.AdamW(parameters, fused=True))


def test_a_table_gives_what_collating_gives() -> None:
    """Rows of a TensorDataset, and of subsets of subsets of it, as default_collate stacks them."""
    data = TensorDataset(torch.arange(20.0).reshape(10, 2), torch.arange(10))
    for dataset in (data, Subset(data, [7, 2, 5, 3]), Subset(Subset(data, [9, 8, 1, 4]), [2, 0, 3])):
        table = find_table(dataset, default_collate)
        assert table is not None
        for indices in ([2, 0], [1], [0, 0, 2]):
            expected = default_collate([dataset[index] for index in indices])
            found = table.take(indices)
            assert type(found) is type(expected)
            for ours, theirs in zip(found, expected, strict=True):
                assert torch.equal(ours, theirs)
                assert ours.dtype == theirs.dtype


def test_what_may_do_more_than_index_is_no_table() -> None:
    """A class derived from TensorDataset, another collate function, and a tensor with a gradient are read sample by sample."""

    class Noisy(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return tuple(tensor[index] + torch.rand(()) for tensor in self.tensors)

    x = torch.ones(4, 2)
    assert find_table(Noisy(x), default_collate) is None
    assert find_table(Subset(Noisy(x), [0, 1]), default_collate) is None
    assert find_table(TensorDataset(x), lambda samples: samples) is None
    assert find_table(TensorDataset(x.clone().requires_grad_()), default_collate) is None
    assert find_table([1, 2, 3], default_collate) is None


def test_a_table_follows_the_data_set() -> None:
    """Samples that are put into a data set between two epochs are read; indices from the end are left to torch."""
    data = TensorDataset(torch.zeros(8, 1))
    loader = rankwise.DataLoader(data, global_batch=4, shuffle=False)
    first = [batch[0].sum().item() for batch in loader]
    data.tensors = (torch.ones(8, 1),)
    assert (first, [batch[0].sum().item() for batch in loader]) == ([0.0, 0.0], [4.0, 4.0])
    assert find_table(Subset(data, [-1, 0]), default_collate) is None
    assert len(list(rankwise.DataLoader(Subset(data, [-1, 0]), global_batch=2))) == 1


@pytest.mark.parametrize("num_steps", [1, 7])
def test_the_pace_is_a_quarter_of_a_second(num_steps: int) -> None:
    """The interval follows the time that steps take, grows fourfold at most, and is one step where these are slow."""
    pace = Pace("auto")
    assert pace.is_due(1)
    pace.follow(1, pace.propose(num_steps, num_steps * 0.01))
    assert next(step for step in range(2, 9) if pace.is_due(step)) == 5  # four times one, though 25 would do
    pace.follow(5, pace.propose(num_steps, num_steps * 2.0))
    assert pace.is_due(6)
    chosen = Pace(3)
    chosen.follow(3, 100)
    assert [step for step in range(1, 10) if chosen.is_due(step)] == [3, 6, 9]
