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
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from parts.jobs import describe_host
from torch import nn
from torch.distributed import rpc

import rankwise
from rankwise.testing.ranks import run_ranks

ROUNDS, SECONDS = 3, 1.5
SIZES = {"4 KB": 1 << 10, "4 MB": 1 << 20, "32 MB": 8 << 20}
WORKERS = (1, 2, 4)
NUM_ROWS, ROW, BATCH = 10_000_000, 16, 4096
LR = 1e-3


class Rate:
    """Counts the steps of a worker for so long, after some to warm up."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def measure(self, step: Any) -> float:
        """Return steps per second."""
        for _ in range(3):
            step()
        count, begin = 0, time.perf_counter()
        while (spent := time.perf_counter() - begin) < self._seconds:
            step()
            count += 1
        return count / spent


def make_batches() -> list[torch.Tensor]:
    """Return row numbers, as they come in a batch of categories: some twice."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(NUM_ROWS, (BATCH,), generator=generator) for _ in range(8)]


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


class Held:
    """What a server by hand holds."""

    def __init__(self, values: torch.Tensor) -> None:
        self.weight = nn.Parameter(values)
        self.optimizer = torch.optim.SGD([self.weight], lr=LR)
        self.lock = threading.Lock()

    def apply(self, gradient: torch.Tensor) -> torch.Tensor:
        """Make one step, and return the parameters."""
        with self.lock:
            self.weight.grad = gradient
            self.optimizer.step()
            return self.weight.detach().clone()


HELD: list[Held] = []


def call_apply(gradient: torch.Tensor) -> torch.Tensor:
    """On the server, called by a worker."""
    return HELD[0].apply(gradient)


def call_look_up(rows: torch.Tensor) -> torch.Tensor:
    """On the server, called by a worker."""
    with HELD[0].lock:
        return HELD[0].weight.detach()[rows]


def call_push_rows(rows: torch.Tensor, gradient: torch.Tensor) -> None:
    """On the server, called by a worker."""
    with HELD[0].lock, torch.no_grad():
        HELD[0].weight.index_add_(0, rows, gradient, alpha=-LR)


def open_rpc() -> tuple[int, int]:
    """Make this rank an RPC agent; return rank and world size."""
    import os  # noqa: PLC0415 - torchrun's variables, as a script by hand reads them

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=world_size)
    return rank, world_size


def run_rpc(size: int, seconds: float) -> float:
    """Push and pull by one remote call."""
    torch.set_num_threads(1)
    HELD.append(Held(torch.zeros(size)))
    rank, _ = open_rpc()
    rate = 0.0
    if rank:
        model, gradient = torch.zeros(size), torch.full((size,), 1e-3)
        rate = Rate(seconds).measure(lambda: model.copy_(rpc.rpc_sync("rank0", call_apply, (gradient,))))
    rpc.shutdown()
    return rate


def run_gloo(size: int, seconds: float) -> float:
    """Push and pull by send and recv; an empty message ends it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rate = 0.0
    if rank == 0:
        held = Held(torch.zeros(size))

        def serve(worker: int) -> None:
            gradient, goes_on = torch.empty(size), torch.zeros(1)
            while True:
                dist.recv(goes_on, worker)
                if not goes_on.item():
                    return
                dist.recv(gradient, worker)
                dist.send(held.apply(gradient), worker)

        threads = [threading.Thread(target=serve, args=(worker,)) for worker in range(1, world_size)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    else:
        model, gradient = torch.zeros(size), torch.full((size,), 1e-3)
        goes_on = torch.ones(1)

        def step() -> None:
            dist.send(goes_on, 0)
            dist.send(gradient, 0)
            dist.recv(model, 0)

        rate = Rate(seconds).measure(step)
        dist.send(torch.zeros(1), 0)
    dist.destroy_process_group()
    return rate


def look_up_ours(seconds: float) -> float:
    """Look up rows and push their gradients, by rankwise."""
    torch.set_num_threads(1)
    ctx = rankwise.init(device="cpu")
    model = nn.Module()
    model.table = rankwise.ServedEmbedding(NUM_ROWS, ROW, std=0.0)
    model.bias = nn.Parameter(torch.zeros(1))
    ps = rankwise.parameter_server(
        model, lambda ones: torch.optim.SGD(ones, lr=LR), mode="async", timeout_s=300
    )
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


def look_up_rpc(seconds: float) -> float:
    """Look up rows and push their gradients, by two remote calls; rows that come twice are added up, as an embedding does."""
    torch.set_num_threads(1)
    HELD.append(Held(torch.zeros(NUM_ROWS if dist_rank() == 0 else 1, ROW)))
    rank, _ = open_rpc()
    rate, number = 0.0, 0
    if rank:
        batches, gradient = make_batches(), torch.full((BATCH, ROW), 1e-3)

        def step() -> None:
            nonlocal number
            rows = batches[number % len(batches)]
            values = rpc.rpc_sync("rank0", call_look_up, (rows,)).requires_grad_()
            (values * 1.0).backward(gradient)
            rpc.rpc_sync("rank0", call_push_rows, (rows, values.grad))
            number += 1

        rate = Rate(seconds).measure(step)
    rpc.shutdown()
    return rate


def dist_rank() -> int:
    """Return this process's rank."""
    import os  # noqa: PLC0415 - torchrun's variables, as a script by hand reads them

    return int(os.environ["RANK"])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    args = parser.parse_args()
    print(describe_host())
    print(f"{'':>24}{'rankwise':>20}{'RPC by hand':>20}{'Gloo by hand':>20}   ratio")
    for workers in WORKERS:
        for name, size in SIZES.items():
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
    for workers in WORKERS[:2]:
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
