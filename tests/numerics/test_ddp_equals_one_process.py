"""Training on W ranks is training in one process with the same samples: weights, statistics and loss, to 1e-12."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import rankwise
from rankwise.parallel.accumulation import accumulate, loss_scale
from rankwise.parallel.ddp import Tuning, apply_ddp
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from torch import Tensor

#: Float64 has 53 bits; a few hundred additions in another order cost three digits of sixteen.
TOLERANCE = 1e-12
NUM_STEPS = 3
NUM_CLASSES = 3


def build_model(seed: int) -> nn.Module:
    """Two convolutions with BatchNorm, and a head with another."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 5, 3, stride=2), nn.BatchNorm2d(5, momentum=None), nn.ReLU(), nn.Flatten(),
        nn.Linear(20, 6), nn.BatchNorm1d(6, affine=False), nn.Linear(6, NUM_CLASSES),
    ).double()  # fmt: skip


def build_samples(step: int, number: int) -> tuple[Tensor, Tensor]:
    """The samples of one step, the same wherever they are made; far from zero mean, which sums of squares do not bear."""
    generator = torch.Generator().manual_seed(1000 + step)
    inputs_BCHW = torch.randn(number, 2, 6, 6, generator=generator, dtype=torch.float64) * 3 + 5
    return inputs_BCHW, torch.randint(NUM_CLASSES, (number,), generator=generator)


def split(number: int, parts: int) -> list[int]:
    """Split as evenly as whole samples allow: 10 in 4 is 3, 3, 2, 2."""
    return [number // parts + (part < number % parts) for part in range(parts)]


def train(world_size: int, rank: int, micro_sizes: list[list[int]], model: nn.Module, ctx: Any) -> dict[str, Any]:
    """Train; without a context in one process, on all samples of each micro-batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(NUM_STEPS):
        sizes = micro_sizes if step == NUM_STEPS - 1 else [[4] * world_size for _ in micro_sizes]
        inputs, targets = build_samples(step, sum(map(sum, sizes)))
        micro_batches, start = [], 0
        for row in sizes:
            first, count = (start, sum(row)) if ctx is None else (start + sum(row[:rank]), row[rank])
            micro_batches.append((inputs[first : first + count], targets[first : first + count]))
            start += sum(row)
        scale = 1 / len(inputs) if ctx is None else loss_scale(sum(len(x) for x, _ in micro_batches), ctx=ctx)
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for x, y in micro_batches if ctx is None else accumulate(model, micro_batches, ctx=ctx):
            loss = cross_entropy(model(x), y, reduction="sum") * scale
            loss.backward()
            total += loss.detach()
        optimizer.step()
        if ctx is not None:
            torch.distributed.all_reduce(total)
            total /= ctx.world_size
        losses.append(float(total))
    inner = model if ctx is None else model.module
    state = {name: value.detach().clone() for name, value in inner.state_dict().items()}
    inner.eval()
    return {"losses": losses, "state": state, "evaluated": inner(build_samples(99, 5)[0]).detach()}


def on_ranks(
    world_size: int, micro_sizes: list[list[int]], gradient_as_bucket_view: bool, synced: bool = True
) -> dict[str, Any]:
    with rankwise.init(device="cpu") as ctx:
        # Other weights on each rank: DDP must start from those of rank 0.
        ddp = apply_ddp(
            build_model(ctx.rank),
            ctx=ctx,
            sync_batchnorm=synced,
            tuning=Tuning(gradient_as_bucket_view=gradient_as_bucket_view),
        )
        return train(world_size, ctx.rank, micro_sizes, ddp, ctx)


def assert_same(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    torch.testing.assert_close(torch.tensor(ours["losses"]), torch.tensor(expected["losses"]), rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(ours["evaluated"], expected["evaluated"], rtol=0, atol=TOLERANCE)
    assert ours["state"].keys() == expected["state"].keys()
    for name, value in expected["state"].items():
        torch.testing.assert_close(
            ours["state"][name], value, rtol=0, atol=TOLERANCE, msg=lambda text, name=name: f"{name}: {text}"
        )


# The last step's micro-batches: 10 samples, then fewer than there are ranks.
UNEVEN = {1: [10], 3: [10, 5, 2]}


@pytest.mark.parametrize("gradient_as_bucket_view", [True, False])
@pytest.mark.parametrize("num_micro", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_train_as_one_process_does(world_size: int, num_micro: int, gradient_as_bucket_view: bool) -> None:
    """With synced BatchNorm, accumulation and an uneven last step, W ranks end with the weights of one process."""
    micro_sizes = [split(number, world_size) for number in UNEVEN[num_micro]]
    expected = train(world_size, 0, micro_sizes, build_model(0), None)
    for ours in run_ranks(on_ranks, world_size, world_size, micro_sizes, gradient_as_bucket_view):
        assert_same(ours, expected)


def test_batchnorm_of_each_rank_alone_is_another_training() -> None:
    """The comparison above can fail: with each rank's own batch statistics the losses are not those of one process."""
    micro_sizes = [split(10, 2)]
    expected = train(2, 0, micro_sizes, build_model(0), None)
    for ours in run_ranks(on_ranks, 2, 2, micro_sizes, True, False):
        assert abs(ours["losses"][0] - expected["losses"][0]) > 1e-6


def without_batchnorm(counts: list[list[int]]) -> list[Tensor]:
    with rankwise.init(device="cpu") as ctx:
        torch.manual_seed(0)
        ddp = apply_ddp(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double(), ctx=ctx)
        inputs = torch.arange(3.0 * sum(map(sum, counts)), dtype=torch.float64).reshape(-1, 3).sin()
        start = sum(map(sum, counts[: ctx.rank]))
        mine = inputs[start : start + sum(counts[ctx.rank])].split(counts[ctx.rank])
        scale = loss_scale(sum(counts[ctx.rank]), ctx=ctx)
        for x in accumulate(ddp, iter(mine), ctx=ctx):
            (ddp(x).square().sum() * scale).backward()
        return [parameter.grad.clone() for parameter in ddp.parameters()]


@pytest.mark.parametrize("counts", [[[3], [1, 2, 4]], [[2, 2], [0], [1, 1, 1]]])
def test_ranks_may_have_different_numbers_of_micro_batches(counts: list[list[int]]) -> None:
    """One, two or three micro-batches on different ranks, or one without samples: the gradient is that of the whole."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    inputs = torch.arange(3.0 * sum(map(sum, counts)), dtype=torch.float64).reshape(-1, 3).sin()
    model(inputs).square().mean().backward()
    for gradients in run_ranks(without_batchnorm, len(counts), counts):
        for ours, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(ours, parameter.grad, rtol=0, atol=TOLERANCE)
