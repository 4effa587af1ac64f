"""How long a hang is silent: from the moment when a rank goes wrong to the first line that names it, and what torchrun prints meanwhile.

Each script trains for a moment and then goes wrong in one way. In each of them rank 1 is to blame: it writes down the time just before. Measured is the
time from there until the launcher has named a rank on standard error. torchrun is given --limit seconds; torch's own timeout is 30 minutes on Gloo.

    python benchmarks/verdict.py [--rounds N] [--limit SECONDS] [--only NAME ...]

The second table is of jobs that were never run: the records of W ranks in which one stands elsewhere, and how long it takes to judge them
in the parent, off the ranks' path.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from typing import TYPE_CHECKING

from parts.jobs import RANKWISE, TORCHRUN, Launcher, describe_host, prepare, start_job

from rankwise.evidence.reader.notes import Frame, Stack
from rankwise.evidence.reader.scene import Evidence, Group, Op, RankFacts, Scene
from rankwise.verdict.run_rules import look

if TYPE_CHECKING:
    from collections.abc import Sequence

ROUNDS, LIMIT_S, START_LIMIT_S = 3, 20.0, 60.0
AIM_S = 5.0
RANKS = 2
SIZES = (8, 64, 512, 1024)

_HEAD = """
import os, signal, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def step():
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

def go_wrong():
    with open("onset", "w") as file:
        file.write(str(time.monotonic()))

for _ in range(20):
    step()
"""
SCRIPTS = {
    "left early": """
if rank == 1:
    go_wrong()
    os._exit(0)
while True:
    step()
""",
    "another collective": """
if rank == 1:
    go_wrong()
    dist.barrier()
while True:
    step()
""",
    "another shape": """
x = torch.ones(4 if rank == 1 else 5)
if rank == 1:
    go_wrong()
dist.all_gather([torch.empty_like(x), torch.empty_like(x)], x)
time.sleep(1000)
""",
    "both send": """
if rank == 1:
    go_wrong()
dist.send(torch.ones(1 << 20), 1 - rank)
dist.recv(torch.ones(1 << 20), 1 - rank)
""",
    "frozen": """
if rank == 1:
    go_wrong()
    os.kill(os.getpid(), signal.SIGSTOP)
while True:
    step()
""",
    "asleep": """
if rank == 1:
    go_wrong()
    time.sleep(1000)
while True:
    step()
""",
}


def measure(launcher: Launcher, script: str, limit_s: float) -> tuple[float | None, str]:
    """Run a job.

    Returns:
        Seconds from the onset until the launcher has named a rank, None if it did not; and what it said.
    """
    with start_job(launcher, ["--nproc-per-node", str(RANKS)], _HEAD + script) as job:
        if not job.wait_until((job.folder / "onset").exists, START_LIMIT_S):
            return None, "did not get so far"
        onset_s = float((job.folder / "onset").read_text() or time.monotonic())
        if job.wait_until(lambda: bool(find_name(job.errors)), limit_s):
            return time.monotonic() - onset_s, find_name(job.errors)
        return None, ""


def find_name(errors: str) -> str:
    """Return where a launcher names a rank, in its own words; empty if it does not."""
    theirs = re.search(r"^ +rank +: (\d+)", errors, re.MULTILINE)
    if theirs is not None:
        return f"names rank {theirs[1]}"
    ours = re.search(r"^(?:rankwise:|  first ).*\brank(?:s|) \d.*", errors, re.MULTILINE)
    return ours[0] if ours is not None else ""


def build_scene(num_ranks: int) -> Scene:
    """Return the records of ranks that wait in an all_reduce, but for one, which sleeps."""
    group = Group(name="0", ranks=tuple(range(num_ranks)), backend="gloo")
    waits = Stack(frames=(
        Frame(file="/x/site-packages/torch/distributed/distributed_c10d.py", line=1, function="all_reduce"),
        Frame(file="train.py", line=57, function="<module>"),
    ))  # fmt: skip
    sleeps = Stack(frames=(Frame(file="train.py", line=41, function="<module>"),))
    ranks = []
    for rank in range(num_ranks):
        last = 811 if rank == num_ranks // 2 else 812
        ops = tuple(
            Op(group="0", seq=seq, name="all_reduce", shapes=((1000,),), dtypes=("float32",), site="train.py:57",
               entered_s=seq / 100, is_over=seq < 812)
            for seq in range(last - 255, last + 1)
        )  # fmt: skip
        evidence = Evidence(ops=ops, groups={"0": group}, has_joined=True, steps=last)
        ranks.append(
            RankFacts(
                rank=rank,
                pid=rank + 1,
                evidence=evidence,
                stack=sleeps if last == 811 else waits,
                still_s=10,
                cpu_share=0.0,
            )
        )
    return Scene(ranks=tuple(ranks), world_size=num_ranks, now_s=20.0)


def print_judging(sizes: Sequence[int]) -> None:
    """Print how long it takes to judge records of many ranks."""
    print(f"\n{'ranks':>6}{'judged in':>12}  verdict")
    for size in sizes:
        scene, times = build_scene(size), []
        for _ in range(3):
            start_s = time.perf_counter()
            findings = look(scene)
            times.append(time.perf_counter() - start_s)
        print(f"{size:6}{statistics.median(times) * 1000:9.1f} ms  {findings[0].message[:110] if findings else 'none'}")


def main() -> None:
    """Measure, and print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"jobs of ours of each kind ({ROUNDS})")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help=f"seconds that torchrun is given ({LIMIT_S:.0f})")
    parser.add_argument("--only", nargs="+", default=list(SCRIPTS), choices=list(SCRIPTS), metavar="NAME")
    args = parser.parse_args()
    prepare()
    print(describe_host())
    print(f"{'':20}{'rankwise':>10}{'worst':>9}  aim <= {AIM_S:.0f} s   torchrun")
    for name in args.only:
        ours = [measure(RANKWISE, SCRIPTS[name], args.limit)[0] for _ in range(args.rounds)]
        theirs, printed = measure(TORCHRUN, SCRIPTS[name], args.limit)
        seen = [one for one in ours if one is not None]
        median = (
            f"{statistics.median(seen):8.2f} s{max(seen):7.2f} s"
            if len(seen) == len(ours)
            else f"seen in {len(seen)} of {len(ours)}"
        )
        waited = f"silent for {args.limit:.0f} s" if theirs is None else f"{theirs:.2f} s: {printed}"
        print(f"{name:20}{median:>19}               {waited}", flush=True)
    print_judging(SIZES)


if __name__ == "__main__":
    main()
