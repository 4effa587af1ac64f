"""A first training on several processes: the loop, its checkpoints and its logs are the Trainer's.

Launch it by command or by function; without a launcher it is a job of one process:

    rankwise run --nproc-per-node 4 examples/tutorial/with_trainer.py
    python examples/tutorial/with_trainer.py --nprocs 4
    python examples/tutorial/with_trainer.py

All three come to the same losses, up to rounding. They share the folder with-trainer-run: start one again and it goes on where the last
one saved; when the training is finished, delete it to train anew.
"""

# Shape letters: B batch, F features.

from __future__ import annotations

from typing import TYPE_CHECKING

from task import launch_or_call, load_train_objs
from torch.nn.functional import mse_loss

import rankwise
from rankwise import checkpoint

if TYPE_CHECKING:
    from torch import Tensor, nn


def measure_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean loss of a batch."""
    inputs_BF, targets_B1 = batch
    return mse_loss(model(inputs_BF), targets_B1)


def train(max_epochs: int, save_every: int, global_batch: int, folder: str) -> None:
    """Train on all ranks; each calls this."""
    with rankwise.init() as ctx:
        dataset, model, optimizer = load_train_objs()
        loader = rankwise.DataLoader(dataset, global_batch=global_batch)
        config = rankwise.TrainerConfig(epochs=max_epochs, save_every=save_every * len(loader))
        trainer = rankwise.Trainer(model, optimizer, loader, measure_loss, config=config, folder=folder)
        before = checkpoint.latest(folder)
        ended = trainer.fit()
        if checkpoint.latest(folder) == before:  # nothing was left to do
            ctx.print(f"{folder} is finished: delete it to train anew")
        ctx.print(f"{ended.reason} after step {ended.step}: see {folder}/steps.csv and {folder}/curves.svg")


if __name__ == "__main__":
    launch_or_call(train, folder="with-trainer-run")
