"""What it costs to know which samples come next: our samplers, torch's and torchdata's, from 10^6 to 10^12 samples.

Each line is one process of its own, for one rank of `--ranks`, shuffled:

- `first`, `4096`: milliseconds from making the sampler to its first index, and to its first 4096;
- `memory`: MiB by which the process has grown at its peak meanwhile;
- `batch`: microseconds for one batch of 256 of this rank, as the median of those that follow, the first 4096 left out;
- `mean`: the same, as the mean: blocks that are computed now and then fall on some batches and not on others;
- `all in`: microseconds a batch when the start is shared among all batches that the rank has in an epoch.

torch's sampler and torchdata's make a list of all samples on every rank. Where that would need more memory than is free,
or more samples than `--limit`, they are not run, and the table says so.

Run it as `python benchmarks/sampler.py [--sizes 1e6 1e8 ...] [--limit N] [--batches N] [--ranks N] [--repeat N]`;
the machine should be idle; of the processes of a line, each column shows the best. torchdata is optional: `pip install torchdata==0.11.0`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch.utils.data import BatchSampler, TensorDataset, default_collate, distributed

from rankwise.data.distributed_sampler import DistributedSampler
from rankwise.data.sampler import GlobalBatchSampler

BATCH, FIRST = 256, 4096
SIZES = (10**6, 10**7, 10**8, 10**10, 10**12)
#: torch's list: 8 bytes a number, then a list of Python's numbers at 40 bytes each.
LIST_BYTES = 50
THEIRS = ("torch", "torchdata")
SIDES = ("DistributedSampler", "GlobalBatchSampler", *THEIRS)
AIM_MS, AIM_MIB = 50.0, 20.0


class Numbers:
    """A data set of any length."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


def build(side: str, size: int, num_ranks: int) -> Any:
    """Return an iterator over the batches of one rank."""
    rank = num_ranks // 2
    if side == "GlobalBatchSampler":
        return iter(GlobalBatchSampler(size, global_batch=BATCH * num_ranks, num_replicas=num_ranks, rank=rank))
    if side == "torchdata":
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler as Kind  # noqa: PLC0415 - may be missing
    else:
        Kind = {"torch": distributed.DistributedSampler, "DistributedSampler": DistributedSampler}[side]
    return iter(BatchSampler(Kind(Numbers(size), num_replicas=num_ranks, rank=rank), BATCH, drop_last=False))


def peak_mib() -> float:
    """Return the most memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << (20 if platform.system() == "Darwin" else 10))


def measure(side: str, size: int, num_ranks: int, num_batches: int) -> dict[str, float]:
    """In a process of its own: return what one sampler costs."""
    build(side, 1000, num_ranks)  # imports
    list(build("DistributedSampler", 1000, 1))  # torch's first operations
    before_mib, start = peak_mib(), time.perf_counter()
    batches = build(side, size, num_ranks)
    seen = [next(batches)]
    first = time.perf_counter() - start
    seen += [next(batches) for _ in range(FIRST // BATCH - 1)]
    until_4096 = time.perf_counter() - start
    memory = peak_mib() - before_mib
    if len({index for batch in seen for index in batch}) != FIRST:
        sys.exit(f"{side}: the first {FIRST} of {size} are not different")
    times = []
    for _ in range(num_batches):
        began = time.perf_counter()
        batch = next(batches, None)
        if batch is None or len(batch) < BATCH:
            break
        times.append(time.perf_counter() - began)
    mean = statistics.fmean(times)
    return {
        "first": first * 1e3,
        "4096": until_4096 * 1e3,
        "memory": memory,
        "batch": statistics.median(times) * 1e6,
        "mean": mean * 1e6,
        "all in": (mean + first / (size / num_ranks / BATCH)) * 1e6,
    }


def run(side: str, size: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Return the best of some processes: what else runs on the machine only ever adds."""
    found = []
    for _ in range(arguments.repeat):
        command = [sys.executable, __file__, "--measure", side, "--sizes", str(size)]
        command += ["--ranks", str(arguments.ranks), "--batches", str(arguments.batches)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        found.append(json.loads(done.stdout))
    return {name: min(each[name] for each in found) for name in found[0]}


def measure_load() -> float:
    """Return microseconds to fetch and collate one batch of the smallest samples that there are: a number each."""
    dataset = TensorDataset(torch.zeros(100_000, 1))
    times = []
    for start in range(0, 20 * BATCH, BATCH):
        began = time.perf_counter()
        default_collate([dataset[index] for index in range(start, start + BATCH)])
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def why_not(side: str, size: int, limit: int) -> str | None:
    """Return why a side is not run at a size."""
    if side not in THEIRS:
        return None
    if side == "torchdata":
        try:
            version("torchdata")
        except PackageNotFoundError:
            return "not installed"
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size * LIST_BYTES > free * 0.8:
        return f"not run: its list needs about {size * LIST_BYTES / 2**30:,.0f} GiB, {free / 2**30:.0f} are free"
    return f"not run: more than --limit {limit:.0e}" if size > limit else None


def main() -> None:
    """Measure all sides at all sizes, and print a table with the ratios of ours to torch's."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=float, nargs="+", default=SIZES)
    parser.add_argument("--limit", type=float, default=10**8, help="most samples for torch and torchdata")
    parser.add_argument("--batches", type=int, default=2000, help="batches after the first 4096 indices, at most")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument(
        "--repeat", type=int, default=3, help="processes of each line; the best of each column is shown"
    )
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.sizes]
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, sizes[0], arguments.ranks, arguments.batches)))
        return
    print(
        f"torch {torch.__version__}, {os.cpu_count()} CPUs, 1 rank of {arguments.ranks}, batches of {BATCH}, best of {arguments.repeat} processes"
    )
    print(
        f"aim: the first {FIRST} indices of 10^12 within {AIM_MS:.0f} ms and {AIM_MIB:.0f} MiB; a batch as fast as torch's"
    )
    units = {"first": "ms", "4096": "ms", "memory": "MiB", "batch": "us", "mean": "us", "all in": "us"}
    print(f"{'samples':>8} {'sampler':20}" + "".join(f"{f'{name} {unit}':>13}" for name, unit in units.items()))
    for size in sizes:
        found: dict[str, dict[str, float]] = {}
        for side in SIDES:
            reason = why_not(side, size, arguments.limit)
            if reason is None:
                found[side] = run(side, size, arguments)
            shown = reason or "".join(f"{found[side][name]:13,.1f}" for name in units)
            print(f"{size:8.0e} {side:20}{shown}", flush=True)
        for side in SIDES[:2] if "torch" in found else ():
            ratios = (found[side][name] / max(found["torch"][name], 1e-9) for name in units)
            print(f"{'':8} {side[:12] + ' : torch':20}" + "".join(f"{ratio:13.3g}" for ratio in ratios))
    print(f"beside it: to fetch and collate {BATCH} samples of one number each takes {measure_load():,.0f} us")


if __name__ == "__main__":
    main()
