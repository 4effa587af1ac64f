"""Embedding tables on servers: the rows of one process's sparse embedding, and no more traffic than the batch needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import rankwise
from rankwise.parallel.servers.embedding import TableFacts
from rankwise.testing import run_ranks, try_ranks

NUM_ROWS, SIZE, NUM_STEPS = 10_007, 6, 15
OPTIMIZERS = {
    "sgd": lambda ones: torch.optim.SGD(ones, lr=0.2),
    "adam": lambda ones: torch.optim.SparseAdam(ones, lr=0.01),
}


class Net(nn.Module):
    """Two lookups in one table, one in another, and a dense head."""

    def __init__(self, make_table: Any) -> None:
        super().__init__()
        self.users, self.items = make_table("hash", 3), make_table("range", 4)
        torch.manual_seed(0)
        self.head = nn.Linear(3 * SIZE, 1).double()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found = [self.users(rows[:, 0]), self.users(rows[:, 1]), self.items(rows[:, 2])]
        return self.head(torch.cat(found, dim=1)).square().mean()


def find_batch(step: int) -> torch.Tensor:
    """12 samples; some rows are often used, and some twice in a sample."""
    drawn = torch.rand(12, 3, generator=torch.Generator().manual_seed(step)) ** 4
    return (drawn * NUM_ROWS).long()


def make_plain(sharding: str, seed: int) -> nn.Module:
    facts = TableFacts(num_rows=NUM_ROWS, size=SIZE, dtype=torch.float64, sharding=sharding, seed=seed, std=1.0)
    return nn.Embedding.from_pretrained(facts.draw(0, 1), freeze=False, sparse=True)


def train_alone(kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.set_num_threads(1)
    model, losses = Net(make_plain), []
    tables = [OPTIMIZERS[kind]([model.users.weight]), OPTIMIZERS[kind]([model.items.weight])]
    optimizers = [torch.optim.SGD(model.head.parameters(), lr=0.1), *tables]
    for step in range(NUM_STEPS):
        for one in optimizers:
            one.zero_grad()
        loss = model(find_batch(step))
        loss.backward()
        losses.append(loss.item())
        for one in optimizers:
            one.step()
    return losses, model.state_dict()


def make_served(sharding: str, seed: int) -> nn.Module:
    return rankwise.ServedEmbedding(NUM_ROWS, SIZE, dtype=torch.float64, sharding=sharding, seed=seed)


def train(kind: str, options: dict[str, Any]) -> Any:
    torch.set_num_threads(1)
    with rankwise.init(device="cpu"):
        model = Net(make_served)
        ps = rankwise.parameter_server(
            model, lambda ones: torch.optim.SGD(ones, lr=0.1), table_optimizer=OPTIMIZERS[kind], **options
        )
        if ps.is_server:
            return ps.serve()
        losses = []
        for step in range(NUM_STEPS):
            ps.pull()
            loss = model(find_batch(step)[ps.worker_index :: ps.num_workers])
            loss.backward()
            losses.append(loss.item())
            ps.push()
        ps.pull()
        all_rows = torch.arange(NUM_ROWS)
        with torch.no_grad():
            return losses, {"users.weight": model.users(all_rows), "items.weight": model.items(all_rows)}


@pytest.mark.parametrize(
    ("kind", "num_ranks", "options"),
    [
        ("sgd", 2, {}),
        ("sgd", 4, {"servers": 1}),
        ("adam", 4, {"servers": 2}),
        ("sgd", 5, {"servers": 3, "mode": "stale", "staleness": 0}),
    ],
)
def test_served_rows_equal_one_process(kind: str, num_ranks: int, options: dict[str, Any]) -> None:
    """All rows, touched or not, and the losses of the workers' shares, in float64; hash and range, one to three servers."""
    losses, state = train_alone(kind)
    num_servers = options.get("servers", 1)
    workers = run_ranks(train, num_ranks, kind, {"servers": num_servers, **options})[num_servers:]
    for step, expected in enumerate(losses):
        # Shares of equal size.
        assert sum(one[0][step] for one in workers) / len(workers) == pytest.approx(expected, abs=1e-12)
    for _, tables in workers:
        for name, value in tables.items():
            torch.testing.assert_close(value, state[name], rtol=0, atol=1e-12 if kind == "sgd" else 1e-9)


def test_asynchronous_rows_converge() -> None:
    """Clipped on the workers, two servers: the last losses are a tenth of the first ones."""
    *_, first, second = run_ranks(train, 4, "sgd", {"servers": 2, "mode": "async", "clip_norm": 5.0})
    for losses, _ in (first, second):
        assert sum(losses[-3:]) < 0.5 * sum(losses[:3])


@pytest.mark.parametrize("sharding", ["hash", "range"])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 4096, 10_007])
def test_each_row_has_one_place_and_one_first_value(sharding: str, num_rows: int) -> None:
    """For one to five servers the table is the same, and owner and place lead to the row."""
    facts = TableFacts(num_rows=num_rows, size=2, dtype=torch.float32, sharding=sharding, seed=1, std=0.5)
    whole = facts.draw(0, 1)
    rows = torch.arange(num_rows)
    for num_shards in range(1, 6):
        owners, places = facts.find_owners(rows, num_shards)
        for shard in range(num_shards):
            own = owners == shard
            assert rows[own].tolist() == list(facts.find_rows(shard, num_shards))
            assert torch.equal(facts.draw(shard, num_shards)[places[own]], whole[own])


def count_pulled() -> int:
    torch.set_num_threads(1)
    with rankwise.init(device="cpu"):
        table = rankwise.ServedEmbedding(100, 4)
        model = nn.Sequential(table, nn.Linear(4, 1))
        ps = rankwise.parameter_server(model, OPTIMIZERS["sgd"], mode="async")
        if ps.is_server:
            ps.serve()
            return 0
        pulled = 0
        fetch = table._fetch

        def count(rows: torch.Tensor) -> torch.Tensor:
            nonlocal pulled
            pulled += len(rows)
            return fetch(rows)  # type: ignore[misc]

        table.bind(count)
        for _ in range(6):
            ps.pull()
            model(torch.tensor([3, 3, 8])).sum().backward()
            ps.push()
        return pulled


def test_only_rows_of_the_batch_are_pulled() -> None:
    """Two rows in each of six steps."""
    assert run_ranks(count_pulled, 2)[1] == 12


def look_up_wrongly(row: int) -> None:
    rankwise.init(device="cpu")
    model = nn.Sequential(rankwise.ServedEmbedding(10, 4), nn.Linear(4, 1))
    ps = rankwise.parameter_server(model, OPTIMIZERS["sgd"])
    if ps.is_server:
        ps.serve()
    ps.pull()
    model(torch.tensor([row]))


@pytest.mark.parametrize("row", [-1, 10])
def test_a_row_that_is_not_there_is_named(row: int) -> None:
    """With how many there are."""
    outcome = try_ranks(look_up_wrongly, 2, row)[1]
    assert isinstance(outcome.error, rankwise.UsageError)
    assert f"row {row} of a served embedding of 10 rows" in str(outcome.error)


def test_wrong_tables() -> None:
    """Sizes and shardings that make no sense, and a lookup where no servers are."""
    for options in (
        {"num_rows": 0, "size": 1},
        {"num_rows": 1, "size": 0},
        {"num_rows": 1, "size": 1, "sharding": "list"},
    ):
        with pytest.raises(rankwise.UsageError):
            rankwise.ServedEmbedding(**options)
    with pytest.raises(rankwise.UsageError, match="no servers on this rank"):
        rankwise.ServedEmbedding(3, 2)(torch.tensor([1]))
