"""What the three scripts of the tutorial share: data, model, optimizer, and the two ways to launch them."""

# Shape letters: N samples, F features.

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import rankwise

if TYPE_CHECKING:
    from collections.abc import Callable


def load_train_objs() -> tuple[Dataset[tuple[Tensor, ...]], nn.Module, torch.optim.Optimizer]:
    """Return 2048 samples, a linear model and its optimizer; the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    inputs_NF = torch.rand(2048, 20, generator=generator)
    weights_F1 = torch.rand(20, 1, generator=generator)
    noise_N1 = 0.1 * torch.randn(2048, 1, generator=generator)
    torch.manual_seed(0)
    model = nn.Linear(20, 1)
    # One number is to be learned, so the loss is a squared error: cross-entropy over one class is always 0.
    return (
        TensorDataset(inputs_NF, inputs_NF @ weights_F1 + noise_N1),
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
    )


def launch_or_call(train: Callable[..., None], *, folder: str) -> None:
    """Read the command line, and call ``train`` here, or on ``--nprocs`` ranks that are started for it.

    Args:
        train: Takes epochs, epochs between two saves, the global batch and a folder.
        folder: Where it saves, if the command line says nothing.
    """
    parser = argparse.ArgumentParser(description="Train a linear model on random samples.")
    parser.add_argument("--max-epochs", type=int, default=10, help="epochs of the whole training")
    parser.add_argument("--save-every", type=int, default=2, help="epochs between two checkpoints")
    parser.add_argument("--global-batch", type=int, default=128, help="samples a step over all ranks: 32 x 4")
    parser.add_argument("--folder", default=folder)
    parser.add_argument("--nprocs", type=int, help="start so many ranks; without: be one that a launcher has started")
    args = parser.parse_args()
    options = (args.max_epochs, args.save_every, args.global_batch, args.folder)
    if args.nprocs:
        rankwise.launch(train, *options, nprocs=args.nprocs)
    else:
        train(*options)
