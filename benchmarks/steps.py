"""What a training step costs with our parts, and by hand: both in the same ranks, in turn, on this machine.

The jobs, each on `--ranks` ranks over Gloo on the CPU, with a model of four layers (34 KiB of gradients):

- `step`: forward, backward, optimizer; `apply_ddp` and torch's DistributedDataParallel with the same options;
- `accumulation`: four micro-batches a step; `accumulate` and `no_sync` around all but the last;
- `weighed`: a step whose loss is weighed by the samples of all ranks; `loss_scale` and an all_reduce of the number.

Which of the two models is built first may make a difference, even between equals; so half of the rounds are of either
order. A round is a block of steps by hand, two of ours, and one by hand, so that a drift of the machine falls on both.
Of each round the ratio of ours to by hand is taken, of wall time and of the ranks' CPU time; printed are the medians,
and the median ratio with its 95 % confidence bounds (order statistics of the rounds' ratios: no assumption of how they
are spread). The aim: 1.01 at most.

Run it as `python benchmarks/steps.py [--rounds N] [--steps N] [--ranks N] [--hidden N] [--only JOB ...]`; the machine should be idle.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import rankwise
from rankwise.parallel.accumulation import accumulate, loss_scale
from rankwise.parallel.ddp import apply_ddp
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Short blocks in turn: the load of the machine drifts slower than that.
ROUNDS, STEPS = 400, 4
NUM_MICRO = 4
JOBS = ("step", "accumulation", "weighed")
AIM = 1.01


def build_model(hidden: int) -> nn.Module:
    """Build the model: small, so that what a step costs besides arithmetic is seen."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, hidden),
        nn.Tanh(),
        nn.Linear(hidden, hidden),
        nn.Tanh(),
        nn.Linear(hidden, 32),
        nn.Linear(32, 8),
    )


def build_steps(job: str, ours_first: bool, hidden: int) -> tuple[Callable[[], None], Callable[[], None]]:  # noqa: FBT001 - by position, as run_ranks passes it
    """Return a step of ours and one by hand."""
    ours = apply_ddp(build_model(hidden)) if ours_first else None
    by_hand = DistributedDataParallel(build_model(hidden), gradient_as_bucket_view=True)
    ours = apply_ddp(build_model(hidden)) if ours is None else ours
    our_optimizer, their_optimizer = (torch.optim.SGD(model.parameters(), lr=1e-3) for model in (ours, by_hand))
    x, y = torch.randn(16, 32), torch.randn(16, 8)
    micro_batches = [(x, y)] * NUM_MICRO

    def backward(model: nn.Module, x: Tensor, y: Tensor, scale: float) -> None:
        (mse_loss(model(x), y, reduction="sum") * scale).backward()

    def step_ours() -> None:
        our_optimizer.zero_grad()
        if job == "accumulation":
            for micro_x, micro_y in accumulate(ours, micro_batches):
                backward(ours, micro_x, micro_y, 0.01)
        else:
            backward(ours, x, y, loss_scale(len(x)) if job == "weighed" else 0.01)
        our_optimizer.step()

    def step_by_hand() -> None:
        their_optimizer.zero_grad()
        if job == "accumulation":
            for micro_x, micro_y in micro_batches[:-1]:
                with by_hand.no_sync():
                    backward(by_hand, micro_x, micro_y, 0.01)
            backward(by_hand, *micro_batches[-1], 0.01)
        elif job == "weighed":
            total = torch.tensor(len(x))
            dist.all_reduce(total)
            backward(by_hand, x, y, dist.get_world_size() / int(total))
        else:
            backward(by_hand, x, y, 0.01)
        their_optimizer.step()

    return step_ours, step_by_hand


def measure(job: str, ours_first: bool, hidden: int, rounds: int, steps: int) -> list[tuple[float, ...]]:  # noqa: FBT001 - the same
    """In a rank: return wall and CPU seconds of a step for each round, ours and then by hand."""
    with rankwise.init(device="cpu"):
        torch.set_num_threads(1)
        ours, by_hand = build_steps(job, ours_first, hidden)

        def run(step: Callable[[], None]) -> tuple[float, float]:
            dist.barrier()
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            for _ in range(steps):
                step()
            return time.perf_counter() - wall_s, time.process_time() - cpu_s

        for step in (ours, by_hand, ours, by_hand):
            run(step)
        gc.disable()
        found = []
        for number in range(rounds):
            outer, inner = (by_hand, ours) if number % 2 else (ours, by_hand)
            first, second, third, fourth = run(outer), run(inner), run(inner), run(outer)
            wall, cpu = ((a + d, b + c) for a, b, c, d in zip(first, second, third, fourth, strict=True))
            of_ours, of_hand = (1, 0) if number % 2 else (0, 1)
            found.append(tuple(each / 2 / steps for each in (wall[of_ours], wall[of_hand], cpu[of_ours], cpu[of_hand])))
        gc.enable()
        return found


def bound_median(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and its 95 % confidence bounds, by the binomial distribution of the ranks below it."""
    ordered, number = sorted(values), len(values)
    reach = math.ceil(0.98 * math.sqrt(number))  # 1.96 standard deviations, each sqrt(n) / 2
    low, high = max(0, number // 2 - reach), min(number - 1, (number - 1) // 2 + reach)
    return statistics.median(ordered), ordered[low], ordered[high]


def main() -> None:
    """Measure all jobs and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of a block")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64, help="width of the model")
    parser.add_argument("--only", nargs="+", choices=JOBS, default=JOBS)
    arguments = parser.parse_args()
    print(
        f"torch {torch.__version__}, {arguments.ranks} ranks, {arguments.rounds} rounds of 4 x {arguments.steps} steps; aim <= {AIM}"
    )
    print(f"{'job':14}{'time':8}{'ours':>10}{'by hand':>10}{'ratio':>8}  95 % bounds")
    for job in arguments.only:
        rounds = []
        for ours_first in (True, False):
            ranks = run_ranks(
                measure,
                arguments.ranks,
                job,
                ours_first,
                arguments.hidden,
                arguments.rounds // 2,
                arguments.steps,
                timeout_s=600.0,
            )
            # The mean of the ranks: they run in step.
            rounds += [
                [statistics.fmean(values) for values in zip(*same, strict=True)] for same in zip(*ranks, strict=True)
            ]
        for kind, ours, by_hand in (("wall", 0, 1), ("CPU", 2, 3)):
            ratio, low, high = bound_median([each[ours] / each[by_hand] for each in rounds])
            medians = [statistics.median(each[column] for each in rounds) * 1e6 for column in (ours, by_hand)]
            print(f"{job:14}{kind:8}{medians[0]:7.0f} us{medians[1]:7.0f} us{ratio:8.3f}  {low:.3f} to {high:.3f}")


if __name__ == "__main__":
    main()
