"""Train a network with BatchNorm to read handwritten digits; the number of processes changes nothing but the time.

A plain loop with rankwise's parts; batchnorm_trainer.py is the same training by the Trainer. All of these end with the same
accuracy, up to rounding:

    rankwise run --nproc-per-node 2 examples/digits/batchnorm.py
    torchrun --standalone --nproc-per-node 2 examples/digits/batchnorm.py
    python examples/digits/batchnorm.py

For that, a step holds the same samples on any number of ranks, BatchNorm sees those of all ranks, and each held-out digit
is counted once. The best checkpoint is kept, and the training stops when nothing gets better any more.
The commands share the folder batchnorm-run: when the training is finished, delete it to train anew. To the other form, give
another --folder.
"""

# Shape letters: B batch, C channel, H row, W column.

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from train import load_digits

import rankwise
from rankwise import checkpoint
from rankwise.data.metrics import Accuracy, Mean

METRICS = {
    "accuracy": Accuracy(),
    "loss": Mean(lambda scores_BC, labels_B: cross_entropy(scores_BC, labels_B, reduction="none")),
}


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a digit classifier with BatchNorm.")
    parser.add_argument("--epochs", type=int, default=20, help="at most")
    parser.add_argument("--global-batch", type=int, default=48, help="samples a step, over all ranks together")
    parser.add_argument("--micro-batch", type=int, help="samples of one forward pass of a rank, at most")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--patience", type=int, default=3, help="stop after so many epochs without a better loss")
    parser.add_argument("--folder", default="batchnorm-run", help="where checkpoints and the journal go")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and of the order")
    return parser.parse_args()


def build_model() -> nn.Module:
    """Return an untrained network: two convolutions, each with BatchNorm, then a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def main() -> None:
    """Train until the held-out digits are read no better, and say how well the best checkpoint reads them."""
    args = parse_arguments()
    with rankwise.init() as ctx:
        train_digits, held_out = load_digits()
        loader = rankwise.DataLoader(
            train_digits, global_batch=args.global_batch, micro_batch=args.micro_batch, seed=args.seed
        )
        torch.manual_seed(args.seed)
        model = rankwise.apply_ddp(build_model(), sync_batchnorm=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
        track = rankwise.train.Track(loader, optimizer, epochs=args.epochs, model=model, folder=args.folder)
        state = {"model": model, "optimizer": optimizer, "loader": loader, "track": track,
                 "best": float("inf"), "best_step": 0, "epochs_without_better": 0}  # fmt: skip
        loaded = checkpoint.load(args.folder, state)  # goes on where the last start was stopped
        keep = checkpoint.Keep(last=1, best=1, metric="loss")
        with track:
            for _ in loader.epochs(args.epochs):
                # A loaded state may be that of the end of a training that had stopped early.
                if state["epochs_without_better"] >= args.patience:
                    break
                for step in loader.steps():
                    for images_BCHW, labels_B in rankwise.accumulate(model, step):
                        loss = cross_entropy(model(images_BCHW), labels_B, reduction="sum") * step.scale
                        loss.backward()
                        track.add(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    track.step(step)
                start_s = time.perf_counter()
                found = rankwise.evaluate(model, held_out, METRICS, batch_size=64)
                # Equal on all ranks, so all of them decide the same.
                is_better = found["loss"] < state["best"]
                if is_better:
                    state.update(best=found["loss"], best_step=track.steps_done, epochs_without_better=0)
                else:
                    state["epochs_without_better"] += 1
                track.evaluated(found, seconds=time.perf_counter() - start_s, is_best=is_better)
                checkpoint.save(args.folder, state, step=track.steps_done, keep=keep, metrics=found)
        if track.steps_done == loaded:
            ctx.print(f"{args.folder} is finished: delete it to train anew")
        checkpoint.load(args.folder, {"model": model}, step=state["best_step"])
        found = rankwise.evaluate(model, held_out, METRICS, batch_size=64)
        ctx.print(f"best after step {state['best_step']}: accuracy {found['accuracy']:.4f}, loss {found['loss']:.4f}")


if __name__ == "__main__":
    main()
