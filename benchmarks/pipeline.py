"""What a step of a pipeline costs with `apply_pipeline` and by hand, and how near its bubble comes to the schedule's own.

- `step`: forward and backward of a batch over the stages of `--ranks` ranks by 1F1B, GPipe and the interleaved schedule: ours
  beside torch's `PipelineStage` and schedule with the same cut, loss and number of micro-batches, in the same ranks, in turns. Ours also
  compares the stages' batches and gives the loss to all ranks. The aim: 1.02 at most.
- `bubble`: stages whose blocks sleep instead of computing, so that as many cores as ranks are not needed: what a profile measures
  beside the formula (p - 1) / (m + p - 1), for GPipe and 1F1B. The aim: within 10 %.

Where the cut lies is measured by `automatic_cut.py`. Run it as `python benchmarks/pipeline.py [--rounds N] [--ranks N] [--width N ...]`; the
machine should be idle.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.nn.functional import mse_loss

import rankwise
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH, MICROBATCHES, BLOCKS, STEPS = 256, 8, 8, 4
SCHEDULES = {"1f1b": "Schedule1F1B", "gpipe": "ScheduleGPipe", "interleaved_1f1b": "ScheduleInterleaved1F1B"}
SLEEP_S = 0.04


def build_model(width: int) -> nn.Sequential:
    """Build blocks of equal cost."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(BLOCKS)))


def build_by_hand(width: int, name: str, x: Tensor, y: Tensor) -> Callable[[], None]:
    """Return a step of torch's own schedule."""
    rank, size = dist.get_rank(), dist.get_world_size()
    per_rank = 2 if name == "ScheduleInterleaved1F1B" else 1
    each = BLOCKS // (size * per_rank)
    model, device = build_model(width), torch.device("cpu")
    numbers = range(rank, size * per_rank, size)
    stages = [
        pipelining.PipelineStage(model[number * each : (number + 1) * each], number, size * per_rank, device)
        for number in numbers
    ]
    held: Any = stages if per_rank > 1 else stages[0]
    schedule = getattr(pipelining, name)(held, MICROBATCHES, loss_fn=mse_loss)

    def step() -> None:
        for stage in stages:
            stage.submod.zero_grad()
        schedule.step(*((x,) if rank == 0 else ()), target=y if stages[-1].is_last else None)

    return step


def build_ours(width: int, name: str, x: Tensor, y: Tensor) -> Callable[[], None]:
    """Return a step of ours."""
    pipe = rankwise.apply_pipeline(
        build_model(width),
        schedule=name,
        microbatches=MICROBATCHES,
        loss=lambda model, batch: mse_loss(model(batch[0]), batch[1]),
    )

    def step() -> None:
        pipe.zero_grad()
        pipe.step((x, y))

    return step


def measure(name: str, width: int, rounds: int) -> list[tuple[float, float]]:
    """In a rank: return the seconds of a step for each round, ours and by hand."""
    torch.set_num_threads(1)
    with rankwise.init(device="cpu"):
        x, y = torch.randn(BATCH, width), torch.randn(BATCH, width)
        ours, by_hand = build_ours(width, name, x, y), build_by_hand(width, SCHEDULES[name], x, y)

        def run(step: Callable[[], None]) -> float:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(STEPS):
                step()
            return (time.perf_counter() - start) / STEPS

        for step in (ours, by_hand, ours, by_hand):
            run(step)
        found = []
        for number in range(rounds):
            pair = (ours, by_hand) if number % 2 else (by_hand, ours)
            first, second, third, fourth = run(pair[0]), run(pair[1]), run(pair[1]), run(pair[0])
            outer, inner = (first + fourth) / 2, (second + third) / 2
            found.append((outer, inner) if number % 2 else (inner, outer))
        return found


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004 - autograd's signature
        time.sleep(SLEEP_S)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004 - autograd's signature
        time.sleep(2 * SLEEP_S)
        return gradient


class Sleeper(nn.Module):  # type: ignore[misc]
    """A layer that takes as long on any machine."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        """Sleep, and compute a little."""
        return _Sleep.apply(self.linear(x))


def measure_bubble(name: str, microbatches: int) -> tuple[float, float]:
    """In a rank: return the bubble that was measured, and the schedule's own."""
    torch.set_num_threads(1)
    with rankwise.init(device="cpu") as ctx:
        model = nn.Sequential(*(Sleeper() for _ in range(ctx.world_size)))
        pipe = rankwise.apply_pipeline(
            model, schedule=name, microbatches=microbatches, loss=lambda model, x: model(x).sum()
        )
        x = torch.randn(microbatches, 4)
        pipe.step(x)
        with pipe.profile() as profile:
            for _ in range(5):
                pipe.step(x)
        return profile.bubble, profile.schedule_bubble


def main() -> None:
    """Measure and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--width",
        type=int,
        nargs="+",
        default=(256, 1024),
        help="small: what a step costs besides arithmetic",
    )
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {arguments.ranks} ranks, {arguments.rounds} rounds of 4 x {STEPS} steps; aim <= 1.02")  # fmt: skip
    print(f"{'step, width':26}{'ours':>10}{'by hand':>10}{'ratio':>8}")
    for width, name in ((width, name) for width in arguments.width for name in SCHEDULES):
        ranks = run_ranks(measure, arguments.ranks, name, width, arguments.rounds, timeout_s=600.0)
        rounds = [[statistics.fmean(values) for values in zip(*same, strict=True)] for same in zip(*ranks, strict=True)]
        ours, by_hand = (statistics.median(each[column] for each in rounds) * 1e3 for column in (0, 1))
        ratio = statistics.median(one / other for one, other in rounds)
        print(f"{f'{name}, {width}':26}{ours:7.2f} ms{by_hand:7.2f} ms{ratio:8.3f}")
    print(f"\n{'bubble':20}{'measured':>10}{'formula':>10}{'ratio':>8}   aim: 0.90 to 1.10")
    for name in ("gpipe", "1f1b"):
        for size in (2, 4):
            ((bubble, _), *_) = run_ranks(measure_bubble, size, name, MICROBATCHES, timeout_s=120.0)
            formula = (size - 1) / (MICROBATCHES + size - 1)
            print(f"{name + f', {size} stages':20}{bubble:10.3f}{formula:10.3f}{bubble / formula:8.3f}")


if __name__ == "__main__":
    main()
