"""One training, written once for each contender of benchmarks/trainer.py: by hand, with our parts, with our Trainer, with the peers'.

Each takes a task, a watch and a folder, and runs one epoch on the ranks that are there. All have the same options of DDP,
the same optimizer, and report their loss every so many steps; what they do besides, by default, is theirs.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import rankwise
import rankwise.train

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from parts.tasks import Task, Watch
    from torch import Tensor, nn

    Fit = Callable[[Task, Watch, Path], None]


def fit_raw(task: Task, watch: Watch, folder: Path) -> None:  # noqa: ARG001 - as all
    """Train with torch alone, as one writes it by hand."""
    device = watch.device
    model: Any = _compile(task, task.build_model().to(device))
    data = task.build_data()
    sampler = None
    if task.world_size > 1:
        ids = [device.index] if device.type == "cuda" else None
        model = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
        sampler = DistributedSampler(data, seed=0)
    loader = _load(task, watch, data, sampler=sampler, shuffle=sampler is None)
    optimizer = task.build_optimizer(model.parameters())
    is_main = not dist.is_initialized() or dist.get_rank() == 0
    for number, (x, y) in enumerate(loader, 1):
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)  # noqa: PLW2901 - by hand
        with torch.autocast(device.type, torch.bfloat16) if task.precision == "bf16" else nullcontext():
            loss = task.compute_loss(watch, model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % task.log_every == 0 and is_main:
            print(f"step {number}: loss {loss.item():.4f}")


def fit_plain(task: Task, watch: Watch, folder: Path) -> None:
    """Train with a loop by hand, of our parts."""
    loader = rankwise.DataLoader(task.build_data(), global_batch=task.batch * task.world_size)
    model = rankwise.apply_ddp(_compile(task, task.build_model()))
    optimizer = task.build_optimizer(model.parameters())
    device = watch.device
    with rankwise.train.Track(loader, optimizer, epochs=1, folder=folder, log_every=task.log_every) as track:
        for _ in loader.epochs(1):
            for step in loader.steps():
                for x, y in rankwise.accumulate(model, step):
                    with (
                        torch.autocast(device.type, torch.bfloat16)
                        if task.precision == "bf16"
                        else nullcontext()
                    ):
                        total = task.compute_loss(watch, model, x, y, "sum")
                    loss = total * (step.scale / task.terms)
                    loss.backward()
                    track.add(loss)
                optimizer.step()
                optimizer.zero_grad()
                track.step(step)


def fit_bare(task: Task, watch: Watch, folder: Path) -> None:  # noqa: ARG001 - as all
    """Train with a loop by hand, of our loader and model, its loss printed by hand: what tracking costs is the difference."""
    loader = rankwise.DataLoader(task.build_data(), global_batch=task.batch * task.world_size)
    model = rankwise.apply_ddp(_compile(task, task.build_model()))
    optimizer = task.build_optimizer(model.parameters())
    device, is_main = watch.device, not dist.is_initialized() or dist.get_rank() == 0
    for number, step in enumerate(loader.steps(), 1):
        for x, y in rankwise.accumulate(model, step):
            with torch.autocast(device.type, torch.bfloat16) if task.precision == "bf16" else nullcontext():
                total = task.compute_loss(watch, model, x, y, "sum")
            loss = total * (step.scale / task.terms)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % task.log_every == 0 and is_main:
            print(f"step {number}: loss {loss.item() / task.world_size:.4f}")


def fit_trainer(task: Task, watch: Watch, folder: Path) -> None:
    """Train with our Trainer: progress, journal and table of steps on, nothing saved on the way."""
    model = task.build_model()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return task.compute_loss(watch, model, *batch)

    config = rankwise.TrainerConfig(
        epochs=1, log_every=task.log_every, save_every=None, evaluate_every=None, fused=task.fused,
        precision="bf16" if task.precision == "bf16" else "fp32",
        compile={"backend": task.compiler} if task.compiler else False,
    )  # fmt: skip
    loader = rankwise.DataLoader(task.build_data(), global_batch=task.batch * task.world_size)
    optimizer = task.build_optimizer(model.parameters())
    rankwise.Trainer(model, optimizer, loader, loss, config=config, folder=folder).fit()


def fit_accelerate(task: Task, watch: Watch, folder: Path) -> None:  # noqa: ARG001 - as all
    """Train with Accelerate."""
    from accelerate import Accelerator, DistributedDataParallelKwargs  # noqa: PLC0415 - each brings its own

    accelerator = Accelerator(
        cpu=watch.device.type == "cpu",
        mixed_precision="bf16" if task.precision == "bf16" else "no",
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    model: Any = _compile(task, task.build_model())
    optimizer = task.build_optimizer(model.parameters())
    loader = _load(task, watch, task.build_data(), shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for number, (x, y) in enumerate(loader, 1):
        with accelerator.autocast():
            loss = task.compute_loss(watch, model, x, y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if number % task.log_every == 0:
            accelerator.print(f"step {number}: loss {loss.item():.4f}")
    accelerator.free_memory()


def fit_fabric(task: Task, watch: Watch, folder: Path) -> None:  # noqa: ARG001 - as all
    """Train with Lightning's Fabric."""
    from lightning.fabric import Fabric  # noqa: PLC0415 - each brings its own
    from lightning.fabric.strategies import DDPStrategy  # noqa: PLC0415 - the same

    fabric = Fabric(
        accelerator=watch.device.type, devices=task.world_size, precision=_name_precision(task),
        strategy=DDPStrategy(gradient_as_bucket_view=True) if task.world_size > 1 else "auto",
    )  # fmt: skip
    fabric.launch()
    model: Any = _compile(task, task.build_model())
    optimizer: Any = task.build_optimizer(model.parameters())
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(_load(task, watch, task.build_data(), shuffle=True))
    for number, (x, y) in enumerate(loader, 1):
        with fabric.autocast():
            loss = task.compute_loss(watch, model, x, y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if number % task.log_every == 0:
            fabric.print(f"step {number}: loss {loss.item():.4f}")


def fit_lightning(task: Task, watch: Watch, folder: Path) -> None:
    """Train with Lightning's Trainer: progress bar and CSV logger on, nothing saved."""
    import lightning  # noqa: PLC0415 - each brings its own
    from lightning.pytorch.loggers import CSVLogger  # noqa: PLC0415 - the same
    from lightning.pytorch.strategies import DDPStrategy  # noqa: PLC0415 - the same

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net: Any = _compile(task, task.build_model())

        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            loss = task.compute_loss(watch, self.net, *batch)
            self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return task.build_optimizer(self.parameters())

    trainer = lightning.Trainer(
        accelerator=watch.device.type, devices=task.world_size, precision=_name_precision(task),
        strategy=DDPStrategy(gradient_as_bucket_view=True) if task.world_size > 1 else "auto",
        max_epochs=1, logger=CSVLogger(folder), log_every_n_steps=task.log_every,
        enable_checkpointing=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(Module(), _load(task, watch, task.build_data(), shuffle=True))


#: By the name in the table, in its order. "raw, again" is raw once more: how far its ratio is from 1 tells what the rest is worth.
CONTENDERS: dict[str, Fit] = {
    "raw": fit_raw,
    "raw, again": fit_raw,
    "loader + DDP": fit_bare,
    "plain parts": fit_plain,
    "Trainer": fit_trainer,
    "Accelerate": fit_accelerate,
    "Fabric": fit_fabric,
    "Lightning": fit_lightning,
}
#: What must be there for it.
NEEDS = {
    "plain parts": ("rankwise.train.tracking",),
    "Trainer": ("rankwise.train.trainer",),
    "Accelerate": ("accelerate",),
    "Fabric": ("lightning.fabric",),
    "Lightning": ("lightning",),
}


def _compile(task: Task, model: nn.Module) -> Any:
    return torch.compile(model, backend=task.compiler) if task.compiler else model


def _load(task: Task, watch: Watch, data: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=task.batch, pin_memory=watch.device.type == "cuda", **options)


def _name_precision(task: Task) -> Any:
    return "bf16-mixed" if task.precision == "bf16" else "32-true"
