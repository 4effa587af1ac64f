"""Sharded models that would train apart, or not at all, without a word from torch: one error each, on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rankwise
from rankwise.testing import run_ranks


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def split_without_averaging(axis: str) -> str:
    with rankwise.init(device="cpu", mesh={axis: 2, "tensor": 2}):
        model = rankwise.apply_tensor_parallel(build(), {"0": "colwise", "2": "rowwise"})
        with pytest.raises(rankwise.UsageError) as raised:
            next(iter(rankwise.accumulate(model, [torch.ones(1, 8)])))
        return str(raised.value)


def misuse_fsdp() -> list[str]:
    said = []
    with rankwise.init(device="cpu"):
        beside = nn.Sequential(rankwise.apply_fsdp(build(), blocks=nn.Linear), nn.Linear(8, 1))
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rankwise.apply_fsdp(model, blocks=nn.Linear)
        norm = rankwise.clip_grad_norm_(model, 1.0)
        assert float(norm) == 0.0  # there are no gradients yet
        model(torch.ones(2, 8)).sum().backward()
        for call in (
            lambda: list(rankwise.accumulate(beside, [1])),
            optimizer.step,
            lambda: rankwise.clip_grad_norm_(model.parameters(), 1.0),  # type: ignore[arg-type] - the mistake
            lambda: rankwise.clip_grad_norm_(model, 0.0),
        ):
            with pytest.raises(rankwise.UsageError) as raised:
                call()
            said.append(str(raised.value))
        torch.optim.SGD(model.parameters(), lr=0.1).step()  # one that was built afterwards works
        next(iter(rankwise.accumulate(model, [1])))
    return said


def replicate_beside_fsdp() -> list[str]:
    said = []
    with rankwise.init(device="cpu"):
        model = rankwise.apply_fsdp(build(), blocks=nn.Linear)
        other = rankwise.apply_ddp(build())
        other(torch.ones(2, 8)).sum().backward()
        lbfgs = torch.optim.LBFGS(other.parameters())
        for call in (lambda: rankwise.apply_ddp(model), lambda: rankwise.apply_zero1(lbfgs)):
            with pytest.raises(rankwise.UsageError) as raised:
                call()
            said.append(str(raised.value))
    return said


def test_another_model_is_replicated_beside_a_sharded_one() -> None:
    """apply_ddp takes a second model, as of a GAN, and refuses the sharded one; apply_zero1 refuses an optimizer that looks at all parameters at once."""
    for sharded, lbfgs in run_ranks(replicate_beside_fsdp, 2):
        assert "it is sharded or split already" in sharded
        assert "LBFGS looks at all parameters at once" in lbfgs


def test_checkpointing_keeps_a_forward_of_the_instance() -> None:
    """A forward that was put on a block, as adapters do, is what is computed, once and after a second call too."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))
    x = torch.ones(2, 8, requires_grad=True)
    before = model(x)
    for block in model:
        block.forward = lambda y, block=block: 2 * nn.Sequential.forward(block, y)  # type: ignore[method-assign]
    patched = model(x)
    assert not torch.equal(before, patched)
    for _ in range(2):
        rankwise.apply_checkpointing(model, blocks=nn.Sequential)
        assert torch.equal(model(x), patched)


@pytest.mark.parametrize("axis", ["replicate", "shard"])
def test_copies_of_split_layers_that_nobody_averages_are_refused(axis: str) -> None:
    """Tensor parallelism on a mesh with a data axis, without FSDP: the copies would train apart; the parameters are named."""
    for said in run_ranks(split_without_averaging, 4, axis):
        assert "nothing averages the gradients of '0.weight'" in said
        assert "over the 2 shares of the batch" in said
        assert "apply_fsdp(model) on the whole model" in said


def test_each_mistake_with_a_sharded_model_has_its_error() -> None:
    """A layer beside the sharded model, an optimizer of replaced parameters, and wrong arguments of clip_grad_norm_ are named."""
    for beside, stale, no_model, no_bound in run_ranks(misuse_fsdp, 2):
        assert "nothing averages the gradients of '1.weight', '1.bias'" in beside
        assert "the optimizer holds 4 parameters that sharding or splitting the model has replaced" in stale
        assert "takes the model, but got a generator" in no_model
        assert "max_norm is 0.0" in no_bound
