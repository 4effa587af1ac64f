"""Train a network with BatchNorm to read handwritten digits; the number of processes changes nothing but the time.

The same training as batchnorm.py, by the Trainer. All of these end with the same accuracy, up to rounding:

    rankwise run --nproc-per-node 2 examples/digits/batchnorm_trainer.py
    torchrun --standalone --nproc-per-node 2 examples/digits/batchnorm_trainer.py
    python examples/digits/batchnorm_trainer.py

They share the folder batchnorm-run: when the training is finished, delete it to train anew. To the other form, give another
--folder.
"""

# Shape letters: B batch, C channel, H row, W column.

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from batchnorm import METRICS, build_model, parse_arguments
from torch.nn.functional import cross_entropy
from train import load_digits

import rankwise
from rankwise import checkpoint
from rankwise.train import Evaluation

if TYPE_CHECKING:
    from torch import Tensor, nn


def measure_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean loss of a batch."""
    images_BCHW, labels_B = batch
    return cross_entropy(model(images_BCHW), labels_B)


def main() -> None:
    """Train until the held-out digits are read no better, and say how well the best checkpoint reads them."""
    args = parse_arguments()
    with rankwise.init() as ctx:
        train_digits, held_out = load_digits()
        loader = rankwise.DataLoader(
            train_digits, global_batch=args.global_batch, micro_batch=args.micro_batch, seed=args.seed
        )
        torch.manual_seed(args.seed)
        model = build_model()
        config = rankwise.TrainerConfig(
            epochs=args.epochs, sync_batchnorm=True, seed=args.seed, monitor="loss", patience=args.patience
        )
        trainer = rankwise.Trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9),
            loader,
            measure_loss,
            config=config,
            folder=args.folder,
            evaluation=Evaluation(held_out, METRICS, batch_size=64),
        )
        before = checkpoint.latest(args.folder)
        trainer.fit()
        if checkpoint.latest(args.folder) == before:  # nothing was left to do
            ctx.print(f"{args.folder} is finished: delete it to train anew")
        checkpoint.load(args.folder, {"model": model}, step=trainer.best.step)
        found = rankwise.evaluate(model, held_out, METRICS, batch_size=64)
        ctx.print(f"best after step {trainer.best.step}: accuracy {found['accuracy']:.4f}, loss {found['loss']:.4f}")


if __name__ == "__main__":
    main()
