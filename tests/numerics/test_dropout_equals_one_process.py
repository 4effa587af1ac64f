"""Training with dropout and augmentation on W ranks is training in one process: losses to 1e-12, at any W and after a resume with another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import Dataset, TensorDataset

import rankwise
from rankwise.data.epoch_order import ShuffledOrder
from rankwise.data.sample_position import placed
from rankwise.testing import run_ranks
from rankwise.train.dropout import GlobalDropout, replace_dropout

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.linux

#: Float64 has 53 bits; a few hundred additions in another order cost three digits of sixteen.
TOLERANCE = 1e-12
#: The last step of an epoch has 5 samples: of 8 ranks, some have none.
NUM_SAMPLES, BATCH, NUM_EPOCHS, SEED = 37, 16, 3, 4


def build_model(seed: int, *, is_global: bool = True) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(5, 16),
        nn.Tanh(),
        nn.Dropout(0.5),
        nn.Linear(16, 16),
        nn.Tanh(),
        nn.Dropout(0.2),
        nn.Linear(16, 1),
    ).double()
    return replace_dropout(model) if is_global else model


def build_samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs.square().sum(1, keepdim=True))


class Noisy(Dataset):
    """The same samples, with noise from torch's generator."""

    def __init__(self) -> None:
        self.samples = build_samples()

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.samples[index]
        return x + torch.randn(5, dtype=torch.float64), y


def build_optimizer(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def train_by_hand() -> list[float]:
    """Return the loss of each step of a loop without ranks, loader and micro-batches."""
    samples, model, order = build_samples(), build_model(0), ShuffledOrder(NUM_SAMPLES, SEED)
    optimizer, losses = build_optimizer(model), []
    for epoch in range(NUM_EPOCHS):
        for start in range(0, NUM_SAMPLES, BATCH):
            positions = range(start, min(start + BATCH, NUM_SAMPLES))
            inputs, targets = samples[order.take(epoch, torch.tensor(positions))]
            optimizer.zero_grad()
            with placed(positions, epoch=epoch):
                loss = mse_loss(model(inputs), targets)
                loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses


def train(
    dataset: Dataset, micro_batch: int | None, num_workers: int = 0, state: Any = None, stop_after: int | None = None,
    *, is_global: bool = True, fetches: bool = False,
) -> tuple[list[float], Any]:  # fmt: skip
    """Return the losses over all ranks from where the state was, and the state behind the last step."""
    with rankwise.init(device="cpu", timeout_s=30) as ctx:
        # Other weights and keys on each rank: DDP must start from those of rank 0.
        model = build_model(ctx.rank, is_global=is_global)
        loader = rankwise.DataLoader(
            dataset, global_batch=BATCH, micro_batch=micro_batch, seed=SEED, num_workers=num_workers,
            multiprocessing_context="fork" if num_workers else None,
        )  # fmt: skip
        if state is not None:
            model.load_state_dict(state["model"])
            loader.load_state_dict(state["loader"])
        ddp = rankwise.apply_ddp(model, ctx=ctx)
        optimizer, losses = build_optimizer(ddp), []
        if state is not None:
            optimizer.load_state_dict(state["optimizer"])
        for _ in loader.epochs(NUM_EPOCHS):
            for step in loader.steps():
                optimizer.zero_grad()
                total = torch.zeros((), dtype=torch.float64)
                micro_batches = step.fetch() if fetches else step
                if fetches:  # as who weighs by tokens does
                    assert sum(len(targets) for _, targets in micro_batches) == step.num_samples
                for inputs, targets in rankwise.accumulate(ddp, micro_batches):
                    loss = mse_loss(ddp(inputs), targets, reduction="sum") * step.scale
                    loss.backward()
                    total += loss.detach()
                optimizer.step()
                losses.append(float(rankwise.all_reduce(total)) / ctx.world_size)
                if len(losses) == stop_after:
                    return losses, {
                        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()
                    }  # fmt: skip
        return losses, None


def assert_same(found: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(
        torch.tensor(found, dtype=torch.float64),
        torch.tensor(expected, dtype=torch.float64),
        rtol=TOLERANCE,
        atol=0,
    )


def on_ranks(world_size: int, *args: Any, **more: Any) -> tuple[list[float], Any]:
    told = run_ranks(lambda: train(*args, **more), world_size)
    return told[0]


@pytest.mark.parametrize(
    ("world_size", "micro_batch"),
    [(1, None), (1, 5), (2, None), (2, 3), (3, None), (3, 1), (4, 1), (4, 3), (8, None), (8, 1)],
)
def test_ranks_with_dropout_train_as_one_process_does(world_size: int, micro_batch: int | None) -> None:
    """Each step's loss is that of a loop by hand over whole batches, with accumulation and an uneven last step."""
    assert_same(on_ranks(world_size, build_samples(), micro_batch)[0], train_by_hand())


@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 3), (2, 3), (3, 2)])
def test_micro_batches_that_are_looked_at_first_drop_the_same(world_size: int, micro_batch: int) -> None:
    """Taken all at once and counted before the first forward, as for a loss by tokens: each is at hand when its turn comes."""
    assert_same(on_ranks(world_size, build_samples(), micro_batch, fetches=True)[0], train_by_hand())


@pytest.mark.parametrize(("first", "second", "micro_batch"), [(2, 3, None), (4, 1, 2), (1, 8, 1)])
def test_a_resume_with_other_ranks_changes_no_mask(first: int, second: int, micro_batch: int | None) -> None:
    """Stopped in the middle of the second epoch and gone on with other ranks, built from another seed: the same losses."""
    before, state = on_ranks(first, build_samples(), None, stop_after=4)
    after, _ = on_ranks(second, build_samples(), micro_batch, state=state)
    assert_same(before + after, train_by_hand())


@pytest.mark.parametrize(
    ("world_size", "num_workers", "micro_batch"), [(2, 2, None), (3, 0, 2), (4, 0, None), (8, 0, None)]
)
def test_augmentation_is_that_of_one_process(world_size: int, num_workers: int, micro_batch: int | None) -> None:
    """Noise drawn by the data set, with and without workers, and dropout together: the losses of one rank."""
    expected, _ = on_ranks(1, Noisy(), None)
    assert_same(on_ranks(world_size, Noisy(), micro_batch, num_workers)[0], expected)
    assert abs(expected[0] - train_by_hand()[0]) > 1e-3


def test_torch_s_dropout_is_another_training_at_each_number_of_ranks() -> None:
    """The comparison above can fail: with nn.Dropout the losses of two ranks are not those of one."""
    one, two = (on_ranks(world_size, build_samples(), None, is_global=False)[0] for world_size in (1, 2))
    assert abs(one[0] - two[0]) > 1e-3


def test_the_model_has_two_layers_of_ours() -> None:
    """What the tests above train drops by place, and nothing else."""
    kinds = [type(layer) for layer in build_model(0).modules()]
    assert kinds.count(GlobalDropout) == 2
    assert nn.Dropout not in kinds
