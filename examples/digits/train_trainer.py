"""Train a small network to read handwritten digits, on one process or on many.

The demo, train.py, by the Trainer: what is left is what makes it this training and no other. All of these end with the same weights, up to
rounding, and go on where they were stopped:

    rankwise run --nproc-per-node 2 examples/digits/train_trainer.py
    torchrun --standalone --nproc-per-node 2 examples/digits/train_trainer.py
    python examples/digits/train_trainer.py

They share the folder digits-run: when the training is finished, delete it to train anew.
"""

# Shape letters: B batch, C channel, H row, W column.

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import cross_entropy
from train import build_model, load_digits

import rankwise
from rankwise import checkpoint
from rankwise.data.metrics import Accuracy
from rankwise.train import Evaluation

if TYPE_CHECKING:
    from torch import Tensor, nn


def measure_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean loss of a batch."""
    images_BCHW, labels_B = batch
    return cross_entropy(model(images_BCHW), labels_B)


def main() -> None:
    """Train, and measure the accuracy on the held-out digits."""
    parser = argparse.ArgumentParser(description="Train a digit classifier by the Trainer.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=48, help="samples a step, over all ranks together")
    parser.add_argument("--lr", type=float, default=0.005, help="highest learning rate of the schedule")
    parser.add_argument("--folder", default="digits-run", help="where checkpoints and logs go")
    args = parser.parse_args()
    with rankwise.init() as ctx:
        train_digits, held_out = load_digits()
        loader = rankwise.DataLoader(train_digits, global_batch=args.batch_size)
        torch.manual_seed(0)
        model = build_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        num_steps = args.epochs * len(loader)
        trainer = rankwise.Trainer(
            model,
            optimizer,
            loader,
            measure_loss,
            config=rankwise.TrainerConfig(epochs=args.epochs),
            folder=args.folder,
            scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.lr, total_steps=num_steps),
            evaluation=Evaluation(held_out, {"accuracy": Accuracy()}, batch_size=256),
        )
        before = checkpoint.latest(args.folder)
        trainer.fit()
        if checkpoint.latest(args.folder) == before:  # nothing was left to do
            ctx.print(f"{args.folder} is finished: delete it to train anew")
        ctx.print(f"accuracy {trainer.metrics['accuracy']:.4f} ({len(held_out)} held-out digits)")


if __name__ == "__main__":
    main()
