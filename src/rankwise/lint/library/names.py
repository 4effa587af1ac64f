"""One name for each thing of a library, by whatever door it was imported."""

from __future__ import annotations

from functools import lru_cache

DDP = "torch.nn.parallel.DistributedDataParallel"
FSDP = "torch.distributed.fsdp.FullyShardedDataParallel"
FULLY_SHARD = "torch.distributed.fsdp.fully_shard"
SAMPLER = "torch.utils.data.DistributedSampler"
LOADER = "torch.utils.data.DataLoader"
ACCELERATOR = "accelerate.Accelerator"
FABRIC = "lightning.fabric.Fabric"
ENGINE = "deepspeed.DeepSpeedEngine"
PL_MODULE = "lightning.pytorch.LightningModule"
PL_TRAINER = "lightning.pytorch.Trainer"
HF_TRAINER = "transformers.Trainer"
CONTEXT = "rankwise.RankContext"
STRATEGY = "rankwise.tf.Strategy"
RESOLVER = "rankwise.tf.ClusterResolver"
GROUP = "torch.distributed.ProcessGroup"
#: Packages whose functions do no more with a loader or a seed than tables tell.
OPEN = frozenset(
    """builtins torch torchvision torchaudio numpy os sys time random math tqdm logging json pathlib argparse collections itertools functools datetime
    uuid sklearn matplotlib PIL cv2 pandas wandb yaml re copy shutil glob datasets transformers accelerate user dataclasses typing subprocess tarfile tempfile operator either parameter parameters
    zipfile urllib contextlib socket signal string csv pickle warnings omegaconf peft""".split()  # noqa: SIM905
)
#: The modules of a package in which its names are found as well.
_INNER = {
    "torch.distributed": "distributed_c10d",
    "torch.distributed.algorithms": "join",
    "torch.distributed.fsdp": "fully_sharded_data_parallel",
    "torch.multiprocessing": "spawn",
    "torch.nn": "modules",
    "torch.nn.parallel": "distributed",
    "torch.optim": "adamw sgd",
    "torch.utils.data": "distributed dataloader dataset sampler",
    "torch.utils.tensorboard": "writer",
    "accelerate": "accelerator state launchers",
    "accelerate.utils": "operations dataclasses",
    "deepspeed": "runtime.engine",
    "rankwise.tf": "experimental distribute.cluster_resolver distribute cluster_resolver train",  # `tf.distribute` is `tf`
    "tqdm": "auto std notebook",
    "transformers": "trainer trainer_callback training_args",
}
#: Longest prefix wins.
PREFIXES = {
    **{f"{package}.{one}.": f"{package}." for package, inner in _INNER.items() for one in inner.split()},
    "torch.distributed.nn.functional.": "torch.distributed.nn.",
    "torch.distributed._composable.fsdp.": "torch.distributed.fsdp.",
    "pytorch_lightning.": "lightning.pytorch.",
    "lightning_fabric.": "lightning.fabric.",
    "tensorboardX.": "torch.utils.tensorboard.",
    "deepspeed.comm.": "torch.distributed.",
}
_WHOLE = {
    "torch.distributed.fsdp.FSDP": FSDP,
    "apex.parallel.DistributedDataParallel": DDP,
    "torch.nn.parallel.DistributedDataParallelCPU": DDP,
    "lightning.Fabric": FABRIC,
    "lightning.fabric.fabric.Fabric": FABRIC,
    "lightning.Trainer": PL_TRAINER,
    "lightning.pytorch.trainer.Trainer": PL_TRAINER,
    "lightning.LightningModule": PL_MODULE,
    "lightning.pytorch.core.LightningModule": PL_MODULE,
    "lightning.pytorch.core.module.LightningModule": PL_MODULE,
    "lightning.Callback": "lightning.pytorch.Callback",
    "lightning.pytorch.callbacks.Callback": "lightning.pytorch.Callback",
    "lightning.LightningDataModule": "lightning.pytorch.LightningDataModule",
    "accelerate.utils.InitProcessGroupKwargs": "accelerate.InitProcessGroupKwargs",
    "deepspeed.comm": "torch.distributed",
    "torch.distributed.distributed_c10d": "torch.distributed",
    "torch.utils.data.distributed": "torch.utils.data",
    "torch.multiprocessing.spawn.spawn": "torch.multiprocessing.spawn",
    **dict.fromkeys(
        (f"{library}.DataLoader" for library in ("torch_geometric.loader", "torch_geometric.data", "monai.data")),
        LOADER,
    ),
    "torch.cuda.amp.GradScaler": "torch.amp.GradScaler",
    "torch.distributed.checkpoint.state_dict_saver.save": "torch.distributed.checkpoint.save",
    "torch.distributed.checkpoint.state_dict_loader.load": "torch.distributed.checkpoint.load",
    "torch.distributed.group.WORLD": "torch.distributed.GroupMember.WORLD",
    "posix.environ": "os.environ",
    **dict.fromkeys(
        (f"rankwise.tf.{kind}Strategy" for kind in ("Mirrored", "MultiWorkerMirrored", "CentralStorage")), STRATEGY
    ),
    **dict.fromkeys(
        (f"rankwise.tf.{kind}ClusterResolver" for kind in ("Simple", "TFConfig", "Slurm", "Kubernetes")), RESOLVER
    ),
}


@lru_cache(maxsize=4096)
def canonical(name: str) -> str:
    """The one name that tables and rules use."""
    if name in _WHOLE:
        return _WHOLE[name]
    for old, new in PREFIXES.items():
        if name.startswith(old):
            name = new + name[len(old) :]
            break
    return _WHOLE.get(name, name)
