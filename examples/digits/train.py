"""Train a small network to read handwritten digits, on one process or on many.

An ordinary PyTorch script: nothing in it knows what launched it. All of these work:

    rankwise run --nproc-per-node 2 examples/digits/train.py
    torchrun --standalone --nproc-per-node 2 examples/digits/train.py
    python examples/digits/train.py

Every process (*rank*) holds a copy of the model and reads its own share of the samples; DistributedDataParallel
(DDP) averages the gradients, so that all copies stay equal. The data are described in DATA.md.
"""

# Shape letters: B batch, C channel, H row, W column.

from __future__ import annotations

import argparse
import gzip
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset, random_split

if TYPE_CHECKING:
    from rich.progress import Progress

DATA_FILE = Path(__file__).with_name("digits.csv.gz")
SPLIT_SEED = 0  # apart from --seed, so that every run is judged on the same held-out digits


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""

    def positive(text: str) -> int:
        if (value := int(text)) < 1:
            raise argparse.ArgumentTypeError(f"{value} is below 1")
        return value

    parser = argparse.ArgumentParser(description="Train a digit classifier on one process or many.")
    parser.add_argument("--epochs", type=positive, default=20)
    parser.add_argument("--batch-size", type=positive, default=48, help="samples a step, over all ranks together")
    parser.add_argument("--lr", type=float, default=0.005, help="highest learning rate of the schedule")
    parser.add_argument("--out", type=Path, default=Path("digits-model.pt"), help="where the trained model goes")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and of the order of the samples")
    return parser.parse_args()


def join_process_group() -> torch.device:
    """Meet the other ranks and return the device that is this rank's own.

    Collective: every rank must call this before anything else that communicates.
    """
    # LOCAL_RANK counts within one machine; RANK counts over all of them and would name GPUs that do not exist.
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # NCCL refuses two ranks on one GPU: a machine with too few of them trains on its CPU.
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_world_size:
        device, backend = torch.device("cuda", local_rank), "nccl"
        torch.cuda.set_device(device)  # before any other use of CUDA, which would otherwise land on GPU 0
    else:
        device, backend = torch.device("cpu"), "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, device_id=device if backend == "nccl" else None)
    else:  # plain `python train.py`: a group of one, with no address or port that could be taken
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def load_digits() -> tuple[Subset[tuple[Tensor, ...]], Subset[tuple[Tensor, ...]]]:
    """Read the digits and hold out one fifth of them, the same on every rank.

    Returns:
        The samples to train on and the samples held out; a sample is an image of shape (1, 8, 8) and a label.
    """
    with gzip.open(DATA_FILE, "rt") as lines:
        table = torch.tensor([[int(cell) for cell in line.split(",")] for line in lines])
    images_BCHW = table[:, :64].reshape(-1, 1, 8, 8) / 16
    samples = TensorDataset(images_BCHW, table[:, 64])
    train, held_out = random_split(samples, [0.8, 0.2], generator=torch.Generator().manual_seed(SPLIT_SEED))
    return train, held_out


def build_model() -> nn.Module:
    """Return an untrained network: two convolutions, then two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def make_bar(num_steps: int) -> Progress | None:
    """Return a progress bar for rank 0's terminal, or None where plain lines serve better."""
    if dist.get_rank() != 0 or not (sys.stdout.isatty() and sys.stderr.isatty()):
        return None
    try:
        from rich.console import Console  # noqa: PLC0415 - the bar is a comfort; the script runs without rich
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415
    except ImportError:
        return None
    fields = TextColumn("{task.fields[facts]}")
    bar = Progress(TextColumn("training"), BarColumn(), fields, TimeElapsedColumn(), console=Console(stderr=True))
    bar.add_task("training", total=num_steps, facts="")
    return bar


