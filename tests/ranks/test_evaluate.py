"""Evaluation on real ranks equals that of one process, for any number of samples and ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset, TensorDataset

import rankwise
from rankwise.base.errors import CollectiveError, DataError, UsageError
from rankwise.data.metrics import (
    Accuracy,
    ConfusionMatrix,
    Extreme,
    Mean,
    Sum,
)
from rankwise.testing.ranks import run_ranks, try_ranks

pytestmark = pytest.mark.linux


def make(size: int) -> tuple[nn.Module, TensorDataset]:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(size, 4, generator=generator), torch.randint(3, (size,), generator=generator))
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3)), data


def losses(outputs: Any, targets: Any) -> Any:
    return cross_entropy(outputs, targets, reduction="none")


METRICS = {
    "accuracy": Accuracy(),
    "loss": Mean(losses),
    "total": Sum(losses),
    "worst": Extreme(losses, "max"),
    "best": Extreme(losses, "min"),
    "classes": ConfusionMatrix(3),
}


class Lines(IterableDataset):
    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Any:
        yield from self.data


def run(size: int, batch_size: int, num_workers: int, as_stream: bool) -> dict[str, float]:
    with rankwise.init(device="cpu", timeout_s=30):
        model, data = make(size)
        ddp = rankwise.apply_ddp(model)
        more = {"num_workers": num_workers}
        return rankwise.evaluate(ddp, Lines(data) if as_stream else data, METRICS, batch_size=batch_size, **more)


def direct(size: int) -> dict[str, float]:
    """Return the metrics without any of our code."""
    model, data = make(size)
    model.eval()
    with torch.no_grad():
        outputs, targets = model(data.tensors[0]), data.tensors[1]
    values = losses(outputs, targets).double()
    right = (outputs.argmax(1) == targets).sum().item()
    return {
        "accuracy": right / size, "loss": values.mean().item(), "total": values.sum().item(),
        "worst": values.max().item(), "best": values.min().item(),
    }  # fmt: skip


@pytest.mark.parametrize("size", [1, 3, 10, 11])
def test_every_sample_counts_once_at_any_number_of_ranks(size: int) -> None:
    """Also with fewer samples than ranks: counts are exact, and all ranks get the same numbers."""
    wanted = direct(size)
    for world_size, batch_size in ((1, 4), (2, 4), (3, 2), (4, 3)):
        num_workers = int(size == 11 and world_size == 3)
        told = run_ranks(run, world_size, size, batch_size, num_workers, world_size % 2 == 0)
        assert all(one == told[0] for one in told)
        assert told[0]["accuracy"] == told[0]["classes/accuracy"] == wanted["accuracy"]
        for name, value in wanted.items():
            # The model computes in float32, and its kernels round by the size of the batch; the sums are float64.
            assert told[0][name] == pytest.approx(value, rel=1e-6)


def test_float_sums_differ_by_the_order_of_addition_only() -> None:
    """With losses that don't depend on the batch's size, 1 and 4 ranks agree to 1e-12: the same float64, added in another order."""

    def body() -> dict[str, float]:
        with rankwise.init(device="cpu", timeout_s=30):
            values = torch.rand(1013, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
            data = TensorDataset(values, values)
            metrics = {"mean": Mean(lambda outputs, _: outputs.exp()), "sum": Sum(lambda outputs, _: outputs)}
            return rankwise.evaluate(nn.Identity(), data, metrics, batch_size=32)

    one, four = run_ranks(body, 1)[0], run_ranks(body, 4)[3]
    assert four["mean"] == pytest.approx(one["mean"], rel=1e-12)
    assert four["sum"] == pytest.approx(one["sum"], rel=1e-12)


def test_the_model_is_as_it_was() -> None:
    """Modes of all modules, gradients on, buffers and random numbers: training goes on as if nobody had looked."""

    def body() -> bool:
        with rankwise.init(device="cpu", timeout_s=30):
            model, data = make(7)
            ddp = rankwise.apply_ddp(model)
            ddp.train()
            model[1].eval()
            modes = [module.training for module in ddp.modules()]
            before, state = torch.get_rng_state(), {k: v.clone() for k, v in ddp.state_dict().items()}
            rankwise.evaluate(ddp, data, METRICS, batch_size=2)
            assert modes == [module.training for module in ddp.modules()]
            assert torch.equal(before, torch.get_rng_state())
            assert all(torch.equal(state[k], v) for k, v in ddp.state_dict().items())
            ddp(torch.randn(3, 4)).sum().backward()
            return torch.is_grad_enabled()

    assert run_ranks(body, 2) == [True, True]


def test_no_sample_at_all_is_an_error_on_every_rank() -> None:
    """Neither a data set of length 0 nor a stream that ends at once gives a NaN."""

    def body(as_stream: bool) -> None:
        run(0, 4, 0, as_stream)

    for as_stream in (False, True):
        for rank, outcome in enumerate(try_ranks(body, 2, as_stream)):
            assert isinstance(outcome.error, DataError)
            assert outcome.error.rank == rank
            assert "has no sample" in str(outcome.error)


def test_ranks_with_other_metrics_or_data_are_told() -> None:
    """Instead of sums of different things, an error that names them."""

    def body(what: str) -> None:
        with rankwise.init(device="cpu", timeout_s=30) as ctx:
            model, data = make(8 + (what == "data") * ctx.rank)
            name = f"metric{ctx.rank if what == 'metrics' else ''}"
            rankwise.evaluate(model, data, {name: Accuracy()}, batch_size=2)

    for what, told in (("data", "num_samples differs"), ("metrics", "metric1")):
        for outcome in try_ranks(body, 2, what):
            assert isinstance(outcome.error, CollectiveError)
            assert told in str(outcome.error)


def test_predict_and_errors_of_shape() -> None:
    """A batch that is no pair needs predict=; what a metric can't read is told with shapes and rank."""

    def body() -> str:
        with rankwise.init(device="cpu", timeout_s=30) as ctx:
            model, pairs = make(6)
            data = [{"x": inputs, "y": targets} for inputs, targets in pairs]
            with pytest.raises(UsageError, match="a batch is a dict, not a pair"):
                rankwise.evaluate(model, data, METRICS, batch_size=2)
            with pytest.raises(UsageError, match="predict returned a Tensor, not a pair"):
                rankwise.evaluate(model, data, METRICS, batch_size=2, predict=lambda model, batch: model(batch["x"]))
            with pytest.raises(UsageError, match=r"shape \(1, 3\) and float32 and targets .*shape \(1, 4\)") as told:
                rankwise.evaluate(
                    model,
                    data,
                    METRICS,
                    batch_size=1,
                    predict=lambda model, batch: (model(batch["x"]), batch["x"]),
                )
            assert told.value.rank == ctx.rank
            given = rankwise.evaluate(
                model,
                data,
                METRICS,
                batch_size=2,
                predict=lambda model, batch: (model(batch["x"]), batch["y"]),
            )
            assert given == rankwise.evaluate(model, pairs, METRICS, batch_size=2)
            return "ok"

    assert run_ranks(body, 2) == ["ok"] * 2


