"""Collectives that carry gradients: W ranks get the gradients of one process that holds everything."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import rankwise
from rankwise.runtime import collectives
from rankwise.testing.ranks import run_ranks


def make_rows(rank: int, uneven: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(rank + 1 if uneven else 3, 4, generator=generator, dtype=torch.float64)


def make_weight() -> torch.Tensor:
    return torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3).requires_grad_()


def contrast(own: torch.Tensor, everything: torch.Tensor, start: int) -> torch.Tensor:
    """Each row against all: InfoNCE, summed over our own rows."""
    targets = torch.arange(start, start + len(own))
    return torch.nn.functional.cross_entropy(own @ everything.T, targets, reduction="sum")


def gather_and_contrast(uneven: bool) -> tuple[torch.Tensor, float]:
    warnings.simplefilter("error")
    ctx = rankwise.init(timeout_s=20)
    weight = make_weight()
    own = torch.tanh(make_rows(ctx.rank, uneven) @ weight)
    everything = collectives.all_gather_with_grad(own)
    start = sum(len(make_rows(rank, uneven)) for rank in range(ctx.rank))
    loss = contrast(own, everything, start)
    loss.backward()
    return weight.grad, float(loss.detach())


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_contrastive_loss_has_the_gradient_of_one_process(world_size: int, uneven: bool) -> None:
    """The sum over the ranks of losses and gradients is that of one process, to 1e-12, uneven batches included."""
    weight = make_weight()
    everything = torch.tanh(torch.cat([make_rows(rank, uneven) for rank in range(world_size)]) @ weight)
    loss = contrast(everything, everything, 0)
    loss.backward()
    seen = run_ranks(gather_and_contrast, world_size, uneven)
    # float64; sums run in another order.
    torch.testing.assert_close(sum(grad for grad, _ in seen), weight.grad, rtol=1e-12, atol=1e-12)
    assert sum(part for _, part in seen) == pytest.approx(float(loss.detach()), rel=1e-12)


def normalise(op: str) -> torch.Tensor:
    ctx = rankwise.init(timeout_s=20)
    weight = make_weight()
    own = make_rows(ctx.rank, False) @ weight
    mean = collectives.all_reduce_with_grad(own.mean(0), op)
    ((own - mean) ** 2).sum().backward()
    return weight.grad


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_statistics_over_all_ranks_have_the_gradient_of_one_process(op: str, world_size: int) -> None:
    """Rows normalised by a mean over all ranks, as batch norm does, get the gradients of one process."""
    weight = make_weight()
    rows = [make_rows(rank, False) @ weight for rank in range(world_size)]
    mean = sum(own.mean(0) for own in rows) / (world_size if op == "mean" else 1)
    sum(((own - mean) ** 2).sum() for own in rows).backward()
    torch.testing.assert_close(sum(run_ranks(normalise, world_size, op)), weight.grad, rtol=1e-12, atol=1e-12)


def check_slices() -> bool:
    ctx = rankwise.init(timeout_s=20)
    x = torch.full((), float(ctx.rank), dtype=torch.float64, requires_grad=True)
    joined = collectives.all_gather_with_grad(x)
    (joined * torch.arange(1.0, 4.0) * (ctx.rank + 1)).sum().backward()
    return joined.tolist() == [0.0, 1.0, 2.0] and float(x.grad) == (ctx.rank + 1) * 6


def test_a_slices_gradient_is_the_sum_over_all_ranks_losses() -> None:
    """What rank k's loss says of rank r's value reaches rank r; a 0-d tensor is one row."""
    assert run_ranks(check_slices, 3) == [True] * 3


def gather_without_grad() -> bool:
    rankwise.init(timeout_s=20)
    with torch.no_grad():
        return collectives.all_gather_with_grad(torch.ones(2, requires_grad=True)).requires_grad


def test_without_grad_nothing_is_recorded() -> None:
    """Under no_grad the result requires no gradient, so that evaluation may use the same code."""
    assert run_ranks(gather_without_grad, 2) == [False, False]


def use_on_one_rank_only() -> Any:
    ctx = rankwise.init(timeout_s=20)
    x = torch.ones(2, requires_grad=True)
    group = collectives.new_group([0, 1], timeout_s=1)
    joined = collectives.all_gather_with_grad(x, group=group)
    if ctx.rank == 1:
        ctx.store.wait(["told"])
        return ""
    try:
        joined.sum().backward()
    except rankwise.CollectiveTimeoutError as error:
        ctx.store.set("told", "")
        return str(error)
    return None


def test_a_loss_that_leaves_the_result_out_is_named() -> None:
    """Where rank 1 never reaches the backward pass, rank 0 reads that, and of which call."""
    text = run_ranks(use_on_one_rank_only, 2)[0]
    assert "the backward pass of all_gather_with_grad" in text
    assert "rank 1" in text
