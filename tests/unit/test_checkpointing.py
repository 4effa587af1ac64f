"""Blocks that are computed again in backward: what a model has learned, and what it has counted, is as without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankwise


class Block(nn.Module):
    """Counts its forwards, beside BatchNorm's statistics; a mask that autograd saves never changes."""

    def __init__(self, *, momentum: float | None) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = (
            nn.Linear(6, 6),
            nn.BatchNorm1d(6, momentum=momentum),
            nn.Dropout(0.3),
        )
        self.register_buffer("mask", torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0]))
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("spread", torch.ones(1).expand(6))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return x + self.drop(self.norm(self.linear(x) * self.mask * self.spread)).tanh()


def train(mode: Any, *, momentum: float | None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(momentum=momentum) for _ in range(3)))
    if mode is not None:
        rankwise.apply_checkpointing(model, mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(5, 6)).square().sum().backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("mode", ["full", "selective", 2])
def test_a_batch_counts_once(mode: Any, momentum: float | None) -> None:
    """Running statistics and counters are those of a training without checkpoints, to the bit, and so are the weights."""
    expected = train(None, momentum=momentum)
    for name, value in train(mode, momentum=momentum).items():
        assert torch.equal(value, expected[name]), name


class Updating(nn.Module):
    """Computes with buffers that its forward updates: in place, by another tensor, and in spectral_norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.norm = nn.InstanceNorm1d(6, track_running_stats=True)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("n", torch.zeros(()))
        self.register_buffer("sparse", torch.eye(2).to_sparse_csr())

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.mul_(0.9).add_(x.abs().mean(), alpha=0.1)
        self.n = self.n + 1
        return (
            x
            + self.norm(self.linear(x)[..., None].expand(-1, -1, 2) * torch.arange(2)).sum(-1)
            + (self.linear(x) / self.scale / self.n).tanh()
        )


def train_updating(mode: Any, num_batches: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(Updating(), Updating()).double()
    if mode is not None:
        rankwise.apply_checkpointing(model, mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        for _ in range(num_batches):
            model(torch.randn(5, 6).double()).square().mean().backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("num_batches", [1, 2])
@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_block_begins_again_from_the_buffers_that_it_found(mode: Any, num_batches: int) -> None:
    """Gradients through spectral_norm, an EMA and a counter that is another tensor each time: weights and buffers are those without checkpoints."""
    expected = train_updating(None, num_batches)
    for name, value in train_updating(mode, num_batches).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0, msg=name)