@pytest.mark.slow  # importing torchmetrics takes seconds
def test_metrics_of_torchmetrics() -> None:
    """They give the same numbers at 1 and 2 ranks, also with fewer samples than ranks, and the user's own stay empty."""
    pytest.importorskip("torchmetrics")

    def body() -> Any:
        import torchmetrics

        options = {"task": "multiclass", "num_classes": 3}
        metrics = {
            "sums": torchmetrics.Accuracy(**options, average="micro"),
            "lists": torchmetrics.AUROC(**options),
            "many": torchmetrics.MetricCollection([torchmetrics.F1Score(**options), torchmetrics.Recall(**options)]),
            "vector": torchmetrics.Recall(**options, average=None),
            "ours": Accuracy(),
        }
        with rankwise.init(device="cpu", timeout_s=60):
            results = [rankwise.evaluate(*make(size), metrics, batch_size=2) for size in (1, 11)]
            assert metrics["sums"].update_count == 0
            return results

    one, two = run_ranks(body, 1)[0], run_ranks(body, 2)
    for result in one:
        assert list(result) == ["sums", "lists", "many/MulticlassF1Score", "many/MulticlassRecall",
                                "vector/0", "vector/1", "vector/2", "ours"]  # fmt: skip
        assert math.isclose(result["sums"], result["ours"], rel_tol=1e-6)
    for rank in two:
        for result, wanted in zip(rank, one, strict=True):
            # torchmetrics adds float32.
            assert result == pytest.approx(wanted, rel=1e-6)


