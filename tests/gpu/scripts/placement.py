"""A model on several devices of one process: the CPU beside the GPU, and two GPUs where there are as many."""

from __future__ import annotations

from typing import Any

import torch
from checks import DEVICE, IS_CUDA, check
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import rankwise

torch.use_deterministic_algorithms(True)
ctx = rankwise.init(device=DEVICE, timeout_s=60)
WIDTH, NUM_CLASSES = 32, 5
SECOND = "cuda:1" if IS_CUDA and torch.cuda.device_count() > 1 else "cpu"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, WIDTH), *(Block() for _ in range(4)), nn.Linear(WIDTH, NUM_CLASSES)).double()


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(24, 16, generator=generator).double(), torch.randint(NUM_CLASSES, (24,), generator=generator)


def train(model: nn.Module, device: str) -> list[float]:
    inputs, targets = (one.to(device) for one in make_batch())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def compare(model: nn.Module, device: str, where: Any = None) -> dict[str, Any]:
    """Return by how much losses and weights differ from those of a model on the CPU, and where the parameters lie."""
    alone = build()
    expected, losses = train(alone, "cpu"), train(model, device)
    inner = getattr(model, "module", model)
    apart = [float((one.cpu() - other).abs().max()) for one, other in zip(inner.parameters(), alone.parameters(), strict=True)]  # fmt: skip
    return {
        "losses": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        "weights": max(apart),
        "devices": sorted({str(one.device) for one in inner.parameters()}),
    }


@check
def beside_the_cpu() -> Any:
    """From the CPU to the GPU and back, in the middle of the model."""
    return compare(rankwise.place(build(), {"0": "cpu", "1-3": ctx.device, "4-5": "cpu"}), "cpu")


@check
def over_two_devices() -> Any:
    """By bytes over both GPUs, the inputs on the first."""
    return compare(rankwise.place(build(), "balanced", devices=[ctx.device, SECOND]), DEVICE)


@check
def checkpointed() -> Any:
    model = rankwise.apply_checkpointing(build(), blocks=Block)
    return compare(rankwise.place(model, {"0-2": "cpu", "3-5": ctx.device}), "cpu")


@check
def under_ddp() -> Any:
    """DistributedDataParallel over a model that lies on GPUs only."""
    model = rankwise.place(build(), "balanced", devices=[ctx.device, SECOND if IS_CUDA and SECOND != "cpu" else ctx.device])  # fmt: skip
    return compare(rankwise.apply_ddp(model), DEVICE)


@check
def automatic() -> Any:
    """With 60 KB of the GPU some layers must stay on the CPU; without a bound measured time decides."""
    example = make_batch()[0]
    free = rankwise.place(build(), "auto", example=example, devices=[ctx.device, "cpu"])
    bounded = rankwise.place(
        build(),
        "auto",
        example=example,
        devices=[ctx.device, "cpu"],
        memory={ctx.device: "60KB" if IS_CUDA else "1GB"},
    )
    placement = rankwise.placement_of(bounded)
    assert placement is not None
    need = placement.needs[ctx.device]
    assert rankwise.placement_of(free) is not None
    return {"total": need.total, "free": need.free, **compare(bounded, "cpu")}


@check
def too_much() -> Any:
    """A model larger than the GPU is refused, from the meta device, before anything is allocated."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2**17, 2**17) for _ in range(8)))
    try:
        rankwise.place(model, {"0-7": ctx.device})
    except rankwise.ModelError as error:
        return str(error)
    return "placed"


@check
def trainer() -> Any:
    """The Trainer on the CPU and the GPU at once, against the Trainer on the CPU."""

    def fit(where: Any) -> list[list[float]]:
        model = build()
        if where is not None:
            rankwise.place(model, where, outputs=ctx.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        loader = rankwise.DataLoader(TensorDataset(*make_batch()), global_batch=8)
        config = rankwise.TrainerConfig(steps=6, progress=False, clip_norm=1.0)
        rankwise.Trainer(model, optimizer, loader, lambda model, batch: cross_entropy(model(batch[0]), batch[1]), config=config).fit()  # fmt: skip
        return [one.flatten().tolist() for one in model.state_dict().values()]

    placed, whole = fit({"0-2": "cpu", "3-5": ctx.device}), fit(None)
    return max(abs(a - b) for one, other in zip(placed, whole, strict=True) for a, b in zip(one, other, strict=True))


ctx.close()
