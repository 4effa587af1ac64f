"""A training by hand in one process, and the same by the Trainer on this rank of a job: what tests of numerics compare."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import rankwise
from rankwise.train.loggers.curves import Curves
from small_gpt import Gpt

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NUM_STEPS, NUM_SAMPLES, GLOBAL_BATCH, NUM_CLASSES = 50, 203, 24, 5
#: For more than two ranks, and compositions whose steps are dear (a DTensor's operation takes a millisecond): an epoch of nine steps, of which the last is short,
#: and three of the next; the learning rate falls after four. What is lost or counted twice shows in the loss of the second step, and a
#: thousandth of it was seen to.
FEW_STEPS = 12
#: Float64 has 53 bits. SGD adds what it is given: rounding in the order of the sums stays rounding. AdamW divides by the root of the
#: second moment, which is as small as the gradient where that vanishes: there a relative error of 1e-16 becomes one of 1e-12 and more.
TOLERANCE = {"sgd": 1e-12, "adamw": 1e-9}
#: Float32 has 24 bits, 6e-8; a sum of a few hundred terms in another order loses one digit, and 50 steps carry that on.
TOLERANCE_FLOAT32 = 2e-5
MODELS, OPTIMIZERS = ("mlp", "batchnorm", "transformer"), ("sgd", "adamw")
SEQUENCE = 6


class Transformer(nn.Module):
    """One block of attention, no dropout; reads tokens, guesses a class for each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_CLASSES, 12)
        self.block = nn.TransformerEncoderLayer(12, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(12, NUM_CLASSES)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return self.head(self.block(self.embed(tokens_BS)))


def build_model(kind: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    if kind == "gpt":
        return Gpt(NUM_CLASSES, SEQUENCE).to(dtype)
    if kind == "transformer":
        return Transformer().to(dtype)
    if kind == "batchnorm":
        layers: list[nn.Module] = [
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
            nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, NUM_CLASSES),
        ]  # fmt: skip
        return nn.Sequential(*layers).to(dtype)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, NUM_CLASSES)).to(dtype)


