"""How long it takes to call a function on many ranks: rankwise.launch and torch.multiprocessing.spawn, in turn.

A program that has imported torch, as a notebook has, calls the same function several times over: it joins a Gloo group,
all-reduces one number, and leaves the group. Told is the time from the call to its return: of the first call in a
program, and of those after it, each as the median of all rounds, with the smallest and the largest in brackets. What
mp.spawn does not do, to return values, is no part of the function.

Run it as `python benchmarks/function.py [--rounds N]`; the machine should be idle. The ratio is that of the medians, ours
by mp.spawn's: below 1 is faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from parts.jobs import count_cores, describe_host

ROUNDS = 5
CALLS = 3
LIMIT_S = 180.0
RANKS = (2, 4)

_HELLO = """
import json, os, socket, sys, time
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import rankwise

def hello():
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    assert total == int(os.environ["WORLD_SIZE"])

def spawned(rank, port, num_ranks):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="localhost", MASTER_PORT=str(port))
    hello()

def find_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]

if __name__ == "__main__":
    how, num_ranks, num_calls = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    times = []
    for _ in range(num_calls):
        start = time.monotonic()
        if how == "rankwise":
            rankwise.launch(hello, nprocs=num_ranks)
        else:
            mp.spawn(spawned, (find_port(), num_ranks), num_ranks)
        times.append(time.monotonic() - start)
    print(json.dumps(times))
"""


def time_calls(how: str, num_ranks: int, script: Path) -> list[float]:
    """Return the seconds of each call in one program."""
    command = [sys.executable, str(script), how, str(num_ranks), str(CALLS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{how}, {num_ranks} ranks: exit code {done.returncode}\n{done.stderr}")
    times: list[float] = json.loads(done.stdout.splitlines()[-1])
    return times


def show(title: str, ours: list[float], theirs: list[float]) -> None:
    """Print one row."""
    ratio = statistics.median(ours) / statistics.median(theirs)
    print(f"{title:32} {_spread(ours):22} {_spread(theirs):22} {ratio:.2f}")


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"programs of a row ({ROUNDS})")
    args = parser.parse_args()
    print(describe_host(), flush=True)
    rows = list[tuple[str, list[float], list[float]]]()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "calls.py"
        script.write_text(_HELLO)
        for how in ("rankwise", "spawn"):
            time_calls(how, RANKS[0], script)  # torch's files come from the disk only once
        for num_ranks in RANKS:
            ours, theirs = list[list[float]](), list[list[float]]()
            for number in range(args.rounds):
                ours.append(time_calls("rankwise", num_ranks, script))
                theirs.append(time_calls("spawn", num_ranks, script))
                reported = f"{num_ranks} ranks, round {number + 1} of {args.rounds}"
                print(f"{reported}: {ours[-1]} {theirs[-1]}", file=sys.stderr, flush=True)
            star = " *" if num_ranks > count_cores() else ""
            rows.append((f"first call, {num_ranks} ranks{star}", [t[0] for t in ours], [t[0] for t in theirs]))
            later = [[t for times in series for t in times[1:]] for series in (ours, theirs)]
            rows.append((f"later calls, {num_ranks} ranks{star}", later[0], later[1]))
    print(f"\n{'seconds, median (min-max)':32} {'rankwise.launch':22} {'mp.spawn':22} ratio")
    for row in rows:
        show(*row)
    print(f"\n* more ranks than the {count_cores()} cores")


if __name__ == "__main__":
    main()
