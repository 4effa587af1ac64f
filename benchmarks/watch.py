"""What it costs a rank that its collectives are recorded: with the recording and without, in the same ranks, in turn.

The jobs run under `rankwise run` on `--ranks` ranks over Gloo on the CPU:

- `small`: DistributedDataParallel with a model of four layers, the smallest step that anybody makes (about 2 ms);
- `middle`: a wider model (about 20 ms);
- `metrics`: the small one, with an all_reduce and a broadcast called from Python in every step;
- `all_reduce`: nothing but that, of three numbers: what a single call costs.

"Without" are torch's own methods back in their places, and no hook at the optimizer's step. What the thread takes that
answers the launcher, and looks at the flight recorder by itself, is told apart, as a part of the time; and so is what the checksums of
the model take, which are too seldom to show in a median: all of them, from the first step on. A round is a block of steps
without, two with, and one without, or the other way round, so that a drift of the machine falls on both. Printed are medians, and
the median ratio with its 95 % confidence bounds, as in `benchmarks/steps.py`. CPU time is the better number on a machine that
is shared. The aims: 1.02 at most for `small`, 1.005 for `middle`; and the thread 0.2 %.

    python benchmarks/watch.py [--rounds N] [--ranks N] [--only small]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from steps import bound_median
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 300
#: Steps of a block.
JOBS = {"small": 5, "middle": 2, "metrics": 5, "all_reduce": 100}
AIMS = {"small": 1.02, "middle": 1.005}
#: By the number of the descriptor, as base/os_calls.py has it.
RECORDS = "memfd:evidence"


class CollectiveRecorder:
    """What is in the place of torch's own: taken out, and put back."""

    def __init__(self) -> None:
        classes: tuple[Any, ...] = (dist.ProcessGroup, torch._C._distributed_c10d.Work)
        self._methods = [
            (owner, name, method, method.__wrapped__)
            for owner in classes
            for name, method in list(vars(owner).items())
            if hasattr(method, "__wrapped__")
        ]
        hooks = (optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks)
        self._hooks: list[tuple[Any, dict[int, Any]]] = [(each, dict(each)) for each in hooks]
        if not self._methods or not self._hooks[1][1]:
            raise SystemExit("nothing is recorded here: run this under rankwise, with its watch on")

    def switch(self, *, is_on: bool) -> None:
        """Put the recording in its place, or torch's own."""
        for owner, name, method, raw in self._methods:
            setattr(owner, name, method if is_on else raw)
        for hooks, kept in self._hooks:
            hooks.clear()
            if is_on:
                hooks.update(kept)

    def find_digests(self) -> Any:
        """Return what takes the checksums; None if they are switched off."""
        cells = [cell.cell_contents for hook in self._hooks[1][1].values() for cell in hook.__closure__ or ()]
        owners = [getattr(content, "__self__", None) for content in cells]
        return next((owner for owner in owners if hasattr(owner, "spent_s")), None)