def build_data(kind: str, dtype: torch.dtype = torch.float64, num_samples: int = NUM_SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    if kind in {"transformer", "gpt"}:
        tokens_NS = torch.randint(NUM_CLASSES, (num_samples, SEQUENCE), generator=generator)
        targets_NS = tokens_NS.roll(1, dims=1).clone()
        # Each sample has another number of tokens that count.
        lengths_N = torch.randint(1, SEQUENCE + 1, (num_samples,), generator=generator)
        targets_NS[torch.arange(SEQUENCE)[None] >= lengths_N[:, None]] = -100
        return TensorDataset(tokens_NS, targets_NS)
    inputs = torch.randn(num_samples, 1, 4, 4, generator=generator, dtype=torch.float64).to(dtype)
    return TensorDataset(inputs, torch.randint(NUM_CLASSES, (num_samples,), generator=generator))


def build_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def build_scheduler(optimizer: torch.optim.Optimizer, num_steps: int) -> torch.optim.lr_scheduler.StepLR:
    return torch.optim.lr_scheduler.StepLR(optimizer, num_steps * 2 // 5, gamma=0.5)


def compute_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
    inputs, targets = batch
    outputs = model(inputs)
    if targets.dim() == 2:  # the mean over the tokens that count, of which ranks have different numbers
        total = cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        return total, (targets != -100).sum()
    return cross_entropy(outputs, targets)


@functools.cache
def train_by_hand(
    kind: str, optimizer_kind: str, *, num_micro: int = 1, dtype: torch.dtype = torch.float64,
    num_samples: int = NUM_SAMPLES, clip_norm: float | None = None, num_steps: int = NUM_STEPS,
) -> tuple[list[float], dict[str, Tensor]]:  # fmt: skip
    """One process, torch only; the order is the sampler's."""
    torch.set_num_threads(1)  # nothing here is worth a second thread
    model, data = build_model(kind, dtype), build_data(kind, dtype, num_samples)
    optimizer = build_optimizer(optimizer_kind, model)
    scheduler = build_scheduler(optimizer, num_steps)
    sampler = rankwise.GlobalBatchSampler(num_samples, global_batch=GLOBAL_BATCH, num_replicas=1, rank=0)
    losses: list[float] = []
    while len(losses) < num_steps:
        for indices in sampler:
            micro = [
                [data.tensors[0][part], data.tensors[1][part]] for part in torch.tensor(indices).tensor_split(num_micro)
            ]
            counts = [int((y != -100).sum()) if y.dim() == 2 else len(y) for _, y in micro]
            total = 0.0
            for (inputs, targets), count in zip(micro, counts, strict=True):
                returned = compute_loss(model, (inputs, targets))
                loss = returned[0] if isinstance(returned, tuple) else returned * count
                loss = loss / sum(counts)
                loss.backward()
                total += loss.item()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(total)
            if len(losses) == num_steps:
                break
    return losses, model.state_dict()


class Curve(rankwise.train.Callback):
    """Keeps the losses of all steps, and may ask for a stop."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.losses: list[float] = []
        self.stop_after = stop_after

    def on_report(self, trainer: Any, report: Any) -> None:
        self.losses += report.losses

    def on_step(self, trainer: Any, step: int) -> None:
        # Asked for by the last rank only: the others hear of it.
        if step == self.stop_after and trainer.ctx.rank == trainer.ctx.world_size - 1:
            trainer.stop("enough for today")

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])


def fit(
    kind: str, optimizer_kind: str, *, num_micro: int = 1, dtype: torch.dtype = torch.float64,
    num_samples: int = NUM_SAMPLES, clip_norm: float | None = None, num_steps: int = NUM_STEPS, folder: Path | None = None,
    stop_after: int | None = None, spread: Callable[[nn.Module], nn.Module] | None = None, cut: bool = False,
) -> tuple[list[float], dict[str, Tensor]]:  # fmt: skip
    torch.set_num_threads(1)
    Curves._draw = lambda _: None  # the picture of a run takes matplotlib longer than all its steps
    with rankwise.init(device="cpu") as ctx:
        model = build_model(kind, dtype)
        if ctx.rank:  # other weights on each rank: all must start from those of rank 0
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(ctx.rank)
        model = spread(model) if spread else model
        optimizer = build_optimizer(optimizer_kind, model)
        optimizer = rankwise.apply_zero1(optimizer) if cut else optimizer
        of_rank = -(-GLOBAL_BATCH // ctx.data_size)
        loader = rankwise.DataLoader(
            build_data(kind, dtype, num_samples),
            global_batch=GLOBAL_BATCH,
            micro_batch=-(-of_rank // num_micro),
        )
        curve = Curve(stop_after)
        trainer = rankwise.Trainer(
            model, optimizer, loader, compute_loss, folder=folder, callbacks=[curve],
            scheduler=build_scheduler(optimizer, num_steps),
            config=rankwise.TrainerConfig(
                steps=num_steps, sync_batchnorm=True, progress=False, clip_norm=clip_norm, log_every=7,
            ),
        )  # fmt: skip
        trainer.fit()
        return curve.losses, {name: gather_whole(value) for name, value in trainer.model.state_dict().items()}


def gather_whole(value: Tensor) -> Tensor:
    """Return a plain copy, of a DTensor the whole."""
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


def fit_all(cases: list[tuple[str, str, dict[str, Any]]]) -> list[tuple[list[float], dict[str, Tensor]]]:
    return [fit(kind, optimizer_kind, **options) for kind, optimizer_kind, options in cases]


def assert_same(
    ours: tuple[list[float], dict[str, Tensor]],
    expected: tuple[list[float], dict[str, Tensor]],
    tolerance: float,
    what: str,
) -> None:
    (losses, state), (by_hand, expected_state) = ours, expected
    assert len(losses) == len(by_hand), what
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, by_hand, strict=True))
    assert worst <= tolerance, f"{what}: the curves differ by {worst:.2e} of the loss"
    for name, value in expected_state.items():
        scale = float(value.double().abs().max()) or 1.0
        torch.testing.assert_close(
            state[name] / scale, value / scale, rtol=0, atol=100 * tolerance,
            msg=lambda text, name=name: f"{what}, {name}: {text}",
        )  # fmt: skip
