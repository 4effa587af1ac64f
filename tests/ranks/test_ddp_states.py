"""A wrapped model whose parameters are frozen, ignored or unfrozen, and that one rank evaluates alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankwise
from rankwise.base.errors import ModelError, UsageError
from rankwise.parallel.accumulation import loss_scale
from rankwise.parallel.ddp import apply_ddp
from rankwise.testing.ranks import run_ranks, try_ranks


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))


def step(ddp: Any) -> None:
    ddp(torch.randn(3, 2)).sum().backward()


def test_one_rank_may_evaluate_alone() -> None:
    """In evaluation the wrapped model sends no buffers; afterwards training shares them as before."""

    def body() -> Any:
        with rankwise.init(device="cpu", timeout_s=20) as ctx:
            ddp = apply_ddp(build())
            for _ in range(2):
                ddp.train()
                torch.manual_seed(ctx.rank)
                step(ddp)
                ddp.eval()
                if ctx.is_main:
                    with torch.no_grad():
                        ddp(torch.randn(3, 2))
                rankwise.barrier()
            ddp.train()
            step(ddp)
            mean = ddp.module[1].running_mean
            with torch.no_grad():
                mean.fill_(float(ctx.rank + 5))
            step(ddp)  # begins with rank 0's buffers
            return bool((mean < 5.9).all())

    assert run_ranks(body, 2) == [True, True]


def test_parameters_that_ddp_ignores_are_no_news() -> None:
    """They were never averaged, and were asked not to be."""

    def body() -> str:
        with rankwise.init(device="cpu"):
            model = build()
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
            step(apply_ddp(model))
            return "ok"

    assert run_ranks(body, 2) == ["ok"] * 2


def test_freezing_a_part_is_right_with_find_unused_or_in_evaluation() -> None:
    """Torch copes with both; only in training without find_unused_parameters would the averaging wait for ever."""

    def body(finds: bool) -> list[str]:
        with rankwise.init(device="cpu"):
            ddp = apply_ddp(build(), find_unused_parameters=finds)
            step(ddp)
            ddp.module[2].requires_grad_(False)
            told = []
            for mode in (False, True):
                ddp.train(mode)
                try:
                    ddp(torch.randn(3, 2)).sum().backward() if finds and mode else ddp(torch.randn(3, 2))
                except ModelError:
                    told.append("refused")
                else:
                    told.append("ok")
            return told

    assert run_ranks(body, 2, True) == [["ok", "ok"]] * 2
    assert run_ranks(body, 2, False) == [["ok", "refused"]] * 2


def test_unfreezing_is_noticed_at_the_next_forward() -> None:
    """D9: without a call of train() in between, as a script that unfreezes after some steps has none."""

    def body() -> None:
        with rankwise.init(device="cpu"):
            model = build()
            model[2].requires_grad_(False)
            ddp = apply_ddp(model)
            step(ddp)
            step(ddp)
            ddp.module[2].requires_grad_(True)
            step(ddp)

    for outcome in try_ranks(body, 2):
        assert isinstance(outcome.error, ModelError), outcome
        assert "'2.weight', '2.bias' were unfrozen" in str(outcome.error)


def test_samples_that_are_no_number_are_refused_on_all_ranks() -> None:
    """NaN on one rank would make the loss of all of them NaN."""

    def body() -> None:
        with rankwise.init(device="cpu") as ctx:
            loss_scale(float("nan") if ctx.rank else 4)

    texts = {str(outcome.error) for outcome in try_ranks(body, 2) if isinstance(outcome.error, UsageError)}
    assert len(texts) == 1
    assert "is nan on rank 1" in texts.pop()


def test_weights_of_samples_are_added_exactly() -> None:
    """Counts beyond float32 and from torch are taken, and added in float64 or as integers."""

    def body() -> float:
        with rankwise.init(device="cpu") as ctx:
            return loss_scale(torch.tensor(2**24 + ctx.rank).item()) * (2**25 + 1)

    assert run_ranks(body, 2) == [2.0, 2.0]