def test_a_sharded_model_is_evaluated() -> None:
    """FSDP's forward is a collective: all ranks take part in all of them, those without samples too."""

    def body() -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        with rankwise.init(device="cpu", timeout_s=30) as ctx:
            model, data = make(5)
            model = nn.Sequential(*(layer for layer in model if not isinstance(layer, nn.Dropout)))
            mesh = init_device_mesh("cpu", (ctx.world_size,))
            for layer in model:  # the outermost would keep its parameters after its first forward
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            return rankwise.evaluate(model, data, {"accuracy": Accuracy(), "loss": Mean(losses)}, batch_size=1)

    told = run_ranks(body, 2)
    wanted = direct(5)
    assert told[0] == told[1]
    assert told[0]["accuracy"] == wanted["accuracy"]
    assert told[0]["loss"] == pytest.approx(wanted["loss"], rel=1e-6)


def test_without_a_job_one_process_evaluates_alone() -> None:
    """No init() is needed in a notebook."""
    model, data = make(11)
    told = rankwise.evaluate(model, data, METRICS, batch_size=4)
    assert told["accuracy"] == direct(11)["accuracy"]


# ------------------------------------------------------------------------------------------ predict


def forecast(size: int, batch_size: int, as_stream: bool, shape: str) -> Any:
    with rankwise.init(device="cpu", timeout_s=30) as ctx:
        model, data = make(size)
        forwards = {
            "tensor": None,
            "dict": lambda model, batch: {"logits": model(batch[0]), "first": batch[0][:, 0]},
            "rows": lambda model, batch: model(batch[0]).mean(),
        }
        ddp = rankwise.apply_ddp(model, ctx=ctx)
        return rankwise.predict(ddp, Lines(data) if as_stream else data, batch_size=batch_size, forward=forwards[shape])


@pytest.mark.parametrize(
    ("world_size", "size", "batch_size", "as_stream"),
    [(1, 7, 3, False), (2, 7, 3, False), (3, 7, 1, False), (3, 2, 4, False), (2, 7, 2, True)],
)
def test_predictions_are_those_of_one_process_in_order(
    world_size: int, size: int, batch_size: int, as_stream: bool
) -> None:
    """Rank 0 gets one output for each sample, in the data set's order, also where ranks have no sample; the others get none."""
    model, data = make(size)
    expected = model.eval()(data.tensors[0]).detach()
    first, *others = run_ranks(forecast, world_size, size, batch_size, as_stream, "tensor")
    torch.testing.assert_close(first, expected)
    assert others == [None] * (world_size - 1)
    told, *_ = run_ranks(forecast, world_size, size, batch_size, as_stream, "dict")
    torch.testing.assert_close(told, {"logits": expected, "first": data.tensors[0][:, 0]})


def test_outputs_that_are_not_one_for_each_sample_are_refused() -> None:
    """The mean over a batch has no row for each sample: the shape and the way out are told, on the rank that saw it first."""
    outcomes = try_ranks(forecast, 2, 7, 3, False, "rows")
    assert any(isinstance(one.error, UsageError) and "a tensor of shape ()" in str(one.error) for one in outcomes)


def test_without_ranks_predict_is_a_plain_loop() -> None:
    """No job was joined: one process, the same result."""
    model, data = make(5)
    expected = model.eval()(data.tensors[0]).detach()
    model.train()
    torch.testing.assert_close(rankwise.predict(model, data, batch_size=2), expected)
    assert model.training
