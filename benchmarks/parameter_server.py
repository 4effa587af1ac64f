"""What a push and a pull over a parameter server cost: ours, torch's RPC by hand and Gloo's send and recv by hand, on this machine.

One server; 1, 2 or 4 workers push a gradient and pull the parameters, again and again, each at its own pace; the server applies each gradient
by SGD. By hand that is PyTorch's own tutorial: one remote call that takes the gradient and returns the parameters; and over Gloo a thread
of the server for each worker, which receives, applies and sends back, without a header, a version or a bound on a wait. Then lookups of 4096
rows of a table of 10^7 rows of 16 numbers, and a push of their gradients.

The sides take turns. Each number is the median of the rounds: steps (a push and a pull) per second of all workers together, and GB/s both
ways. The ratio is ours by the better of the two by hand: above 1 is faster.

Run it as `python benchmarks/parameter_server.py [--rounds N] [--seconds N]`; the machine should be idle.
"""

from __future__ import annotations

import argparse
import statistics
import sys

import torch
from parts.jobs import describe_host
from parts.served_by_hand import BATCH, LR, NUM_ROWS, ROW, Rate, look_up_rpc, make_batches, run_gloo, run_rpc
from torch import nn

import rankwise
from rankwise.testing.ranks import run_ranks

ROUNDS, SECONDS = 3, 1.5
#: Bytes by name, as numbers of float32.
SIZES = {"4 KB": 1 << 10, "4 MB": 1 << 20, "32 MB": 8 << 20}
WORKERS = (1, 2, 4)


def run_ours(size: int, seconds: float) -> float:
    """Push and pull by rankwise."""
    torch.set_num_threads(1)
    ctx = rankwise.init(device="cpu")
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(size))
    ps = rankwise.parameter_server(model, lambda ones: torch.optim.SGD(ones, lr=LR), mode="async")
    if ps.is_server:
        ps.serve()
        return 0.0
    gradient = torch.full((size,), 1e-3)
    ps.pull()

    def step() -> None:
        model.weight.grad = gradient
        ps.push()
        ps.pull()

    rate = Rate(seconds).measure(step)
    ctx.close()
    return rate


def look_up_ours(seconds: float) -> float:
    """Look up rows and push their gradients, by rankwise."""
    torch.set_num_threads(1)
    ctx = rankwise.init(device="cpu")
    model = nn.Module()
    model.table = rankwise.ServedEmbedding(NUM_ROWS, ROW, std=0.0)
    model.bias = nn.Parameter(torch.zeros(1))
    ps = rankwise.parameter_server(model, lambda ones: torch.optim.SGD(ones, lr=LR), mode="async", timeout_s=300)
    if ps.is_server:
        ps.serve()
        return 0.0
    batches, gradient, number = make_batches(), torch.full((BATCH, ROW), 1e-3), 0
    ps.pull()

    def step() -> None:
        nonlocal number
        values = model.table(batches[number % len(batches)])
        values.backward(gradient)
        ps.push()
        number += 1

    rate = Rate(seconds).measure(step)
    ctx.close()
    return rate


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--sizes", nargs="*", default=[*SIZES], choices=SIZES)
    args = parser.parse_args()
    print(describe_host())
    print(f"{'':>24}{'rankwise':>20}{'RPC by hand':>20}{'Gloo by hand':>20}   ratio")
    for workers in args.workers:
        for name in args.sizes:
            size = SIZES[name]
            rates: dict[str, list[float]] = {}
            for _ in range(args.rounds):
                for side in (run_ours, run_rpc, run_gloo):
                    found = run_ranks(side, workers + 1, size, args.seconds, timeout_s=300)
                    rates.setdefault(side.__name__, []).append(sum(found[1:]))
            medians = [statistics.median(one) for one in rates.values()]
            cells = [f"{rate:.0f}/s {rate * size * 8 / 1e9:.2f} GB/s" for rate in medians]
            ratio = medians[0] / max(medians[1:])
            print(
                f"{workers} workers, {name:>10}  " + "".join(f"{one:>20}" for one in cells) + f"{ratio:8.2f}",
                flush=True,
            )
    for workers in args.workers[:2]:
        rates = {}
        for _ in range(args.rounds):
            for lookup in (look_up_ours, look_up_rpc):
                found = run_ranks(lookup, workers + 1, args.seconds, timeout_s=300)
                rates.setdefault(lookup.__name__, []).append(sum(found[1:]))
        ours, by_hand = (statistics.median(one) for one in rates.values())
        print(
            f"{workers} workers, {BATCH} of 10^7 rows: {ours:.0f}/s ({ours * BATCH / 1e6:.2f} M rows/s), RPC by hand {by_hand:.0f}/s, ratio {ours / by_hand:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
