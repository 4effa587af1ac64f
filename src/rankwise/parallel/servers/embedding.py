"""``ServedEmbedding``: an embedding that has no rows of its own, and asks the servers for those that a batch needs.

Only the gradients of these rows are pushed (DistBelief's and DLRM's way: Naumov et al., arXiv:1906.00091), so that a table may be larger than
the memory of any host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from rankwise.base.errors import UsageError
from rankwise.parallel.servers.shard import Gradient, Held

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.parallel.servers.shard import Rules

SHARDINGS = ("hash", "range")
#: Rows are drawn by blocks, each from a seed of its own: the same table for any number of servers.
_BLOCK = 4096


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TableFacts:
    """What must be known of a table to find its rows, as given to ``ServedEmbedding``; equal on all ranks.

    By ``hash`` row N is on server N modulo their number, so that neighbouring rows that are often used are on different
    servers.
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
                raise UsageError(f"{name}={value} of a served embedding", hint="num_rows and size must be 1 or more")
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
class TableValues(Held):
    """One server's rows of a table, given as values of shape (rows, size); the optimizer is given sparse gradients."""

    def __init__(self, values: Tensor, rules: Rules) -> None:
        self.weight = nn.Parameter(values)
        super().__init__([self.weight], rules.table_optimizer, rules)

    def read(self, places: Tensor) -> Tensor:
        """Return a copy of some rows, as bytes."""
        return self.weight.detach()[places].reshape(-1).view(torch.uint8)

    def update(self, gradients: list[Gradient], total: float) -> None:
        """Make one step with the average of some gradients, whose weights sum up to ``total``."""
        size, dtype = self.weight.shape[1], self.weight.dtype
        places = [one.rows for one in gradients if one.rows is not None]
        values = [one.buffer.view(dtype).view(-1, size) for one in gradients]
        for value, one in zip(values, gradients, strict=True):
            if one.weight != total:
                value.mul_(one.weight / total)
        # A worker sends each row once, in ascending order.
        is_sorted = len(gradients) == 1
        indices, rows = (places[0], values[0]) if is_sorted else (torch.cat(places), torch.cat(values))
        shape, options = self.weight.shape, {"check_invariants": False, "is_coalesced": is_sorted}
        grad = torch.sparse_coo_tensor(indices[None], rows, shape, **options)
        self.weight.grad = grad if is_sorted else grad.coalesce()
        self.step()


@final
class ServedEmbedding(nn.Module):  # type: ignore[misc]
    """An embedding whose rows are on the servers of ``parameter_server``; on workers it has those of the batch only.

    It is used as ``torch.nn.Embedding``. Its rows are pulled in the forward pass, and ``ps.push()`` sends their
    gradients.

    Args:
        num_rows: How many rows.
        size: How many numbers a row has.
        dtype: Of them; None: torch's default.
        sharding: ``"hash"``: neighbours are on different servers; ``"range"``: together.
        seed: Of the first values.
        std: Their standard deviation.

    Raises:
        UsageError: Sizes below 1, or a sharding that is not known.
    """

    def __init__(
        self,
        num_rows: int,
        size: int,
        *,
        dtype: torch.dtype | None = None,
        sharding: str = "hash",
        seed: int = 0,
        std: float = 1.0,
    ) -> None:
        super().__init__()
        self.facts = TableFacts(
            num_rows=num_rows,
            size=size,
            dtype=dtype or torch.get_default_dtype(),
            sharding=sharding,
            seed=seed,
            std=std,
        )
        self.facts.check()
        self._fetch: Callable[[Tensor], Tensor] | None = None
        self._used: list[tuple[Tensor, Tensor]] = []

    def forward(self, rows: Tensor) -> Tensor:
        """Return the values of some rows.

        Args:
            rows: Of any shape S, integers from 0 to ``num_rows - 1``.

        Returns:
            Shape (*S, size), on the device of ``rows``.

        Raises:
            UsageError: A row is not there, or ``parameter_server`` was not called with the model, or this rank is a
                server.
            CollectiveError: A server is gone.
        """
        needed, places = rows.reshape(-1).unique(return_inverse=True)
        needed = needed.to("cpu", torch.int64)
        if len(needed) and not 0 <= int(needed[0]) <= int(needed[-1]) < self.facts.num_rows:
            wrong = int(needed[0]) if needed[0] < 0 else int(needed[-1])
            raise UsageError(
                f"row {wrong} of a served embedding of {self.facts.num_rows} rows",
                hint=f"rows are 0 to {self.facts.num_rows - 1}",
            )
        if self._fetch is None:
            raise UsageError(
                "a served embedding has no servers on this rank",
                hint="workers call it after rankwise.parameter_server(model, ...)",
            )
        values = self._fetch(needed).to(rows.device)
        if torch.is_grad_enabled():
            values.requires_grad_()
            self._used.append((needed, values))
        return functional.embedding(places.view(rows.shape), values)

    def bind(self, fetch: Callable[[Tensor], Tensor]) -> None:
        """Set where rows come from.

        Args:
            fetch: Given ascending row numbers, returns their values, shape (rows, ``size``).
        """
        self._fetch = fetch

    def collect(self) -> tuple[Tensor, Tensor]:
        """Return the rows that have gradients, ascending, and the gradients, shape (rows, ``size``); and forget them."""
        used = [(rows, values.grad) for rows, values in self._used if values.grad is not None]
        self._used.clear()
        if not used:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, self.facts.size, dtype=self.facts.dtype)
        if len(used) == 1:
            return used[0][0], used[0][1].cpu()
        rows, places = torch.cat([rows for rows, _ in used]).unique(return_inverse=True)
        total = torch.zeros(len(rows), self.facts.size, dtype=self.facts.dtype)
        return rows, total.index_add_(0, places, torch.cat([gradient.cpu() for _, gradient in used]))

    def extra_repr(self) -> str:
        """Return rows and size, for ``print(model)``."""
        return f"{self.facts.num_rows}, {self.facts.size}, sharding={self.facts.sharding!r}"


def find_tables(model: nn.Module) -> dict[str, ServedEmbedding]:
    """Return the served embeddings of a model by name, each once."""
    return {name: one for name, one in model.named_modules() if isinstance(one, ServedEmbedding)}
