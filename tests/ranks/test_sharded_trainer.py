"""What a Trainer can do besides, it does with sharded models too: half precision, compiling, dropout by place, evaluation, states in host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import rankwise
from rankwise.data.metrics import Accuracy
from rankwise.testing import run_ranks

PLAN = {"0": "colwise", "2": "rowwise", "4": "replicate"}


def build(*, dropout: float) -> nn.Module:
    torch.manual_seed(0)
    last = rankwise.train.GlobalDropout(dropout) if dropout else nn.ReLU()
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), last, nn.Linear(32, 4))


def compute_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


#: Layers split, and over that shards; copies of shards.
MESHES = {"grid": {"shard": 2, "tensor": 2}, "hybrid": {"replicate": 2, "shard": 2}}


def fit(spread: str, config: dict[str, Any], *, dropout: float = 0.0) -> tuple[list[float], float]:
    with rankwise.init(device="cpu", mesh=MESHES.get(spread)):
        model = build(dropout=dropout)
        if spread in {"tensor", "grid"}:
            rankwise.apply_tensor_parallel(model, PLAN)
        if spread in {"fsdp", "offload", "grid", "hybrid"}:
            rankwise.apply_fsdp(model, cpu_offload=spread == "offload")
        if spread == "zero1":
            model = rankwise.apply_ddp(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if spread == "zero1":
            optimizer = rankwise.apply_zero1(optimizer)
        losses: list[float] = []

        class Curve(rankwise.train.Callback):
            def on_report(self, trainer: Any, report: Any) -> None:
                losses.extend(report.losses)

        inputs = torch.randn(45, 8, generator=torch.Generator().manual_seed(1))
        data = TensorDataset(inputs, inputs.argmax(1) % 4)
        trainer = rankwise.Trainer(
            model, optimizer, rankwise.DataLoader(data, global_batch=16), compute_loss,
            evaluation=rankwise.train.Evaluation(data, {"right": Accuracy()}, batch_size=7), callbacks=[Curve()],
            config=rankwise.TrainerConfig(
                epochs=2, progress=False, clip_norm=1.0, check_replicas_every=2, evaluate_every="epoch", seed=3, non_finite="stop", **config
            ),
        )  # fmt: skip
        trainer.fit()
        return losses, trainer.metrics["right"]


def fit_all(spreads: list[str]) -> dict[str, dict[str, tuple[list[float], float]]]:
    torch.set_num_threads(1)
    found = {}
    for spread in spreads:
        torch.compiler.reset()  # else it would give up after so many models of one class
        found[spread] = {name: fit(spread, dict(config), dropout=dropout) for name, (config, dropout, _) in CASES.items() if spread != "ddp" or name != "compiled"}  # fmt: skip
    return found


#: Half precision rounds to 11 bits, and tensor parallelism adds two such sums.
CASES: dict[str, tuple[dict[str, Any], float, float]] = {
    "plain": ({}, 0.0, 1e-5),
    "fp16": ({"precision": "fp16"}, 0.0, 5e-3),
    "bf16": ({"precision": "bf16"}, 0.0, 2e-2),
    "compiled": ({"compile": {"backend": "aot_eager"}}, 0.0, 1e-5),
    "dropout": ({}, 0.3, 1e-5),
}


SPREADS = {2: ["fsdp", "offload", "tensor", "zero1"], 4: ["grid", "hybrid"]}


@pytest.mark.parametrize("size", SPREADS)
def test_it_trains_as_under_ddp(size: int) -> None:
    """Losses and accuracies are DDP's, up to the rounding of each dtype, also of what is compiled; dropout behind the split layers drops the same units."""
    # One launch for all: what compiles takes each rank two seconds to import.
    for rank in run_ranks(fit_all, size, ["ddp", *SPREADS[size]], timeout_s=200):
        expected = rank.pop("ddp")
        for spread, ours in rank.items():
            assert list(ours) == list(CASES)
            for name, (losses, right) in ours.items():
                # The compiler's backend has the same arithmetic: what is compiled is as DDP that is not, and that costs no compilation.
                their_losses, theirs = expected["plain" if name == "compiled" else name]
                assert len(losses) == 6
                assert losses == pytest.approx(their_losses, rel=CASES[name][2]), (spread, name)
                assert right == pytest.approx(theirs, abs=0.03), (spread, name)


def overflow() -> list[bool]:
    """One rank's shard of the gradients overflows: nobody moves."""
    with rankwise.init(device="cpu") as ctx:
        model = rankwise.apply_fsdp(build(dropout=0))
        config = rankwise.TrainerConfig(steps=1, progress=False, precision="fp16")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = TensorDataset(torch.randn(4, 8), torch.zeros(4, dtype=torch.int64))

        before = [one.to_local().clone() for one in model.parameters()]
        trainer = rankwise.Trainer(model, optimizer, rankwise.DataLoader(data, global_batch=4), compute_loss, config=config)  # fmt: skip
        scaler = trainer._stepping.precision.scaler
        loss = scaler.scale(compute_loss(model, (data.tensors[0], data.tensors[1])))
        loss.backward()
        if ctx.rank == 1:
            next(model.parameters()).grad.to_local().fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        return [torch.equal(one.to_local(), old) for one, old in zip(model.parameters(), before, strict=True)]


def test_what_overflows_on_one_rank_is_skipped_on_all() -> None:
    """A GradScaler that finds an infinity in one rank's shard leaves the weights of all ranks as they are."""
    assert all(same for found in run_ranks(overflow, 2) for same in found)
