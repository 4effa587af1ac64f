"""Train a small GPT on the source of Python's standard library, on one process or many, and let it write some.

The same training as train.py, by the Trainer: what is left is what makes it this training and no other. All of these work:

    rankwise run --nproc-per-node 2 examples/gpt/train_trainer.py
    torchrun --standalone --nproc-per-node 2 examples/gpt/train_trainer.py
    python examples/gpt/train_trainer.py

`--spread fsdp` and others cut a model that does not fit on one device (spread.py); a training goes on with another one, too.

Kill it whenever you like, with -9 too, and start the same command again, with another number of ranks if you like.

The commands share the folder gpt-run: when the training is finished, delete it to train anew. To the other form, give another --folder.
"""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import TYPE_CHECKING, final

import torch
from data import load_windows
from model import GPT, generate, make_optimizer, sum_loss
from options import parse_arguments, scale_lr
from spread import MESHES, spread_model, spread_optimizer

import rankwise
from rankwise import checkpoint
from rankwise.data.metrics import Perplexity
from rankwise.train import Callback, Evaluation

if TYPE_CHECKING:
    from rankwise.train import Started


@final
class Kill(Callback):
    """Kill rank 1 with -9 in the middle of a new training, to see that nothing is lost by it.

    Args:
        at_step: After which step; None: never.
    """

    def __init__(self, at_step: int | None) -> None:
        self.at_step, self.is_armed = at_step, False

    def on_start(self, trainer: rankwise.Trainer, started: Started) -> None:
        """Leave all others alone, and a training that goes on."""
        self.is_armed = trainer.ctx.rank == 1 and started.step == 0

    def on_step(self, trainer: rankwise.Trainer, step: int) -> None:  # noqa: ARG002 - as the Trainer calls it
        """Kill, if it is time."""
        if self.is_armed and step == self.at_step:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Train, evaluate, save, and write some text."""
    args = parse_arguments(__doc__)
    with rankwise.init(device=args.device, mesh=MESHES[args.spread]) as ctx:
        train_windows, held_out = load_windows(args.size.context, file=args.text, num_held_out=args.held_out)
        loader = rankwise.DataLoader(train_windows, global_batch=args.global_batch, micro_batch=args.micro_batch,
                                     seed=args.seed, drop_last=True, sample_seeds=False)  # fmt: skip
        torch.manual_seed(args.seed)
        model = spread_model(GPT(args.size), args.spread)
        optimizer = spread_optimizer(make_optimizer(model, lr=args.lr), args.spread)
        trainer = rankwise.Trainer(
            model,
            optimizer,
            loader,
            sum_loss,
            config=rankwise.TrainerConfig(
                steps=args.steps,
                precision=args.precision,
                compile=args.compile,
                clip_norm=1.0,
                seed=args.seed,
                evaluate_every=args.every,
                save_every=args.every,
            ),
            folder=args.folder,
            scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, partial(scale_lr, num_steps=args.steps)),
            evaluation=Evaluation(held_out, {"perplexity": Perplexity()}, batch_size=32),
            callbacks=[Kill(args.kill_at)],
        )
        before = checkpoint.latest(args.folder)
        trainer.fit()
        if checkpoint.latest(args.folder) == before:  # nothing was left to do
            ctx.print(f"{args.folder} is finished: delete it to train anew")
        if args.write:  # on all ranks: the forward of a model in parts takes them all
            ctx.print(generate(trainer.model, args.prompt, num_bytes=args.write))


if __name__ == "__main__":
    main()
