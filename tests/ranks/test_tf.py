"""Strategies of rankwise.tf on real ranks: the losses of one process, and tf's own splits, reductions and contexts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

import rankwise
from python_forks import TRAINING, ForkedPython, can_fork
from rankwise import tf
from rankwise.testing import run_ranks, try_ranks
from support import free_port, without_gloo

if TYPE_CHECKING:
    from pathlib import Path

NUM_SAMPLES, BATCH = 23, 8  # 8, 8, 7: the last batch is uneven for two and three replicas
SUM, MEAN = tf.ReduceOp.SUM, tf.ReduceOp.MEAN


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(NUM_SAMPLES, 5, generator=generator, dtype=torch.float64),
        torch.randint(4, (NUM_SAMPLES,), generator=generator),
    )


class Branching(nn.Module):
    """Has a layer for samples of one label, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.often, self.never = nn.Linear(5, 6), nn.Linear(6, 4), nn.Linear(6, 4)
        self.double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        out, chosen = hidden[:, :4].clone(), labels == 0
        if chosen.any():  # a replica without such a sample has no gradient there
            out[chosen] = out[chosen] + self.often(hidden[chosen])
        return out


def train_alone(kind: Any, options: dict[str, Any]) -> list[float]:
    torch.manual_seed(0)
    model = Branching()
    optimizer = kind(model.parameters(), **options)
    losses = []
    for _ in range(3):
        for x, y in DataLoader(make_data(), batch_size=BATCH):
            optimizer.zero_grad()
            loss = cross_entropy(model(x, y), y, reduction="sum") / len(y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def step_over_frozen() -> float:
    strategy = tf.MirroredStrategy()
    with strategy.scope():
        model = nn.Linear(2, 1).requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = float(model.weight.sum())
    strategy.run(optimizer.step)
    return float(model.weight.sum()) - before


def test_an_optimizer_of_frozen_parameters_alone_steps_as_in_one_process() -> None:
    """It has no gradients to add up, and moves nothing: no error, as in torch."""
    assert run_ranks(step_over_frozen, 2) == [0.0, 0.0]


def train_replicas(strategy_name: str, kind: Any, options: dict[str, Any]) -> tuple[list[float], int, int]:
    torch.set_num_threads(1)
    strategy = getattr(tf, strategy_name)()
    torch.manual_seed(strategy.replica_id)
    with strategy.scope():
        model = Branching()
    # As from a checkpoint; and an optimizer made outside of the scope is one all the same.
    model.load_state_dict({name: one.clone() for name, one in model.state_dict().items()})
    optimizer = kind(model.parameters(), **options)
    data = strategy.experimental_distribute_dataset(DataLoader(make_data(), batch_size=BATCH))

    def step(x: torch.Tensor, y: torch.Tensor, num: int) -> torch.Tensor:
        optimizer.zero_grad()
        per_example = cross_entropy(model(x, y), y, reduction="none")
        loss = tf.compute_average_loss(per_example, global_batch_size=num)
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = []
    for _ in range(3):
        for x, y in data:
            num = strategy.reduce(SUM, len(x))
            losses.append(strategy.reduce(SUM, strategy.run(step, args=(x, y, num))).item())
    return losses, len(optimizer.state), len(data)


SGD = {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.01}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_replicas_train_as_one_process(world_size: int) -> None:
    """Losses of three epochs with an uneven last batch equal a plain loop's, as do values loaded after the scope; parameters that nobody used stay untouched."""
    wanted = train_alone(torch.optim.SGD, SGD)
    for losses, states, num_batches in run_ranks(train_replicas, world_size, "MirroredStrategy", torch.optim.SGD, SGD):
        assert losses == pytest.approx(wanted, rel=0, abs=1e-12)
        assert states == 4  # not those of `never`
        assert num_batches == 3


def test_central_storage_has_one_optimizer() -> None:
    """The same losses with Adam, whose state only the first replica has, wherever the optimizer was made."""
    wanted = train_alone(torch.optim.Adam, {"lr": 0.05})
    results = run_ranks(train_replicas, 2, "CentralStorageStrategy", torch.optim.Adam, {"lr": 0.05})
    for losses, _, _ in results:
        assert losses == pytest.approx(wanted, rel=0, abs=1e-12)
    assert [states for _, states, _ in results] == [4, 0]


def show(dataset: Any) -> list[list[int]]:
    return [[int(row) for row in (one[0] if isinstance(one, (list, tuple)) else one)] for one in dataset]


def deal() -> dict[str, Any]:
    strategy = tf.MirroredStrategy()
    numbers = TensorDataset(torch.arange(12))
    files = ConcatDataset(
        [
            TensorDataset(torch.arange(6)),
            TensorDataset(torch.arange(6, 12)),
            TensorDataset(torch.arange(12, 17)),
        ]
    )

    def split(dataset: Any, size: int, policy: str = "AUTO", **options: Any) -> Any:
        loader = DataLoader(dataset, batch_size=size, **options)
        return strategy.experimental_distribute_dataset(
            loader, tf.InputOptions(auto_shard_policy=tf.AutoShardPolicy[policy])
        )

    shuffled = split(numbers, 4, shuffle=True, num_workers=1)
    first, second = show(shuffled), show(shuffled)
    broken_off = iter(shuffled)
    next(broken_off)
    context: list[Any] = []

    def from_function(one: tf.InputContext) -> Any:
        context.append((one.num_input_pipelines, one.input_pipeline_id, one.get_per_replica_batch_size(6)))
        return DataLoader(Subset(numbers, range(one.input_pipeline_id, 7, one.num_input_pipelines)), batch_size=2)

    def stream(one: tf.InputContext) -> Any:
        return (torch.full((2,), one.input_pipeline_id) for _ in range(1 + one.input_pipeline_id))

    sizes = {(size, batch): [len(part) for part in show(split(Subset(numbers, range(size)), batch))]
             for size, batch in ((6, 4), (7, 4), (11, 4), (10, 6), (9, 8))}  # fmt: skip
    return {
        "data": show(split(numbers, 4, "DATA")), "off": show(split(numbers, 4, "OFF")), "file": show(split(files, 4, "FILE")),
        "list": show(strategy.experimental_distribute_dataset([torch.arange(5), torch.arange(5, 7)])),
        "shuffled": (first, second, show(shuffled)), "sizes": sizes,
        "function": show(strategy.distribute_datasets_from_function(from_function)), "context": context,
        "stream": show(strategy.distribute_datasets_from_function(stream)),
    }  # fmt: skip


#: What TensorFlow 2.21 gives: samples, global batch, and for each batch the sizes of the replicas' parts.
TF_SIZES = {
    2: {(6, 4): [(2, 2), (1, 1)], (7, 4): [(2, 2), (2, 1)], (11, 4): [(2, 2), (2, 2), (2, 1)], (10, 6): [(3, 3), (2, 2)], (9, 8): [(4, 4), (1, 0)]},
    3: {(6, 4): [(2, 2, 0), (1, 1, 0)], (7, 4): [(2, 2, 0), (1, 1, 1)], (11, 4): [(2, 2, 0), (2, 2, 0), (1, 1, 1)], (10, 6): [(2, 2, 2), (2, 2, 0)],
        (9, 8): [(3, 3, 2), (1, 0, 0)]},
}  # fmt: skip


@pytest.mark.parametrize("world_size", [2, 3])
def test_data_is_dealt_out_as_by_tensorflow(world_size: int) -> None:
    """Parts have the sizes that TensorFlow 2.21 was seen to give; each pass has all samples once, shuffled alike on all replicas."""
    results = run_ranks(deal, world_size)
    for key, wanted in TF_SIZES[world_size].items():
        assert list(zip(*(one["sizes"][key] for one in results), strict=True)) == wanted
    assert [one["context"] for one in results] == [[(world_size, rank, 6 // world_size)] for rank in range(world_size)]
    for one in range(3):
        parts = [result["shuffled"][one] for result in results]
        assert sorted(row for part in parts for batch in part for row in batch) == list(range(12))
    assert results[0]["shuffled"][0] != results[0]["shuffled"][1]
    assert len({len(result["function"]) for result in results}) == 1
    assert [result["stream"] for result in results] == [
        [[rank] * 2 if number <= rank else [] for number in range(world_size)] for rank in range(world_size)
    ]


def test_policies_are_those_of_the_guide() -> None:
    """DATA, FILE and OFF on two workers, with the numbers of TensorFlow's guide on distributed input; and a list of batches."""
    one, two = run_ranks(deal, 2)
    assert one["data"] == [[0, 1], [4, 5], [8, 9]]
    assert two["data"] == [[2, 3], [6, 7], [10, 11]]
    assert one["off"] == two["off"] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert one["file"] == [[0, 1], [2, 3], [4, 5], [12, 13], [14, 15], [16]]
    assert two["file"] == [[6, 7], [8, 9], [10, 11], [], [], []]
    assert (one["list"], two["list"]) == ([[0, 1, 2], [5]], [[3, 4], [6]])
    assert (one["function"], two["function"]) == ([[0, 2], [4, 6]], [[1, 3], [5]])


def join_values() -> dict[str, Any]:
    strategy = tf.MirroredStrategy()
    rank = strategy.replica_id
    rows = torch.full((rank + 1, 2), 2.0 * (rank + 1))
    with strategy.scope():
        made = {op: tf.Variable(1.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=op)
                for op in (tf.VariableAggregation.SUM, tf.VariableAggregation.MEAN, tf.VariableAggregation.ONLY_FIRST_REPLICA)}  # fmt: skip
        mean_on_write = tf.Variable(1.0, aggregation=tf.VariableAggregation.MEAN)

    def fn(scale: torch.Tensor) -> Any:
        ctx = tf.get_replica_context()
        assert ctx is not None
        assert not tf.in_cross_replica_context()
        places = [tf.has_strategy(), tf.get_strategy() is strategy]
        for one in made.values():
            one.assign_add(float(rank))
        mean_on_write.assign_add(float(rank))

        def merge(distribution: tf.Strategy, value: torch.Tensor) -> Any:
            assert tf.in_cross_replica_context()
            return distribution.reduce(SUM, value)

        ((ctx.all_reduce("MEAN", scale * rank) ** 2) + ctx.all_gather((scale * rows).T, axis=1).sum()).backward()
        own = made[tf.VariableAggregation.SUM].read_value().item()
        return ctx.merge_call(merge, args=(torch.tensor(rank + 1),)), places, own

    scale = torch.ones((), requires_grad=True)
    merged, places, own = strategy.run(fn, args=(scale,))
    read = {op.name: float(one) for op, one in made.items()}
    made[tf.VariableAggregation.SUM].assign(4.0)
    return {
        "merged": merged.item(), "places": places, "own": own, "read": read, "on_write": float(mean_on_write), "grad": scale.grad.item(),  # type: ignore[union-attr]
        "after_assign": made[tf.VariableAggregation.SUM].value.item(),
        "sum0": strategy.reduce(SUM, rows, axis=0).tolist(), "mean0": strategy.reduce(MEAN, {"a": [rows]}, axis=0)["a"][0].tolist(),
        "mean": strategy.reduce("mean", [torch.tensor(float(rank)), 1 + 3 * rank]), "gathered": strategy.gather(rows, axis=0)[:, 0].tolist(),
        "columns": list(strategy.gather(rows.T, axis=1).shape), "local": strategy.experimental_local_results(rank),
    }  # fmt: skip


def test_values_join_as_in_tensorflow() -> None:
    """reduce, gather (uneven), all_reduce, all_gather, merge_call and variables give what TensorFlow 2.21 gave for two replicas."""
    for rank, one in enumerate(run_ranks(join_values, 2)):
        assert one["merged"] == 3
        assert one["places"] == [True, True]
        assert one["own"] == 1 + rank
        assert one["read"] == {"SUM": 3, "MEAN": 1.5, "ONLY_FIRST_REPLICA": 1}
        assert one["on_write"] == 1.5
        assert one["after_assign"] == 2
        assert one["sum0"] == [10, 10]
        assert one["mean0"] == pytest.approx([10 / 3] * 2)
        assert [float(value) for value in one["mean"]] == [0.5, 2.5]
        assert one["gathered"] == [2, 4, 4]
        assert one["columns"] == [2, 3]
        assert one["local"] == (rank,)


def misuse(kind: str) -> Any:
    strategy = tf.MirroredStrategy()
    if kind in {"outside", "no scope"}:
        model = nn.Linear(3, 1)
    with nullcontext() if kind == "no scope" else strategy.scope():
        if kind not in {"outside", "no scope"}:
            model = nn.LazyLinear(1) if kind == "lazy" else nn.Linear(3 + (kind == "other") * strategy.replica_id, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion, x = nn.MSELoss(), torch.ones(4, 3)

    def step(batch: torch.Tensor) -> None:
        out = model(batch)
        loss = criterion(out, out.detach() + 1) if kind == "mean" else tf.compute_average_loss(out[:, 0])
        loss.backward()
        if kind == "reduce":
            strategy.reduce(SUM, loss)
        if kind == "closure":
            optimizer.step(lambda: loss)
        elif kind != "step":
            optimizer.step()

    if kind == "ddp":
        model = rankwise.apply_ddp(model)
    strategy.run(step, args=(x,))
    if kind == "step":
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("outside", rankwise.UsageError, "2 of 2 parameters were not made under this strategy's scope"),
        ("no scope", rankwise.UsageError, "the first is Linear.weight of shape (1, 3)"),
        ("mean", rankwise.UsageError, "MSELoss() averages over the samples of this replica"),
        ("step", rankwise.UsageError, "nothing adds the gradients of the 2 replicas"),
        ("reduce", rankwise.UsageError, "strategy.reduce() inside of a function"),
        ("other", rankwise.CollectiveError, "Linear.weight"),
        ("lazy", rankwise.UsageError, "LazyLinear.weight has no shape"),
        ("ddp", rankwise.UsageError, "averaged by apply_ddp"),
        ("closure", rankwise.UsageError, "nothing adds the gradients that the closure computes"),
    ],
)
def test_misuse_is_named(kind: str, error: type[Exception], text: str) -> None:
    """What would train replicas apart, or wrongly, raises on all of them and says what to do."""
    for outcome in try_ranks(misuse, 2, kind, timeout_s=20):
        assert isinstance(outcome.error, error), outcome.traceback
        assert text in str(outcome.error)
        assert getattr(outcome.error, "hint", "")


def train_sparse(kind: str) -> torch.Tensor:
    strategy = tf.MirroredStrategy()
    with strategy.scope():
        torch.manual_seed(0)
        model = nn.Embedding(6, 2, sparse=True)
        optimizer = torch.optim.SparseAdam(model.parameters()) if kind == "adam" else torch.optim.SGD(model.parameters(), lr=0.1)  # fmt: skip

    def step(rows: torch.Tensor) -> None:
        optimizer.zero_grad()
        tf.compute_average_loss(model(rows).square().sum(1), global_batch_size=4).backward()
        optimizer.step()

    rows = torch.tensor([0, 1, 1, 4])
    own = len(rows) // strategy.num_replicas_in_sync
    for _ in range(2):
        strategy.run(step, args=(rows[strategy.replica_id * own :][:own],))
    return model.weight.detach()


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_sparse_gradients_are_added(kind: str) -> None:
    """Rows that one replica has used, or both: the table is that of one replica with the whole batch."""
    (expected,) = run_ranks(train_sparse, 1, kind)
    for found in run_ranks(train_sparse, 2, kind):
        torch.testing.assert_close(found, expected)


def train_tables() -> list[torch.Tensor]:
    """One table is used by the first half of the batch only; of the other one, row 2 is read and has a gradient of zeros in step two."""
    strategy = tf.MirroredStrategy()
    with strategy.scope():
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Embedding(6, 2, sparse=True), nn.Embedding(6, 2, sparse=True)])
        optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.1)

    def step(rows: torch.Tensor, weights: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss = (model[0](rows).square().sum(1) * weights).sum()
        first = rows[rows < 2]
        if len(first):
            loss = loss + model[1](first).square().sum()
        loss.backward()
        optimizer.step()

    rows = torch.tensor([0, 1, 2, 4])
    number = 4 // strategy.num_replicas_in_sync
    own = slice(strategy.replica_id * number, (strategy.replica_id + 1) * number)
    for weights in (torch.ones(4), torch.tensor([1.0, 1.0, 0.0, 1.0])):
        strategy.run(step, args=(rows[own], weights[own]))
    return [one.detach() for one in model.parameters()]


def test_sparse_gradients_stay_sparse_on_every_replica() -> None:
    """A table that one replica has not used, and a row whose gradient is zeros: SparseAdam's tables are those of one replica."""
    (expected,) = run_ranks(train_tables, 1)
    for found in run_ranks(train_tables, 2):
        torch.testing.assert_close(found, expected)


class Both(torch.optim.Optimizer):
    """Moves its own parameters, and has another optimizer for others; fails once if it is told to."""

    fails = False

    def __init__(self, own: list[torch.Tensor], inner: torch.optim.Optimizer) -> None:
        super().__init__(own, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.fails:
            self.fails = False
            raise ArithmeticError
        for one in self.param_groups[0]["params"]:
            one.data.add_(one.grad, alpha=-0.1)
        self.inner.step(closure)


def train_both() -> list[torch.Tensor]:
    strategy = tf.MirroredStrategy()
    with strategy.scope():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        inner = torch.optim.SGD(model[1].parameters(), lr=0.1)
        optimizer = Both(list(model[0].parameters()), inner)

    def step(x: torch.Tensor) -> None:
        for fails in (False, True):
            model.zero_grad()
            tf.compute_average_loss(model(x).square()[:, 0], global_batch_size=4).backward()
            optimizer.fails = fails
            try:
                optimizer.step()
            except ArithmeticError:
                inner.step()

    x = torch.arange(8.0).view(4, 2) / 8
    own = len(x) // strategy.num_replicas_in_sync
    for _ in range(2):
        strategy.run(step, args=(x[strategy.replica_id * own :][:own],))
    return [one.detach() for one in model.parameters()]


def test_an_optimizer_inside_of_another_adds_what_is_its_own() -> None:
    """With parameters that the outer one has not, and after a step of the outer one that failed: the weights are those of one replica."""
    (expected,) = run_ranks(train_both, 1)
    for found in run_ranks(train_both, 2):
        torch.testing.assert_close(found, expected)


class Slow(torch.optim.Optimizer):
    """Wraps an optimizer, as Lookahead does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([one for group in inner.param_groups for one in group["params"]], {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step(closure)


def train_wrapped() -> torch.Tensor:
    strategy = tf.MirroredStrategy()
    with strategy.scope():
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = Slow(torch.optim.SGD(model.parameters(), lr=0.1))

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        tf.compute_average_loss(model(x).square()[:, 0], global_batch_size=4).backward()
        optimizer.step()

    x = torch.arange(8.0).view(4, 2)
    own = len(x) // strategy.num_replicas_in_sync
    for _ in range(2):
        strategy.run(step, args=(x[strategy.replica_id * own :][:own],))
    return model.weight.detach()


def test_a_wrapped_optimizer_adds_gradients_once() -> None:
    """Its own step and that of the optimizer inside are one: the weights are those of one replica."""
    (expected,) = run_ranks(train_wrapped, 1)
    for found in run_ranks(train_wrapped, 2):
        torch.testing.assert_close(found, expected)


def run_parts() -> Any:
    """What needs two ranks and little else, in one launch."""
    strategy = tf.MirroredStrategy(["gpu:0", "gpu:1"])
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def clipped(x: torch.Tensor) -> float:
        optimizer.zero_grad()
        tf.compute_average_loss(model(x).square()[:, 0]).backward()
        tf.aggregate_gradients(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        return norm.item()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        norm = strategy.run(clipped, args=(torch.randn(4, 3, dtype=torch.float64) + strategy.replica_id,))
        strategy.run(
            lambda x: (tf.compute_average_loss(model(x)[:, 0]).backward(), optimizer.step()),
            args=(torch.ones(4, 3, dtype=torch.float64),),
        )
    # As the page on TensorFlow has it: statistics of BatchNorm, which differ, are averaged.
    means = strategy.gather(model[1].running_mean[None], axis=0)
    assert not torch.equal(means[0], means[1])
    for one in model.buffers():
        one.copy_(strategy.reduce("MEAN", one))
    assert torch.allclose(model[1].running_mean, means.mean(0))
    assert model[1].num_batches_tracked == 2
    central = tf.CentralStorageStrategy()
    with central.scope():
        layer = nn.Linear(3, 1).double()
        central_optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)

    def clipped_centrally(x: torch.Tensor) -> None:
        tf.compute_average_loss(layer(x).square()[:, 0]).backward()
        tf.aggregate_gradients(central_optimizer)
        nn.utils.clip_grad_norm_(layer.parameters(), 0.01)
        central_optimizer.step()

    before = [one.detach().clone() for one in layer.parameters()]
    central.run(clipped_centrally, args=(torch.randn(4, 3, dtype=torch.float64) + central.replica_id,))
    rankwise.check_replicas(layer)
    assert bool(central_optimizer.state) == (central.replica_id == 0)
    # The learning rate by the bound of the clip: summed once, and by nobody again.
    moved = torch.cat([(one - was).flatten() for one, was in zip(layer.parameters(), before, strict=True)])
    assert abs(moved.norm().item() - 0.1 * 0.01) < 1e-8
    errors = []
    for call in (
        lambda: tf.MirroredStrategy(["gpu:0"]), lambda: tf.OneDeviceStrategy("cpu"), tf.ParameterServerStrategy,
    ):  # fmt: skip
        with pytest.raises(rankwise.UsageError) as error:
            call()
        errors.append(str(error.value))
    # A Trainer takes model and optimizer of a scope: its own DDP averages.
    loader = rankwise.DataLoader(TensorDataset(torch.randn(8, 3, dtype=torch.float64)), global_batch=4)
    config = rankwise.TrainerConfig(epochs=1, progress=False)
    ended = rankwise.Trainer(
        model, optimizer, loader, lambda net, batch: net(batch[0]).square().mean(), config=config
    ).fit()
    rankwise.check_replicas(model)
    return norm, [str(one.message) for one in caught if "same batch" in str(one.message)], errors, ended.step


def test_clipping_same_batches_and_a_trainer() -> None:
    """Gradients can be clipped after they were added, also where one replica alone has the optimizer; equal batches are reported once; statistics are averaged; devices and ranks are counted; fit() continues from a scope."""
    (norm, told, errors, steps), (other, quiet, _, _) = run_ranks(run_parts, 2)
    assert norm == other > 0.01
    assert (len(told), quiet) == (1, [])
    assert "rankwise run --nproc-per-node 1" in errors[0]
    assert "a job of 2 ranks" in errors[1]
    assert "this job has 2 ranks, and needs 3 or more: 1 server, 1 coordinator, at least 1 worker" in errors[2]
    assert steps == 2


SCRIPT = """
import sys, os, signal, torch
from pathlib import Path
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from rankwise import tf

torch.set_num_threads(1)
strategy = tf.distribute.ParameterServerStrategy()
torch.manual_seed(strategy.rank)
with strategy.scope():
    model = torch.nn.Linear(3, 2)
    model.register_buffer("noise", torch.rand(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
assert not torch.distributed.is_initialized()
with open(f"{sys.argv[1]}.noise.{strategy.rank}", "w") as file:
    file.write(repr(model.noise.tolist()))

def make(context):
    assert context.num_input_pipelines == 2
    generator = torch.Generator().manual_seed(context.input_pipeline_id)
    while True:
        x = torch.randn(8, 3, generator=generator)
        yield x, (x[:, 0] > 0).long()

def make_dataset():
    return strategy.distribute_datasets_from_function(make)

def step(iterator, number, *, place):
    def replica(x, y):
        loss = tf.nn.compute_average_loss(cross_entropy(model(x), y, reduction="none"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()
    if number == 20 and not Path(place).exists():
        Path(place).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number, strategy.reduce("SUM", strategy.run(replica, args=next(iterator)))

coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
batches = iter(coordinator.create_per_worker_dataset(make_dataset))
values = [coordinator.schedule(step, args=(batches, number), kwargs={"place": sys.argv[1]}) for number in range(60)]
coordinator.join()
assert coordinator.done()
fetched = coordinator.fetch({"all": values})["all"]
assert [number for number, _ in fetched] == list(range(60))
x = torch.randn(200, 3)
right = ((model(x).argmax(1) == (x[:, 0] > 0)).float().mean() > 0.85).item()
print("first", round(fetched[0][1], 2), "falls", fetched[-1][1] < fetched[0][1], "right", right, "last", values[3].fetch()[0])
"""


def start(script: Path, tasks: dict[str, int], *args: str) -> dict[str, subprocess.Popen[str] | ForkedPython]:
    """One process for each task of TF_CONFIG, and no launcher."""
    import json

    def start_one(job: str, index: int) -> subprocess.Popen[str] | ForkedPython:
        task = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
        environ = {**env, "TF_CONFIG": task, "OMP_NUM_THREADS": "1"}
        if can_fork(TRAINING):
            return ForkedPython([str(script), *args], environ, None, {}, modules=TRAINING)
        command = [sys.executable, str(script), *args]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)  # fmt: skip

    port = free_port()
    cluster = {job: [f"127.0.0.1:{port + number}" for number in range(many)] for job, many in tasks.items()}
    env = {name: value for name, value in os.environ.items() if not name.startswith("RANKWISE_")}
    return {f"{job} {index}": start_one(job, index) for job, many in tasks.items() for index in range(many)}


def test_a_coordinator_by_tf_config_survives_a_killed_worker(tmp_path: Path) -> None:
    """Four plain processes with TF_CONFIG: all 60 steps are fetched once, in order, though a worker is killed in one; all others end with 0."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    processes = start(script, {"ps": 1, "chief": 1, "worker": 2}, str(tmp_path / "killed"))
    ended = {task: (*one.communicate(timeout=90), one.returncode) for task, one in processes.items()}
    assert "falls True right True last 3" in ended["chief 0"][0], ended
    codes = {task: code for task, (_, _, code) in ended.items()}
    assert sorted(codes.values()) == [-signal.SIGKILL, 0, 0, 0], ended
    assert codes["ps 0"] == codes["chief 0"] == 0
    assert len({(tmp_path / f"killed.noise.{rank}").read_text() for rank in range(4)}) == 1


WORKERS = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from rankwise import tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
resolver = strategy.cluster_resolver
with strategy.scope():
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.nn.init.ones_(model.weight)
data = TensorDataset(torch.arange(1.0, 5).unsqueeze(1))
def step(x):
    optimizer.zero_grad()
    tf.nn.compute_average_loss(model(x)[:, 0], global_batch_size=4).backward()
    optimizer.step()
for (x,) in strategy.experimental_distribute_dataset(DataLoader(data, batch_size=4)):
    strategy.run(step, args=(x,))
print(resolver.task_type, resolver.task_id, strategy.num_replicas_in_sync, len(x), round(model.weight.item(), 6))
"""


def test_tf_config_needs_no_launcher(tmp_path: Path) -> None:
    """Two plain processes with TF_CONFIG train as one: the step is that of the mean over the global batch."""
    script = tmp_path / "train.py"
    script.write_text(WORKERS)
    processes = start(script, {"worker": 2})
    outputs = [one.communicate(timeout=90) for one in processes.values()]
    assert [without_gloo(out).split() for out, _ in outputs] == [
        ["worker", str(rank), "2", "2", "0.75"] for rank in range(2)
    ], outputs
