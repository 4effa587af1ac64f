"""How close the automatic cut of a model with uneven layers comes to the best of all cuts, timed.

Ten layers of very different widths are cut into three parts. Ours is the cut by the times that `measure_costs` has measured layer by layer,
in a single pass. The peer tries all 36: each part of each cut is run as a whole, forward and backward, many times in turns, and the
shortest time counts. A cut is as slow as its slowest part. The aim: at most 1.05 times the best.

    python benchmarks/automatic_cut.py [--rounds N]

The machine should be idle.
"""

from __future__ import annotations

import argparse
import time
from itertools import combinations, pairwise

import torch
from torch import Tensor, nn

from rankwise.parallel.costs import measure_costs
from rankwise.parallel.partition import balance

WIDTHS = (64, 768, 256, 1024, 128, 128, 1280, 320, 896, 64, 512)
BATCH, NUM_PARTS = 256, 3


def run(part: nn.Module, x: Tensor, *, is_first: bool) -> float:
    """Return the seconds of forward and backward; the first part's inputs need no gradients."""
    x = x.detach().requires_grad_(not is_first)
    begin = time.perf_counter()
    outputs = part(x)
    inputs = [*part.parameters(), *([] if is_first else [x])]
    torch.autograd.grad(outputs, inputs, torch.ones_like(outputs))
    return time.perf_counter() - begin


def main() -> None:
    """Print ours, the best and their ratio, of several measurements of ours."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="how often each part is timed")
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(one, two), nn.ReLU()) for one, two in pairwise(WIDTHS)))
    num_units = len(model)
    batch = torch.randn(BATCH, WIDTHS[0])
    ours = []
    for _ in range(3):
        costs = measure_costs(model, batch, blocks=[str(one) for one in range(num_units)], repeats=5)
        ours.append((*balance([one.time for one in costs], NUM_PARTS), num_units))
    ranges = list(combinations(range(num_units + 1), 2))
    inputs = [torch.randn(BATCH, width) for width in WIDTHS]
    seconds = dict.fromkeys(ranges, float("inf"))
    for _ in range(rounds):
        for begin, end in ranges:
            took = run(model[begin:end], inputs[begin], is_first=begin == 0)
            seconds[begin, end] = min(seconds[begin, end], took)
    slowest = {
        (0, *middle, num_units): max(seconds[part] for part in pairwise((0, *middle, num_units)))
        for middle in combinations(range(1, num_units), NUM_PARTS - 1)
    }
    best = min(slowest, key=slowest.__getitem__)
    print(
        f"best of {len(slowest)} cuts: {best}, slowest part {slowest[best] * 1e3:.3f} ms; the worst cut: {max(slowest.values()) * 1e3:.3f} ms"
    )
    for cut in ours:
        print(
            f"automatic cut: {cut}, slowest part {slowest[cut] * 1e3:.3f} ms, ratio {slowest[cut] / slowest[best]:.3f}"
        )


if __name__ == "__main__":
    main()
