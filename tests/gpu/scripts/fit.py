"""Trainings by the Trainer on one GPU: ``whole`` (and one that is cut), ``rest`` (of that), ``read`` (its checkpoint where there is no GPU)."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch
from checks import COMPILER, DEVICE, build_model, check, note
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import rankwise
from rankwise import checkpoint

NUM_STEPS, CUT_AT = 12, 5
PRECISIONS = ("fp32", "bf16", "fp16")
part, folder = sys.argv[1], Path(sys.argv[2])
torch.use_deterministic_algorithms(True)
ctx = rankwise.init(device="cpu" if part == "read" else DEVICE)


class Curve(rankwise.train.Callback):
    """Keeps the losses and the gradients' norms of all steps, and goes with the checkpoint."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_report(self, trainer: Any, report: Any) -> None:
        self.seen += [*report.losses, *report.grad_norms]

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


def hash_state(model: nn.Module) -> str:
    """Equal for equal bits."""
    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        found.update(f"{name} {value.dtype} {value.cpu().reshape(-1).view(torch.uint8).tolist()}".encode())
    return found.hexdigest()


def fit(precision: str, into: Path, steps: int, **options: Any) -> dict[str, Any]:
    """Train up to a step, with dropout that draws from the device's own generator."""
    torch.manual_seed(0)
    x = torch.randn(60, 16)
    data = TensorDataset(x, x[:, :5].argmax(dim=1))
    model = build_model(torch.float32, dropout=0.4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    outputs: list[str] = []

    def compute_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        given = model(batch[0])
        outputs.append(str(given.dtype))
        return cross_entropy(given, batch[1])

    curve = Curve()
    trainer = rankwise.Trainer(
        model, optimizer, rankwise.DataLoader(data, global_batch=24, micro_batch=12), compute_loss, folder=into, callbacks=[curve],
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5),
        config=rankwise.TrainerConfig(steps=steps, precision=precision, clip_norm=0.5, progress=False, log_every=1, save_every=100, **options),
    )  # fmt: skip
    trainer.fit()
    scaler = trainer._stepping.precision.scaler
    return {
        "seen": curve.seen, "state": hash_state(trainer.model), "outputs": sorted(set(outputs)), "step": trainer.step,
        "scale": scaler.get_scale() if scaler is not None else None, "place": str(next(trainer.model.parameters()).device.type),
        "fused": bool(optimizer.param_groups[0].get("fused")),
    }  # fmt: skip


if part == "whole":
    for precision in PRECISIONS:
        note(f"whole {precision}", fit(precision, folder / f"whole-{precision}", NUM_STEPS))
        note(f"cut {precision}", fit(precision, folder / f"cut-{precision}", CUT_AT))

    @check
    def compiled() -> Any:
        """Compiled by the Trainer; dropout is left out, as a compiled one draws other numbers."""
        found = []
        for name, compile_ in (("eager-2", False), ("compiled", {"backend": COMPILER})):  # fmt: skip
            torch.manual_seed(0)
            model = build_model(torch.float32)
            x = torch.randn(48, 16)
            trainer = rankwise.Trainer(
                model, torch.optim.SGD(model.parameters(), lr=0.05),
                rankwise.DataLoader(TensorDataset(x, x[:, :5].argmax(dim=1)), global_batch=24),
                lambda model, batch: cross_entropy(model(batch[0]), batch[1]), folder=folder / name,
                config=rankwise.TrainerConfig(steps=4, compile=compile_, progress=False),
            )  # fmt: skip
            trainer.fit()
            found.append([one.detach().double().cpu() for one in trainer.model.parameters()])
        return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))


if part == "rest":
    for precision in PRECISIONS:
        note(f"rest {precision}", fit(precision, folder / f"cut-{precision}", NUM_STEPS))

if part == "read":
    note("has cuda", torch.cuda.is_available())
    for precision in PRECISIONS:
        model = build_model(torch.float32, dropout=0.4, seed=9)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        done = checkpoint.load(folder / f"whole-{precision}", {"model": model, "optimizer": optimizer}, strict=False)  # fmt: skip
        loaded = hash_state(model)
        held = {one.device.type for state in optimizer.state.values() for one in state.values() if isinstance(one, torch.Tensor)}  # fmt: skip
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        finite = all(bool(one.isfinite().all()) for one in model.parameters())
        note(f"read {precision}", {"done": done, "state": loaded, "held": sorted(held), "finite": finite})
ctx.close()
