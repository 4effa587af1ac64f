"""One training, written once for each contender of benchmarks/trainer.py: by hand, with our parts, with our Trainer, with the peers'.

Each takes a task, a watch and a folder, and runs one epoch on the ranks that are there. All have the same options of DDP,
the same optimizer, and report their loss every so many steps; what they do besides, by default, is theirs.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from parts.spreads import spread_by_hand, spread_ours
from torch.distributed.fsdp import FSDPModule
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
    sampler, build_optimizer = None, task.build_optimizer
    if task.spread != "ddp":
        model, build_optimizer = spread_by_hand(task, model)
        size, rank = task.world_size // task.tensor_degree, dist.get_rank() // task.tensor_degree
        sampler = DistributedSampler(data, num_replicas=size, rank=rank, seed=0)
    elif task.world_size > 1:
        ids = [device.index] if device.type == "cuda" else None
        model = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
        sampler = DistributedSampler(data, seed=0)
    loader = _load(task, watch, data, sampler=sampler, shuffle=sampler is None)
    optimizer = build_optimizer(model.parameters())
    watch.note(model, optimizer)
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
    loader = rankwise.DataLoader(task.build_data(), global_batch=task.global_batch)
    model, build_optimizer = spread_ours(task, _compile(task, task.build_model()))
    optimizer = build_optimizer(model.parameters())
    watch.note(model, optimizer)
    device = watch.device
    with rankwise.train.Track(loader, optimizer, epochs=1, folder=folder, log_every=task.log_every) as track:
        for _ in loader.epochs(1):
            for step in loader.steps():
                for x, y in rankwise.accumulate(model, step):
                    with torch.autocast(device.type, torch.bfloat16) if task.precision == "bf16" else nullcontext():
                        total = task.compute_loss(watch, model, x, y, "sum")
                    loss = total * (step.scale / task.terms)
                    loss.backward()
                    track.add(loss)
                optimizer.step()
                optimizer.zero_grad()
                track.step(step)


def fit_bare(task: Task, watch: Watch, folder: Path) -> None:  # noqa: ARG001 - as all
    """Train with a loop by hand, of our loader and model, its loss printed by hand: what tracking costs is the difference."""
    loader = rankwise.DataLoader(task.build_data(), global_batch=task.global_batch)
    model, build_optimizer = spread_ours(task, _compile(task, task.build_model()))
    optimizer = build_optimizer(model.parameters())
    watch.note(model, optimizer)
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
    loader = rankwise.DataLoader(task.build_data(), global_batch=task.global_batch)
    # The Trainer applies DDP itself, where nothing is applied.
    model, build_optimizer = (model, task.build_optimizer) if task.spread == "ddp" else spread_ours(task, model)
    optimizer = build_optimizer(model.parameters())
    watch.note(model, optimizer)
    rankwise.Trainer(model, optimizer, loader, loss, config=config, folder=folder).fit()


def fit_accelerate(task: Task, watch: Watch, folder: Path) -> None:  # noqa: ARG001 - as all
    """Train with Accelerate."""
    from accelerate import (  # noqa: PLC0415 - each brings its own
        Accelerator,
        DistributedDataParallelKwargs,
        DistributedType,
        FullyShardedDataParallelPlugin,
    )

    plugin = None
    if task.spread == "fsdp":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
        )
    accelerator = Accelerator(
        cpu=watch.device.type == "cpu",
        mixed_precision="bf16" if task.precision == "bf16" else "no",
        fsdp_plugin=plugin,
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    if plugin is not None:
        # On several CPUs it drops the plugin without a word, and trains whole copies.
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    model: Any = _compile(task, task.build_model())
    optimizer = task.build_optimizer(model.parameters())
    loader = _load(task, watch, task.build_data(), shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    watch.note(model, getattr(optimizer, "optimizer", optimizer))
    for number, (x, y) in enumerate(loader, 1):
        with accelerator.autocast():
            loss = task.compute_loss(watch, model, x, y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if number % task.log_every == 0:
            accelerator.print(f"step {number}: loss {loss.item():.4f}")
    accelerator.free_memory()


def fit_deepspeed(task: Task, watch: Watch, folder: Path) -> None:  # noqa: ARG001 - as all
    """Train with DeepSpeed's ZeRO: stage 3 where parameters are sharded, stage 1 where states are."""
    import deepspeed  # noqa: PLC0415 - each brings its own

    deepspeed.logger.setLevel("ERROR")
    deepspeed.init_distributed(dist.get_backend())
    options = {
        "train_micro_batch_size_per_gpu": task.batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 3 if task.spread == "fsdp" else 1},
    }
    model = task.build_model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=options)
    sampler: Any = DistributedSampler(task.build_data(), seed=0)
    is_main = dist.get_rank() == 0
    for number, (x, y) in enumerate(_load(task, watch, task.build_data(), sampler=sampler), 1):
        loss = task.compute_loss(watch, engine, x, y)
        engine.backward(loss)
        engine.step()
        if number % task.log_every == 0 and is_main:
            print(f"step {number}: loss {loss.item():.4f}")


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
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy  # noqa: PLC0415 - the same

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net: Any = _compile(task, task.build_model())

        def configure_model(self) -> None:
            if task.spread != "ddp" and not isinstance(self.net, FSDPModule):
                self.net, _ = spread_by_hand(task, self.net)

        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            loss = task.compute_loss(watch, self.net, *batch)
            self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer = task.build_optimizer(self.parameters())
            watch.note(self.net, optimizer)
            return optimizer

    sharded = ModelParallelStrategy(data_parallel_size=task.world_size, tensor_parallel_size=1)
    replicated = DDPStrategy(gradient_as_bucket_view=True) if task.world_size > 1 else "auto"
    trainer = lightning.Trainer(
        accelerator=watch.device.type, devices=task.world_size, precision=_name_precision(task),
        strategy=replicated if task.spread == "ddp" else sharded,
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
    "DeepSpeed": fit_deepspeed,
}
#: What must be there for it.
NEEDS = {
    "plain parts": ("rankwise.train.tracking",),
    "Trainer": ("rankwise.train.trainer",),
    "Accelerate": ("accelerate",),
    "Fabric": ("lightning.fabric",),
    "Lightning": ("lightning",),
    "DeepSpeed": ("deepspeed",),
}


def _compile(task: Task, model: nn.Module) -> Any:
    return torch.compile(model, backend=task.compiler) if task.compiler else model


def _load(task: Task, watch: Watch, data: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=task.batch, pin_memory=watch.device.type == "cuda", **options)


def _name_precision(task: Task) -> Any:
    return "bf16-mixed" if task.precision == "bf16" else "32-true"
