"""The options of both forms of the GPT example, and what follows from them."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path

from model import SIZES, Size
from spread import MESHES


def parse_arguments(description: str | None) -> argparse.Namespace:
    """Read the command line; ``size`` becomes a ``Size``."""

    def positive(text: str) -> int:
        if (value := int(text)) < 1:
            raise argparse.ArgumentTypeError(f"{value} is below 1")
        return value

    parser = argparse.ArgumentParser(description=description and description.splitlines()[0])
    parser.add_argument("--size", choices=sorted(SIZES), default="small", help="where the four below begin")
    for name in ("layers", "width", "heads", "context"):
        parser.add_argument(f"--{name}", type=positive, help="in place of the size's own")
    parser.add_argument("--lr", type=float, help="highest learning rate; by default 4e-3 for small, else 6e-4")
    parser.add_argument("--steps", type=positive, default=3000, help="optimizer steps of the whole training")
    parser.add_argument("--global-batch", type=positive, default=16, help="windows a step, over all ranks")
    parser.add_argument("--micro-batch", type=positive, help="windows of one forward pass of a rank, at most")
    parser.add_argument("--spread", choices=sorted(MESHES), default="ddp", help="over the ranks; see spread.py")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--compile", action="store_true", help="compile the model by torch.compile")
    parser.add_argument("--device", help='"cpu" or "cuda"; by default a GPU where there is one')
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and of the order")
    parser.add_argument("--text", type=Path, help="a file to learn; by default Python's standard library")
    parser.add_argument("--folder", default="gpt-run", help="where checkpoints and the journal go")
    parser.add_argument("--every", type=positive, default=500, help="steps between two evaluations and saves")
    parser.add_argument("--held-out", type=positive, help="windows to evaluate on; by default all held out")
    parser.add_argument("--prompt", default="def ", help="what the text at the end begins with")
    parser.add_argument("--write", type=int, default=400, help="bytes of text to write at the end")
    parser.add_argument("--kill-at", type=positive, help="kill rank 1 with -9 at this step of a new training")
    args = parser.parse_args()
    args.lr = args.lr or (4e-3 if args.size == "small" else 6e-4)
    asked = {name: getattr(args, name) for name in ("layers", "width", "heads", "context")}
    args.size = replace(SIZES[args.size], **{name: value for name, value in asked.items() if value})
    _check(parser, args.size)
    return args


def _check(parser: argparse.ArgumentParser, size: Size) -> None:
    if size.width % size.heads:
        parser.error(f"--width {size.width} does not divide by --heads {size.heads}")


def scale_lr(step: int, num_steps: int) -> float:
    """Return the part of the highest learning rate for a step: up in the first twentieth, then down along a cosine."""
    warmup = max(1, num_steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, num_steps - warmup)))
