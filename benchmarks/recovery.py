"""How long a job stands still when a rank is killed: rankwise and torchrun, in turn, on this machine.

Four ranks train a small model with DDP on Gloo. A rank drawn by lot is killed with `kill -9` after a step drawn by
lot, and the launcher starts all ranks again (--max-restarts). Measured is the time from the kill to the moment
when every rank of a new attempt has completed its first step.

Run it as `python benchmarks/recovery.py [--rounds N] [--torchrun-rounds N] [--ranks N] [--seed N]`. Ours are a few
jobs with several kills each, torchrun's are jobs with one kill each: it keeps one store over its restarts, with the
dead ranks' addresses in it, so it may never get back, and is given up after LIMIT_S.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parts.jobs import RANKWISE, TORCHRUN, Job, Launcher, count_cores, describe_host, prepare, start_job

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

ROUNDS = 20
TORCHRUN_ROUNDS = 5
RANKS = 4
LIMIT_S = 45.0
AIM_S = 0.15
#: From the start of a job, or of an attempt, to the step after which a rank is killed.
_START_LIMIT_S = 120.0
#: Long enough that some kills come when the job has been quiet for a second or two.
_MOST_STEPS = 300
#: An attempt may fail by itself: restarts beyond the kills.
_SPARE_RESTARTS = 5

_SCRIPT = """
import os
import time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
name = f"attempt{os.environ['TORCHELASTIC_RESTART_COUNT']}.rank{dist.get_rank()}"
steps = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.write(steps, f"{os.getpid()}\\n".encode())
while True:
    optimizer.zero_grad()
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    os.write(steps, f"{time.monotonic()}\\n".encode())
"""


@dataclass(frozen=True, slots=True)
class Kill:
    """Which rank is killed, and after how many steps of all ranks."""

    rank: int
    step: int


@dataclass(frozen=True, slots=True)
class Back:
    """A job that works again.

    Attributes:
        seconds: From the kill to the first step that all ranks had completed.
        num_attempts: How many attempts that took.
    """

    seconds: float
    num_attempts: int


@dataclass(frozen=True, slots=True)
class Steps:
    """What one rank of one attempt has done: its pid, and when it completed each step."""

    pid: int
    times_s: list[float]


def read_steps(path: Path) -> Steps:
    """Read a rank's file, which it may be writing to; without one it has done nothing."""
    try:
        lines = path.read_text().split("\n")[:-1]
    except FileNotFoundError:
        lines = []
    return Steps(int(lines[0]), [float(line) for line in lines[1:]]) if lines else Steps(0, [])


def read_attempt(job: Job, attempt: int, num_ranks: int) -> list[Steps]:
    """Return what each rank of an attempt has done so far."""
    return [read_steps(job.folder / f"attempt{attempt}.rank{rank}") for rank in range(num_ranks)]


def measure(launcher: Launcher, kills: Sequence[Kill], num_ranks: int) -> list[Back | None]:
    """Kill ranks of one job, one after the other.

    Returns:
        How the job came back, for each kill; the last one is None if it did not, and then the job is over.
    """
    found = list[Back | None]()
    restarts = len(kills) + _SPARE_RESTARTS
    flags = ["--nproc-per-node", str(num_ranks), "--max-restarts", str(restarts)]
    attempt = 0
    with start_job(launcher, flags, _SCRIPT) as job:
        for kill in kills:
            back = _kill_once(job, attempt, kill, num_ranks)
            found.append(back)
            if back is None:
                print(f"{launcher.name}, its last words:\n{job.errors[-1500:]}", file=sys.stderr)
                break
            attempt += back.num_attempts
    return found


def _kill_once(job: Job, attempt: int, kill: Kill, num_ranks: int) -> Back | None:
    def is_far_enough() -> bool:
        return all(len(one.times_s) >= kill.step for one in read_attempt(job, attempt, num_ranks))

    if not job.wait_until(is_far_enough, _START_LIMIT_S):
        print(f"attempt {attempt} did not get to step {kill.step}, without a kill", file=sys.stderr)
        return None
    pid = read_attempt(job, attempt, num_ranks)[kill.rank].pid
    killed_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)

    def list_back() -> list[Back]:
        found = []
        for later in range(1, _SPARE_RESTARTS + 2):
            ranks = read_attempt(job, attempt + later, num_ranks)
            if all(one.times_s for one in ranks):
                found.append(Back(max(one.times_s[0] for one in ranks) - killed_s, later))
        return found

    job.wait_until(lambda: bool(list_back()), LIMIT_S)
    return next(iter(list_back()), None)


def draw_kills(num: int, num_ranks: int, seed: int) -> list[Kill]:
    """Draw the ranks and the steps by lot."""
    lot = random.Random(seed)
    return [Kill(rank=lot.randrange(num_ranks), step=lot.randint(1, _MOST_STEPS)) for _ in range(num)]


def measure_all(kills: Sequence[Kill], num_theirs: int, num_ranks: int) -> tuple[list[Back | None], ...]:
    """Measure both in turn: a job of ours with its share of the kills, then a job of torchrun's with one kill."""
    ours, theirs = list[Back | None](), list[Back | None]()
    num_turns = max(1, num_theirs)
    for turn in range(num_turns):
        due = len(kills) * (turn + 1) // num_turns
        while len(ours) < due:
            found = measure(RANKWISE, kills[len(ours) : due], num_ranks)
            ours += found
            print(f"rankwise: {', '.join(_show(one) for one in found)}", flush=True)
        if turn < num_theirs:
            theirs += measure(TORCHRUN, [kills[turn % len(kills)]], num_ranks)
            print(f"torchrun: {_show(theirs[-1])}", flush=True)
    return ours, theirs


def summarize(name: str, found: Sequence[Back | None]) -> float | None:
    """Print the line of one launcher; return its median in seconds, None if it never came back."""
    back = [one.seconds for one in found if one is not None]
    median = statistics.median(back) if back else None
    more = sum(one is not None and one.num_attempts > 1 for one in found)
    times = f"{median:.3f} s (median), {max(back):.3f} s (worst), " if median is not None else ""
    late = f", {more} of them after more than one attempt" if more else ""
    print(f"{name}: {times}back in {len(back)} of {len(found)}{late}")
    return median


def main() -> None:
    """Measure both, and print the ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"kills, ours ({ROUNDS})")
    parser.add_argument(
        "--torchrun-rounds",
        type=int,
        default=TORCHRUN_ROUNDS,
        metavar="N",
        help=f"kills, torchrun's ({TORCHRUN_ROUNDS})",
    )
    parser.add_argument("--ranks", type=int, default=RANKS, metavar="N", help=f"ranks ({RANKS})")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of ranks and steps (0)")
    args = parser.parse_args()
    prepare()
    print(describe_host())
    more = f", more than the {count_cores()} cores" if args.ranks > count_cores() else ""
    print(f"{args.ranks} ranks{more}; seconds from kill -9 to the first step of all restarted ranks", flush=True)
    kills = draw_kills(args.rounds, args.ranks, args.seed)
    ours, theirs = measure_all(kills, args.torchrun_rounds, args.ranks)
    mine = summarize("rankwise", ours)
    peer = summarize("torchrun", theirs) if theirs else None
    print(f"aim: back in {args.rounds} of {args.rounds}, median at most {AIM_S} s")
    if mine is not None and theirs:
        print(f"ratio: {mine / peer:.3f}" if peer is not None else f"ratio: below {mine / LIMIT_S:.3f}")


def _show(back: Back | None) -> str:
    return "not back" if back is None else f"{back.seconds:.3f} s"


if __name__ == "__main__":
    main()
