"""Train a small GPT on the source of Python's standard library, on one process or many, and let it write some.

A plain loop with rankwise's parts; train_trainer.py is the same training by the Trainer. All of these work:

    rankwise run --nproc-per-node 2 examples/gpt/train.py
    torchrun --standalone --nproc-per-node 2 examples/gpt/train.py
    python examples/gpt/train.py

Kill it whenever you like, with -9 too, and start the same command again, with another number of ranks if you like: it goes
on at the step that was saved last, and makes the steps that it would have made. SIGTERM and SIGUSR1 make it save first.

The commands share the folder gpt-run: when the training is finished, delete it to train anew. To the other form, give another --folder.
"""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import TYPE_CHECKING

import torch
from data import IGNORED, load_windows
from model import GPT, generate, make_optimizer, sum_loss
from options import parse_arguments, scale_lr
from spread import MESHES, spread_model, spread_optimizer

import rankwise
from rankwise import checkpoint
from rankwise.data.metrics import Perplexity

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import nn

    Autocast = Callable[[], AbstractContextManager[None]]


def make_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: rankwise.Step,
    track: rankwise.train.Track,
    *,
    autocast: Autocast,
) -> None:
    """Make one optimizer step, over all micro-batches and all ranks.

    Collective: every rank must call this.
    """
    micro_batches = list(step)
    # Windows differ in their number of tokens: the mean over all tokens of all ranks needs their number first.
    num_tokens = sum((targets_BS != IGNORED).sum() for _, targets_BS in micro_batches)
    scale = rankwise.loss_scale(num_tokens)
    for micro_batch in rankwise.accumulate(model, micro_batches):
        with autocast():
            loss_sum, count = sum_loss(model, micro_batch)
        (loss_sum * scale).backward()
        track.add(loss_sum, count)
    norm = rankwise.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    track.step(step, grad_norm=norm)


def main() -> None:
    """Train, evaluate, save, and write some text."""
    args = parse_arguments(__doc__)
    with rankwise.init(device=args.device, mesh=MESHES[args.spread]) as ctx:
        ctx.listen_for_stop()
        train_windows, held_out = load_windows(args.size.context, file=args.text, num_held_out=args.held_out)
        # Nothing random happens when a window is read, so nothing has to be seeded for it.
        loader = rankwise.DataLoader(train_windows, global_batch=args.global_batch, micro_batch=args.micro_batch,
                                     seed=args.seed, drop_last=True, sample_seeds=False)  # fmt: skip
        torch.manual_seed(args.seed)
        gpt = GPT(args.size)
        model = spread_model(gpt, args.spread)
        if args.compile:
            gpt.compile()  # in place: names in checkpoints stay as they are
        optimizer = spread_optimizer(make_optimizer(model, lr=args.lr), args.spread)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(scale_lr, num_steps=args.steps))
        track = rankwise.train.Track(loader, optimizer, steps=args.steps, model=model, folder=args.folder,
                                     settings={"precision": args.precision})  # fmt: skip
        state = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader, "track": track}  # fmt: skip
        goes_on = checkpoint.load(args.folder, state) is not None
        if track.steps_done >= args.steps:
            ctx.print(f"{args.folder} is finished: delete it to train anew")
        autocast = partial(torch.autocast, ctx.device.type, torch.bfloat16, enabled=args.precision == "bf16")
        with track:
            while track.steps_done < args.steps:
                for step in loader.steps():
                    make_step(model, optimizer, step, track, autocast=autocast)
                    schedule.step()
                    number = track.steps_done
                    if number == args.kill_at and not goes_on and ctx.rank == 1:
                        os.kill(os.getpid(), signal.SIGKILL)
                    is_last, stop = number == args.steps, ctx.should_stop()
                    if is_last or number % args.every == 0:
                        start_s = time.perf_counter()
                        with autocast():
                            found = rankwise.evaluate(model, held_out, {"perplexity": Perplexity()}, batch_size=32)  # fmt: skip
                        track.evaluated(found, seconds=time.perf_counter() - start_s)
                    if is_last or stop or number % args.every == 0:
                        checkpoint.save(args.folder, state, step=number, keep=checkpoint.Keep(last=2))
                    if is_last:
                        break
                    if stop:
                        track.end(str(ctx.stop_reason), is_over=False)
                        ctx.leave_for_requeue()
        if args.write:  # on all ranks: the forward of a model in parts takes them all
            ctx.print(generate(gpt, args.prompt, num_bytes=args.write))


if __name__ == "__main__":
    main()
