"""apply_ddp(reduce="flat"): the same gradients as DDP's, from one buffer and one all-reduce, however the loop is written."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rankwise
from rankwise.parallel.accumulation import accumulate
from rankwise.parallel.ddp import Tuning, apply_ddp
from rankwise.testing import run_ranks


@dataclass
class Pair:
    """Outputs as many models return them."""

    first: Tensor
    second: Tensor


class Sealed:
    """A container that nobody can look into."""

    def __init__(self, values: Tensor) -> None:
        self.values = values


class Net(nn.Module):
    """Layers of two dtypes, a convolution in channels_last, BatchNorm, and a layer that is not always used."""

    def __init__(self, form: str = "tensor") -> None:
        super().__init__()
        self.form = form
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(16, 5).double()
        self.spare = nn.Linear(5, 5).double()

    def forward(self, x: Tensor) -> Any:
        outputs = self.head(self.norm(self.conv(x)).flatten(1).double())
        if self.form == "pair":
            return Pair(outputs, self.spare(outputs))
        return (
            Sealed(outputs + 0 * self.spare(outputs))
            if self.form == "sealed"
            else outputs + self.spare(outputs)
        )


def compute_loss(outputs: Any) -> Tensor:
    if isinstance(outputs, Pair):
        return (outputs.first * outputs.second).sum()
    values = outputs.values if isinstance(outputs, Sealed) else outputs
    return values.square().mean()


def make_inputs(rank: int, number: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(6, 3, 4, 4, generator=generator) for _ in range(number)]


def train(reduce: str, form: str, to_none: bool) -> dict[str, Tensor]:
    """Three plain steps, one of two micro-batches, one whose gradients can be differentiated; return the weights."""
    with rankwise.init(device="cpu") as ctx:
        torch.manual_seed(ctx.rank)  # other weights on each rank: all start from rank 0's
        ddp = apply_ddp(Net(form), reduce=reduce)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        for inputs in make_inputs(ctx.rank, 3):
            compute_loss(ddp(inputs)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        for inputs in accumulate(ddp, make_inputs(10 + ctx.rank, 2)):
            compute_loss(ddp(inputs)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
        compute_loss(ddp(make_inputs(20 + ctx.rank)[0])).backward(create_graph=reduce == "flat")
        optimizer.step()
        with torch.no_grad():
            ddp(make_inputs(30)[0])  # in training mode the statistics are rank 0's
        return {name: value.clone() for name, value in ddp.module.state_dict().items()}


@pytest.mark.parametrize("form", ["tensor", "pair", "sealed"])
@pytest.mark.parametrize("to_none", [True, False])
def test_two_ranks_are_ddps_to_the_bit(form: str, to_none: bool) -> None:
    """The sum of two numbers has one order: weights and statistics are those of torch's reducer, bit by bit."""
    for flat, buckets in zip(
        run_ranks(train, 2, "flat", form, to_none), run_ranks(train, 2, "buckets", form, to_none), strict=True
    ):
        for name, value in buckets.items():
            assert torch.equal(flat[name], value), name


def look_at_gradients() -> None:
    with rankwise.init(device="cpu") as ctx:
        ddp = apply_ddp(Net(), reduce="flat")
        assert isinstance(ddp, DistributedDataParallel)
        ddp(make_inputs(ctx.rank)[0]).sum().backward()
        starts = {one.grad.untyped_storage().data_ptr() for one in ddp.parameters()}
        assert len(starts) == 2, "one buffer for each dtype"
        assert ddp.module.conv.weight.grad.stride() == ddp.module.conv.weight.stride()
        # A step in which a layer has no part: an average of zeros, and no wait.
        ddp.zero_grad()
        ddp.module.form = "pair"
        ddp(make_inputs(ctx.rank)[0]).first.sum().backward()
        assert not ddp.module.spare.weight.grad.any()
        assert ddp.module.head.weight.grad.any()
        ddp.module.form = "tensor"
        ddp.zero_grad()
        twin = copy.deepcopy(ddp)
        twin(make_inputs(ctx.rank)[0]).sum().backward()
        assert twin.module.head.weight.grad is not None
        assert ddp.module.head.weight.grad is None
        assert ctx.world_size == 1 or not torch.equal(
            twin.module.head.weight.grad, compute_alone(ctx.rank, ddp.module)
        )


def compute_alone(rank: int, model: nn.Module) -> Tensor:
    alone = copy.deepcopy(model)
    alone(make_inputs(rank)[0]).sum().backward()
    return alone.head.weight.grad


def test_gradients_are_views_and_copies_average_too() -> None:
    """One buffer for each dtype, strides as the parameters'; a deep copy averages by itself."""
    run_ranks(look_at_gradients, 2)


def leave_early() -> None:
    with rankwise.init(device="cpu") as ctx:
        ddp = apply_ddp(nn.Linear(3, 1), reduce="flat")
        inputs = torch.ones(2, 3)
        for micro in accumulate(ddp, [inputs, inputs]):
            ddp(micro).sum().backward()
            break
        with pytest.raises(rankwise.CollectiveError, match="left after 1 micro-batch"):
            ddp(inputs)
        ddp.zero_grad()
        hidden: list[Tensor] = []
        inner = ddp.module
        handle = inner.register_forward_hook(lambda *given: hidden.append(given[2]))
        ddp(inputs)
        hidden[0].mean().backward()  # passes through the outputs: the hook is the output's
        assert inner.weight.grad is not None
        ddp.zero_grad()
        handle.remove()
        ddp(inputs)
        (inner.weight * 2).sum().backward()  # not through the outputs
        with pytest.raises(rankwise.CollectiveError, match="not averaged"):
            ddp(inputs)
        ddp.zero_grad()
        ddp(inputs).sum().backward()
        assert ctx.world_size == 2


def test_gradients_that_were_not_averaged_are_an_error() -> None:
    """An accumulation left early, and a loss that passes by the outputs, are told at the next forward; then all is well again."""
    run_ranks(leave_early, 2)


def misuse() -> list[str]:
    found = []
    with rankwise.init(device="cpu"):
        for model, options in (
            (nn.Linear(2, 2), {"reduce": "rings"}),
            (nn.Linear(2, 2), {"reduce": "flat", "comm_hook": "bf16"}),
            (nn.Linear(2, 2), {"reduce": "flat", "tuning": Tuning(bucket_cap_mb=1)}),
            (nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2)), {"reduce": "flat"}),
        ):
            with pytest.raises(rankwise.RankwiseError) as caught:
                apply_ddp(model, **options)
            found.append(str(caught.value))
        ddp = apply_ddp(nn.Linear(2, 2), reduce="flat")
        for call in (lambda: ddp.register_comm_hook(None, None), ddp.join):
            with pytest.raises(rankwise.UsageError) as caught:
                call()
            found.append(str(caught.value))
    return found


def test_what_has_no_buckets_says_so() -> None:
    """Options of buckets, sparse gradients, hooks and join() are refused by name."""
    texts = run_ranks(misuse, 2)[0]
    for text, word in zip(
        texts,
        ["'rings'", "comm_hook", "bucket_cap_mb", "'0' has sparse=True", "no buckets", "without a rank"],
        strict=True,
    ):
        assert word in text, text
