"""What collectives on anything cost: ours, and what one writes by hand with torch, in turn, on this machine.

- nested all_reduce: a dict of many tensors, against a loop of torch.distributed.all_reduce over its values. Ours compares
  the ranks' calls first; a row without that comparison stands beside. The loop works in place, ours returns new tensors
  and leaves the old ones alone; all_reduce_ works in place too.
- gather into storage: rows of every rank into one tensor on rank 0, against torch.distributed.gather into a list and
  torch.cat. Shapes are told even where comparing is off, so that its two rows are nearly the same.

All use Gloo on the CPU. A sample is the slowest rank's time for one call after a barrier; the two sides take turns, round
by round. Each number is the median of all rounds, with the smallest and the largest in brackets.

Run it as `python benchmarks/collectives.py [--rounds N] [--ranks N]`; the machine should be idle. The ratio is that of
the medians, ours by the peer's: below 1 is faster.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import rankwise
from rankwise.runtime import collectives
from rankwise.testing.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROUNDS, WARM_UP = 40, 5
TREES = {"200 of 16": [16] * 200, "50 of 4096": [4096] * 50, "4 of 1000000": [1_000_000] * 4, "1 of 1": [1]}
ROWS = {"1000 x 16": (1000, 16), "20000 x 256": (20_000, 256)}

Sides = dict[str, "Callable[[], None]"]


def measure(sides: Sides, rounds: int) -> dict[str, list[float]]:
    """Time each side once a round, in turn; returns this rank's seconds."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for index in range(WARM_UP + rounds):
        for name, call in sides.items():
            dist.barrier()
            start = time.perf_counter()
            call()
            spent = time.perf_counter() - start
            if index >= WARM_UP:
                seconds[name].append(spent)
    return seconds


def reduce_sides(sizes: Sequence[int]) -> Sides:
    """Return the ways to add up a dict of tensors."""
    tree = {f"layer{index}": torch.ones(size) for index, size in enumerate(sizes)}

    def loop() -> None:
        for value in tree.values():
            dist.all_reduce(value, op=dist.ReduceOp.MAX)  # as costly as a sum, and the values stay small

    def nested() -> None:
        collectives.all_reduce(tree, "max")

    def unchecked() -> None:
        before = collectives.set_checking("off")
        collectives.all_reduce(tree, "max")
        collectives.set_checking(before)

    def in_place() -> None:
        collectives.all_reduce_(tree, "max")

    return {"peer": loop, "ours": nested, "unchecked": unchecked, "in place": in_place}


def gather_sides(rows: int, width: int, ctx: Any) -> Sides:
    """Return the ways to bring all ranks' rows together on rank 0."""
    own = torch.full((rows, width), float(ctx.rank))
    out = torch.empty(rows * ctx.world_size, width) if ctx.rank == 0 else None

    def lists() -> None:
        parts = [torch.empty_like(own) for _ in range(ctx.world_size)] if ctx.rank == 0 else None
        dist.gather(own, parts, dst=0)
        if parts is not None:
            torch.cat(parts)

    def into() -> None:
        collectives.gather_into(out, own)

    def unchecked() -> None:
        before = collectives.set_checking("off")
        collectives.gather_into(out, own)
        collectives.set_checking(before)

    return {"peer": lists, "ours": into, "unchecked": unchecked}


def run_all(rounds: int) -> dict[str, dict[str, list[float]]]:
    """On each rank: measure every case."""
    ctx = rankwise.init()
    found = {f"all_reduce, {name}": measure(reduce_sides(sizes), rounds) for name, sizes in TREES.items()}
    for name, (rows, width) in ROWS.items():
        found[f"gather, {name}"] = measure(gather_sides(rows, width, ctx), rounds)
    return found


def describe(samples: Sequence[float]) -> str:
    """Return the median and the spread in milliseconds."""
    return f"{statistics.median(samples) * 1e3:8.2f} ms ({min(samples) * 1e3:.2f}-{max(samples) * 1e3:.2f})"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    per_rank = run_ranks(run_all, options.ranks, options.rounds, timeout_s=600)
    print(f"torch {torch.__version__}, {options.ranks} ranks, {os.cpu_count()} cores, {options.rounds} rounds")
    for case in per_rank[0]:
        sides = {
            side: [max(row) for row in zip(*(rank[case][side] for rank in per_rank), strict=True)]
            for side in per_rank[0][case]
        }
        peer = statistics.median(sides["peer"])
        print(f"\n{case}\n  torch        {describe(sides['peer'])}")
        for side in [side for side in sides if side != "peer"]:
            title = "rankwise" if side == "ours" else f"  {side}"
            print(f"  {title:12} {describe(sides[side])}  ratio {statistics.median(sides[side]) / peer:.2f}")


if __name__ == "__main__":
    main()