def train(model: DistributedDataParallel, samples: Subset[tuple[Tensor, ...]], args: argparse.Namespace) -> None:
    """Fit the model; rank 0 shows the mean loss over all ranks and how many samples they read a second.

    Collective: every rank must call this.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = next(model.parameters()).device
    # The sampler deals samples out like cards: together, the ranks' batches are what one process would see.
    batch_size = max(1, round(args.batch_size / world_size))
    used = batch_size * world_size
    if rank == 0 and used != args.batch_size:
        print(f"batch size {args.batch_size} does not divide by {world_size} ranks: {used} instead")
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(samples, shuffle=True, seed=args.seed)
    loader = DataLoader(samples, batch_size=batch_size, sampler=sampler, pin_memory=device.type == "cuda")
    num_steps = args.epochs * len(loader)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.lr, total_steps=num_steps)
    loss_function = nn.CrossEntropyLoss()

    bar = make_bar(num_steps)
    with bar or nullcontext():
        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)  # without it every epoch has the same order
            start_s = time.perf_counter()
            loss_sum_and_count = torch.zeros(2, dtype=torch.float64, device=device)
            for images_BCHW, labels_B in loader:
                loss = loss_function(model(images_BCHW.to(device, non_blocking=True)), labels_B.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                # Sums stay on the device: loss.item() at each step would make the CPU wait for the GPU.
                loss_sum_and_count[0] += loss.detach() * len(labels_B)
                loss_sum_and_count[1] += len(labels_B)
                if bar is not None:
                    bar.advance(bar.task_ids[0])
            dist.all_reduce(loss_sum_and_count)
            loss_sum, num_samples = loss_sum_and_count.tolist()
            mean_loss, samples_per_s = loss_sum / num_samples, num_samples / (time.perf_counter() - start_s)
            facts = f"epoch {epoch + 1}/{args.epochs}  loss {mean_loss:.4f}  {samples_per_s:,.0f} samples/s"
            if bar is not None:
                bar.update(bar.task_ids[0], facts=facts)
            elif rank == 0:
                print(facts, flush=True)


def count_correct(model: nn.Module, samples: Subset[tuple[Tensor, ...]], device: torch.device) -> tuple[int, int]:
    """Count the samples that the model reads rightly, over all ranks.

    Args:
        model: The network itself, not wrapped in DDP, since the ranks may make unequally many forward passes.
        samples: The same samples, in the same order, on every rank.
        device: This rank's device.

    Returns:
        How many samples were right, and how many there were; equal on every rank.

    Collective: every rank must call this.
    """
    model.eval()
    # Not DistributedSampler: it repeats samples until all ranks have equally many; those would count twice.
    share = Subset(samples, range(dist.get_rank(), len(samples), dist.get_world_size()))
    right_and_count = torch.zeros(2, dtype=torch.int64, device=device)
    with torch.no_grad():
        for images_BCHW, labels_B in DataLoader(share, batch_size=256):
            guesses_B = model(images_BCHW.to(device)).argmax(dim=1)
            right_and_count[0] += (guesses_B == labels_B.to(device)).sum()
            right_and_count[1] += len(labels_B)
    dist.all_reduce(right_and_count)
    num_right, num_samples = right_and_count.tolist()
    return num_right, num_samples


def save(model: nn.Module, path: Path) -> None:
    """Write the model's weights so that ``path`` holds the whole old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A rename is atomic only inside one filesystem, so the temporary file sits beside the final one.
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    torch.save(model.state_dict(), temporary)
    temporary.replace(path)


def main() -> None:
    """Train, measure the accuracy on the held-out digits, and save the model."""
    args = parse_arguments()
    device = join_process_group()
    try:
        torch.manual_seed(args.seed)
        train_samples, held_out = load_digits()
        device_ids = [device.index] if device.type == "cuda" else None
        model = DistributedDataParallel(build_model().to(device), device_ids=device_ids)
        train(model, train_samples, args)
        num_right, num_held_out = count_correct(model.module, held_out, device)
        if dist.get_rank() == 0:
            print(f"accuracy {num_right / num_held_out:.4f} ({num_right} of {num_held_out} held-out digits)")
            save(model.module, args.out)  # .module: without DDP's "module." before every name
            print(f"model saved to {args.out.resolve()}", flush=True)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
