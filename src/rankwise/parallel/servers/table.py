"""Embedding tables whose rows stand on servers: which row is where, and what one server holds.

Rows are pulled when a batch needs them, and only their gradients are pushed (DistBelief's and DLRM's way: Naumov et al.,
arXiv:1906.00091), so that a table may be larger than the memory of any host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from rankwise.base.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from rankwise.parallel.servers.rules import Rules
    from rankwise.parallel.servers.shard import Gradient

SHARDINGS = ("hash", "range")
#: Rows are drawn by blocks, each from a seed of its own: the same table for any number of servers.
_BLOCK = 4096


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TableFacts:
    """What must be known of a table to find its rows, as ``ServedEmbedding`` was told; equal on all ranks.

    By ``hash`` row N is on server N modulo their number, so that rows that are often used and stand side by side are parted.
    """

    num_rows: int
    size: int
    dtype: torch.dtype
    sharding: str
    seed: int
    std: float

    def check(self) -> None:
        """Refuse what makes no sense."""
        for name, value in (("num_rows", self.num_rows), ("size", self.size)):
            if value < 1:
                raise UsageError(
                    f"{name}={value} of a served embedding", hint="it needs one row and one number at least"
                )
        if self.sharding not in SHARDINGS:
            raise UsageError(f"sharding={self.sharding!r} is not one of {', '.join(SHARDINGS)}")

    def find_owners(self, rows: Tensor, num_shards: int) -> tuple[Tensor, Tensor]:
        """Return for each row its shard, and its place there; both of the shape of ``rows``, int64."""
        if self.sharding == "hash":
            return rows % num_shards, rows // num_shards
        length = math.ceil(self.num_rows / num_shards)
        return rows // length, rows % length

    def deal_out(self, rows: Tensor, num_shards: int) -> list[tuple[int, Tensor, Tensor]]:
        """Return for each shard its number, which of the rows it has, and their places there."""
        if num_shards == 1:
            return [(0, torch.ones(len(rows), dtype=torch.bool), rows)]
        owners, places = self.find_owners(rows, num_shards)
        masks = [owners == shard for shard in range(num_shards)]
        return [(shard, mask, places[mask]) for shard, mask in enumerate(masks)]

    def find_rows(self, shard: int, num_shards: int) -> range:
        """Return the rows of one shard, in the order of their places."""
        if self.sharding == "hash":
            return range(shard, self.num_rows, num_shards)
        length = math.ceil(self.num_rows / num_shards)
        return range(min(shard * length, self.num_rows), min((shard + 1) * length, self.num_rows))

    def draw(self, shard: int, num_shards: int) -> Tensor:
        """Return the first values of a shard's rows, shape (rows, ``size``), from a normal distribution."""
        rows = self.find_rows(shard, num_shards)
        values = torch.empty(len(rows), self.size, dtype=self.dtype)
        at = 0
        while at < len(rows):
            block = rows[at] // _BLOCK
            last = min((block + 1) * _BLOCK, self.num_rows) - 1
            end = at + (min(last, rows[-1]) - rows[at]) // rows.step + 1
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + block) & (2**63 - 1))
            drawn = torch.randn(_BLOCK, self.size, generator=generator, dtype=self.dtype)
            values[at:end] = drawn[rows[at] - block * _BLOCK : rows[end - 1] - block * _BLOCK + 1 : rows.step]
            at = end
        return values * self.std


@final
class TableValues:
    """One server's rows of a table, and their optimizer; whoever calls holds the shard's lock.

    Args:
        values: Shape (rows, size).
        rules: How updates are made; the optimizer is given sparse gradients.
    """

    def __init__(self, values: Tensor, rules: Rules) -> None:
        self.weight, self.rules = nn.Parameter(values), rules
        self.parameters = [self.weight]
        self.optimizer: torch.optim.Optimizer | None = rules.table_optimizer(self.parameters)
        self.scheduler = rules.scheduler(self.optimizer) if rules.scheduler and self.optimizer else None

    def read(self, places: Tensor) -> Tensor:
        """Return a copy of some rows, as bytes."""
        return self.weight.detach()[places].reshape(-1).view(torch.uint8)

    def release(self, gradient: Gradient) -> None:
        """Nothing is used again: gradients of rows have many sizes."""

    def update(self, gradients: list[Gradient], total: float, version: int) -> None:  # noqa: ARG002 - as of dense values
        """Make one step with the average of some gradients, whose weights sum up to ``total``."""
        size = self.weight.shape[1]
        given = [
            (one.rows, one.buffer.view(self.weight.dtype).view(-1, size), one.weight / total)
            for one in gradients
            if one.rows is not None
        ]
        if len(given) == 1:
            places, values, factor = given[0]
            values = values if factor == 1 else values * factor
        else:
            given = given or [(torch.empty(0, dtype=torch.int64), self.weight.detach()[:0], 1.0)]
            places, values = (
                torch.cat([one[0] for one in given]),
                torch.cat([one[1] * one[2] for one in given]),
            )
        # A worker sends each row once, in ascending order.
        grad = torch.sparse_coo_tensor(
            places[None], values, self.weight.shape, check_invariants=False, is_coalesced=len(given) == 1
        )
        self.weight.grad = grad if len(given) == 1 else grad.coalesce()
        assert self.optimizer is not None  # noqa: S101 - made above
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.weight.grad = None

    def state(self) -> dict[str, Any]:
        """Return values and states, as ``torch.save`` takes them."""
        return {
            "optimizer": self.optimizer.state_dict() if self.optimizer is not None else {},
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
            "values": [self.weight.detach()],
        }