def build_step(job: str) -> Callable[[], None]:
    """Return a step of a job."""
    numbers = torch.ones(3)
    if job == "all_reduce":
        return lambda: dist.all_reduce(numbers) and None
    width = 640 if job == "middle" else 64
    torch.manual_seed(0)
    layers = [
        nn.Linear(32, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, 32),
        nn.Linear(32, 8),
    ]
    model = DistributedDataParallel(nn.Sequential(*layers), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    size = 512 if job == "middle" else 16
    x, y = torch.randn(size, 32), torch.randn(size, 8)

    def step() -> None:
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
        if job == "metrics":
            dist.all_reduce(numbers)
            dist.broadcast(numbers, src=0)

    return step


def measure(job: str, rounds: int, path: Path) -> None:
    """In a rank: write wall and CPU seconds of a step for each round, with and without, and what else there is."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    step, recording, steps = build_step(job), CollectiveRecorder(), JOBS[job]
    digests = recording.find_digests()
    start_s = time.perf_counter()

    def run(*, is_on: bool) -> tuple[float, float]:
        recording.switch(is_on=is_on)
        dist.barrier()
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        for _ in range(steps):
            step()
        return time.perf_counter() - wall_s, time.thread_time() - cpu_s

    for _ in range(6):
        run(is_on=True)
    gc.disable()
    found, clock = [], find_thread_clock()
    begin_s, begin_thread_s = time.perf_counter(), time.clock_gettime(clock)
    for number in range(rounds):
        inner_on = bool(number % 2)
        blocks = [run(is_on=is_on) for is_on in (not inner_on, inner_on, inner_on, not inner_on)]
        wall, cpu = ((a + d, b + c) for a, b, c, d in zip(*blocks, strict=True))
        on, off = (1, 0) if inner_on else (0, 1)
        found.append([each / 2 / steps for each in (wall[on], wall[off], cpu[on], cpu[off])])
    share = (time.clock_gettime(clock) - begin_thread_s) / (time.perf_counter() - begin_s)
    spent_s, on_s = digests.spent_s if digests else 0.0, (time.perf_counter() - start_s) / 2
    reported = {
        "rounds": found,
        "thread": share,
        "bytes": count_bytes(),
        "digests": spent_s / on_s,
        "digests_s": spent_s,
    }
    path.with_name(f"{path.name}.{dist.get_rank()}").write_text(json.dumps(reported))
    recording.switch(is_on=True)
    dist.destroy_process_group()


def find_thread_clock() -> int:
    """Return the CPU clock of the thread that answers the launcher."""
    for ident, frame in sys._current_frames().items():
        if frame.f_code.co_filename.endswith("responder.py"):
            return time.pthread_getcpuclockid(ident)
    raise SystemExit("there is no thread that answers the launcher")


def count_bytes() -> int:
    """Return the memory that the records take."""
    for entry in Path("/proc/self/fd").iterdir():
        if entry.is_symlink() and RECORDS in str(entry.readlink()):
            return entry.stat().st_blocks * 512
    return 0


def main() -> None:
    """Measure all jobs and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=JOBS, default=list(JOBS))
    parser.add_argument("--in-rank", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.in_rank:
        measure(arguments.only[0], arguments.rounds, arguments.in_rank)
        return
    print(f"torch {torch.__version__}, {arguments.ranks} ranks, {arguments.rounds} rounds")
    print(f"{'job':12}{'time':6}{'with':>10}{'without':>10}{'more':>9}{'ratio':>8}  95 % bounds")
    for job in arguments.only:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "told")
            command = [
                sys.executable,
                "-m",
                "rankwise.run",
                "--nproc-per-node",
                str(arguments.ranks),
                __file__,
            ]
            subprocess.run(
                [*command, "--rounds", str(arguments.rounds), "--only", job, "--in-rank", str(path)],
                check=True,
            )
            reported = [json.loads(path.with_name(f"told.{rank}").read_text()) for rank in range(arguments.ranks)]
        # The mean of the ranks: they run in step.
        rounds = [
            [statistics.fmean(values) for values in zip(*same, strict=True)]
            for same in zip(*(each["rounds"] for each in reported), strict=True)
        ]
        for kind, on, off in (("wall", 0, 1), ("CPU", 2, 3)):
            ratio, low, high = bound_median([each[on] / each[off] for each in rounds])
            more = statistics.median(each[on] - each[off] for each in rounds) * 1e6
            medians = [statistics.median(each[column] for each in rounds) * 1e6 for column in (on, off)]
            aim = f"   aim <= {AIMS[job]}" if job in AIMS else ""
            print(
                f"{job:12}{kind:6}{medians[0]:7.0f} us{medians[1]:7.0f} us{more:6.1f} us{ratio:8.4f}  {low:.4f} to {high:.4f}{aim}"
            )
        share = max(each["thread"] for each in reported)
        print(
            f"{'':12}thread {share:.3%} of the time; {reported[0]['bytes'] >> 10} KiB of records per rank; "
            f"checksums {max(each['digests'] for each in reported):.3%} of the time, {max(each['digests_s'] for each in reported) * 1e3:.1f} ms in all",
            flush=True,
        )


if __name__ == "__main__":
    main()
