"""The Trainer class that many DDP tutorials build, with nothing but torch in it, and without their usual mistakes.

Launch it by command or by function:

    rankwise run --nproc-per-node 4 examples/tutorial/torch_only.py
    torchrun --standalone --nproc-per-node 4 examples/tutorial/torch_only.py
    python examples/tutorial/torch_only.py --nprocs 4

The commands share the folder torch-only-run: start one again and it goes on after the epoch that was saved last; when the
training is finished, delete the folder to train anew. plain_loop.py does the same in fewer lines, and
with_trainer.py in fewer still.
"""

# Shape letters: B batch, F features.

from __future__ import annotations

import os
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist
from task import launch_or_call, load_train_objs
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def ddp_setup() -> torch.device:
    """Meet the other ranks, and return this rank's own device."""
    # Who we are and where the others are is told by the launcher, which also picks a port that is free.
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)  # before anything else lands on GPU 0
        dist.init_process_group("nccl", device_id=device)
        return device
    dist.init_process_group("gloo")
    return torch.device("cpu")


def prepare_dataloader(dataset: Dataset[tuple[Tensor, Tensor]], batch_size: int) -> DataLoader[tuple[Tensor, Tensor]]:
    """Return a loader of this rank's share of the samples; the sampler shuffles, so the loader must not."""
    return DataLoader(dataset, batch_size=batch_size, sampler=DistributedSampler(dataset))


@final
class Trainer:
    """Trains a model on this rank's share of the samples, and saves every ``save_every`` epochs.

    Args:
        model: Not wrapped yet.
        train_data: This rank's batches.
        optimizer: Of the model's parameters.
        device: This rank's own.
        save_every: Epochs between two checkpoints.
        path: The file that a later start goes on from.
    """

    def __init__(
        self,
        model: nn.Module,
        train_data: DataLoader[tuple[Tensor, Tensor]],
        optimizer: torch.optim.Optimizer,
        *,
        device: torch.device,
        save_every: int,
        path: Path,
    ) -> None:
        self.device, self.path, self.save_every = device, path, save_every
        self.train_data, self.optimizer = train_data, optimizer
        self.epochs_run = 0
        bare = model.to(device)  # parameters stay the same objects, so the optimizer still has them
        if path.exists():  # on every rank, before DDP: what rank 0 alone loads later stays there
            self._load_snapshot(bare)
        self.model = DistributedDataParallel(bare, device_ids=[device.index] if device.type == "cuda" else None)

    def _load_snapshot(self, model: nn.Module) -> None:
        snapshot = torch.load(self.path, map_location="cpu", weights_only=True)
        model.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        self.epochs_run = snapshot["epochs_run"]

    def _save_snapshot(self) -> None:
        if dist.get_rank() == 0:
            snapshot = {
                "model": self.model.module.state_dict(),  # without "module." before every name
                "optimizer": self.optimizer.state_dict(),
                "epochs_run": self.epochs_run,
            }
            # A job that is killed while it writes must not leave half a file where the next start will read.
            temporary = self.path.with_name(f"{self.path.name}.tmp")
            torch.save(snapshot, temporary)
            temporary.replace(self.path)
        dist.barrier()  # nobody runs ahead, or leaves, before it is there

    def _run_batch(self, inputs_BF: Tensor, targets_B1: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(inputs_BF), targets_B1)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _run_epoch(self, epoch: int) -> None:
        assert isinstance(self.train_data.sampler, DistributedSampler)  # noqa: S101 - for the type checker
        self.train_data.sampler.set_epoch(epoch)  # else all epochs have the same order
        loss_sum_and_count = torch.zeros(2, device=self.device)
        for inputs_BF, targets_B1 in self.train_data:
            loss = self._run_batch(inputs_BF.to(self.device), targets_B1.to(self.device))
            loss_sum_and_count += torch.stack([loss * len(inputs_BF), loss.new_tensor(len(inputs_BF))])
        dist.all_reduce(loss_sum_and_count)
        loss_sum, num_samples = loss_sum_and_count.tolist()
        if dist.get_rank() == 0:
            # Asked of the loader: to take a batch for its length would read, and shuffle, once more.
            print(
                f"epoch {epoch}: {len(self.train_data)} steps of {dist.get_world_size()} x {self.train_data.batch_size}"
                f" samples, loss {loss_sum / num_samples:.6f}",
                flush=True,
            )

    def train(self, max_epochs: int) -> None:
        """Train up to ``max_epochs``, those of earlier starts among them."""
        if self.epochs_run >= max_epochs and dist.get_rank() == 0:
            print(f"{self.path.parent} is finished: delete it to train anew", flush=True)
        for epoch in range(self.epochs_run, max_epochs):
            self._run_epoch(epoch)
            self.epochs_run = epoch + 1
            if self.epochs_run % self.save_every == 0 or self.epochs_run == max_epochs:
                self._save_snapshot()


def train(max_epochs: int, save_every: int, global_batch: int, folder: str) -> None:
    """Train on all ranks; each calls this."""
    device = ddp_setup()
    try:
        dataset, model, optimizer = load_train_objs()
        train_data = prepare_dataloader(dataset, global_batch // dist.get_world_size())
        path = Path(folder) / "snapshot.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        trainer = Trainer(model, train_data, optimizer, device=device, save_every=save_every, path=path)
        trainer.train(max_epochs)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    launch_or_call(train, folder="torch-only-run")
