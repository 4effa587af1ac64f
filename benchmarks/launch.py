"""How long a job takes to get to work, and how much memory it holds: rankwise and torchrun, in turn, on this machine.

Three quantities of every job, each as the median of all rounds, with the smallest and the largest in brackets:

- seconds from the start of the launcher to the moment when the last rank has completed its first all_reduce
  (of DDP: the first backward);
- seconds from the start of the launcher to its exit, of jobs with nothing else to do;
- the proportional set size (PSS, /proc/*/smaps_rollup) of the launcher and all processes below it, while all ranks
  stand after their last step. Other programs on the host that use the same torch make it smaller for both.

The jobs: `hello` (init_process_group, all_reduce, destroy_process_group), `ddp` (three steps of a small model
with an optimizer), `transformers` (imports a model from there, then as hello). All use Gloo, on the CPU. `resident` rows are
those of every run but the first with `--resident`: the server is there, and its own memory is not counted.

Run it as `python benchmarks/launch.py [--rounds N] [--only hello|ddp|transformers|resident]`; the machine should be idle.
`--runs 1000` instead lets one resident server serve so many runs, and prints what it holds before and after.
The ratio is that of the medians, ours by torchrun's: below 1 is faster, or smaller. The aims stand beside.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from parts.jobs import (
    RANKWISE,
    TORCHRUN,
    Launcher,
    count_cores,
    describe_host,
    list_job_processes,
    prepare,
    start_job,
    sum_pss_bytes,
)

from rankwise.launcher.resident import list_servers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROUNDS = 5
#: Memory differs little from job to job.
MEMORY_ROUNDS = 3
LIMIT_S = 180.0
#: What ends after the ranks have begun to stand (a server that is no longer needed) is gone by then.
_SETTLE_S = 0.3

# What ranks that are weighed do before they end.
_HOLD = """
if "HOLD" in os.environ:
    open(f"stands{dist.get_rank()}", "w").close()
    while not os.path.exists("go"):
        time.sleep(0.02)
dist.destroy_process_group()
"""
_HELLO = (
    """
import os
import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
with open(f"reduced{dist.get_rank()}", "w") as file:
    file.write(str(time.monotonic()))
"""
    + _HOLD
)
_TRANSFORMERS = "from transformers import LlamaConfig, LlamaForCausalLM" + _HELLO
# The last line: without it torch 2.13 aborts at exit in every other job (benchmarks/exit.py), and a job that
# fails has no time of its exit.
_DDP = (
    """
import os
import time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(32, 64)).square().mean().backward()
    if step == 0:
        with open(f"reduced{dist.get_rank()}", "w") as file:
            file.write(str(time.monotonic()))
    optimizer.step()
"""
    + _HOLD
    + "time.sleep(0.02)\n"
)


@dataclass(slots=True, kw_only=True)
class Series:
    """The jobs of one launcher in one case.

    Attributes:
        reduced_s: Seconds to the last rank's first all_reduce.
        exit_s: Seconds to the launcher's exit, of jobs that ended well.
        pss_mb: Memory of all processes.
        complaints: What went wrong, job by job.
    """

    launcher: Launcher
    reduced_s: list[float] = field(default_factory=list)
    exit_s: list[float] = field(default_factory=list)
    pss_mb: list[float] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One script on so many ranks.

    Attributes:
        aim_s: The ratio that we aim at, of the time to the first all_reduce; ``aim_exit_s`` to the exit; ``aim_mb`` of the memory.
        flags: What rankwise is given beside.
        preloads: What rankwise is told to preload, one row each; empty for none.
    """

    group: str
    name: str = ""
    script: str
    num_ranks: int
    aim_s: float | None = None
    aim_exit_s: float | None = None
    aim_mb: float | None = None
    flags: tuple[str, ...] = ()
    preloads: tuple[str, ...] = ("",)

    @property
    def title(self) -> str:
        """The row's name, with a star if the ranks outnumber the cores."""
        star = " *" if self.num_ranks > count_cores() else ""
        return f"{self.group}{' ' * bool(self.name)}{self.name}, {self.num_ranks} rank{'s' if self.num_ranks > 1 else ''}{star}"

    def list_launchers(self) -> list[Launcher]:
        """Return ours, one for each kind of preload, and torchrun."""
        ours = [
            Launcher(
                f"{RANKWISE.name} --preload {preload}" if preload else RANKWISE.name,
                (*RANKWISE.argv, *self.flags, *(["--preload", preload] if preload else [])),
            )
            for preload in self.preloads
        ]
        return [*ours, TORCHRUN]


CASES = (
    *(
        Case(group="hello", script=_HELLO, num_ranks=num, aim_s=aim)
        for num, aim in ((1, 0.44), (2, 0.42), (4, 0.33), (8, 0.23))
    ),
    *(
        Case(group="ddp", script=_DDP, num_ranks=num, aim_s=aim, aim_mb=0.65 if num == 8 else None)
        for num, aim in ((2, 0.55), (4, 0.35), (8, 0.28))
    ),
    *(
        Case(group="resident", name=name, script=script, num_ranks=num, aim_exit_s=aim, flags=("--resident",))
        for name, script, aims in (("hello", _HELLO, (0.10, 0.08, 0.07)), ("ddp", _DDP, (0.15, 0.10, 0.08)))
        for num, aim in zip((2, 4, 8), aims, strict=True)
    ),
    Case(
        group="transformers",
        script=_TRANSFORMERS,
        num_ranks=2,
        preloads=("", "transformers", "transformers,transformers.models.llama.modeling_llama"),
    ),
)


def time_job(case: Case, series: Series) -> None:
    """Run a job through, and add its two times to a series."""
    with start_job(series.launcher, ["--nproc-per-node", str(case.num_ranks)], case.script) as job:
        ended_s = job.wait_end(LIMIT_S)
        notes = [job.folder / f"reduced{rank}" for rank in range(case.num_ranks)]
        if all(note.exists() for note in notes):
            series.reduced_s.append(max(float(note.read_text()) for note in notes) - job.started_s)
        if ended_s is None:
            series.complaints.append(f"not through within {LIMIT_S:.0f} s")
        elif job.process.returncode:
            series.complaints.append(f"exit code {job.process.returncode}")
        else:
            series.exit_s.append(ended_s - job.started_s)
        _complain_of_cold(job.errors, series)


def weigh_job(case: Case, series: Series) -> None:
    """Run a job up to the point where all ranks stand, and add its memory to a series."""
    flags = ["--nproc-per-node", str(case.num_ranks)]
    with start_job(series.launcher, flags, case.script, holds=True) as job:
        stands = [job.folder / f"stands{rank}" for rank in range(case.num_ranks)]
        if not job.wait_until(lambda: all(path.exists() for path in stands), LIMIT_S):
            series.complaints.append("the ranks did not get as far as to be weighed")
            return
        time.sleep(_SETTLE_S)
        series.pss_mb.append(sum_pss_bytes(list_job_processes()) / 1e6)
        (job.folder / "go").touch()
        job.wait_end(LIMIT_S)


def _complain_of_cold(errors: str, series: Series) -> None:
    series.complaints += [line for line in errors.splitlines() if line.startswith("rankwise: cold start")]


def measure(case: Case, num_rounds: int) -> list[Series]:
    """Run all jobs of a case, the launchers in turn."""
    found = [Series(launcher=launcher) for launcher in case.list_launchers()]
    for number in range(num_rounds):
        for series in found:
            time_job(case, series)
            if number < MEMORY_ROUNDS:
                weigh_job(case, series)
        reported = ", ".join(
            f"{one.launcher.name} {one.reduced_s[-1] if one.reduced_s else float('nan'):.2f} s" for one in found
        )
        print(f"{case.title}, round {number + 1} of {num_rounds}: {reported}", file=sys.stderr, flush=True)
    return found


def show_table(
    title: str,
    results: Sequence[tuple[Case, list[Series]]],
    take: Callable[[Series], list[float]],
    aim_of: Callable[[Case], float | None],
    digits: int,
) -> None:
    """Print one quantity of all cases, a row for each of our own series."""
    rows = [("", "rankwise", "torchrun", "ratio", "aim")]
    for case, found in results:
        *ours, theirs = found
        for series in ours:
            mine, peer, aim = take(series), take(theirs), aim_of(case)
            ratio = f"{statistics.median(mine) / statistics.median(peer):.2f}" if mine and peer else "-"
            rows.append(
                (
                    case.title + series.launcher.name.removeprefix(RANKWISE.name),
                    _spread(mine, digits),
                    _spread(peer, digits),
                    ratio,
                    "-" if aim is None else f"{aim:.2f}",
                )
            )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    print(f"\n{title}")
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _spread(values: list[float], digits: int) -> str:
    if not values:
        return "none"
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def show(results: Sequence[tuple[Case, list[Series]]]) -> None:
    """Print the tables, and below them what went wrong."""
    show_table(
        "seconds to the last rank's first all_reduce, median (min-max)",
        results,
        lambda series: series.reduced_s,
        lambda case: case.aim_s,
        2,
    )
    show_table(
        "seconds to the launcher's exit, median (min-max)",
        results,
        lambda series: series.exit_s,
        lambda case: case.aim_exit_s,
        2,
    )
    show_table(
        "PSS of all processes, MB, median (min-max)",
        results,
        lambda series: series.pss_mb,
        lambda case: case.aim_mb,
        0,
    )
    print(f"\n* more ranks than the {count_cores()} cores")
    for case, found in results:
        for series in found:
            for text in dict.fromkeys(series.complaints):
                times = series.complaints.count(text)
                print(f"{case.title.removesuffix(' *')}, {series.launcher.name}: {times} x {text}")


def main() -> None:
    """Measure the cases that were asked for, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"jobs of a row ({ROUNDS})")
    parser.add_argument("--only", choices=sorted({case.group for case in CASES}), help="these cases only")
    parser.add_argument(
        "--runs", type=int, metavar="N", help="so many runs of one resident server, and what it holds then"
    )
    args = parser.parse_args()
    prepare()
    with tempfile.TemporaryDirectory(prefix="benchmark_") as folder:
        os.environ["RANKWISE_RESIDENT_FOLDER"] = folder
        try:
            if args.runs:
                serve_many(args.runs)
            else:
                compare(args)
        finally:
            subprocess.run(
                [sys.executable, "-m", "rankwise", "resident", "stop"], check=False, stdout=subprocess.DEVNULL
            )


def serve_many(num_runs: int) -> None:
    """Run hello on two ranks again and again, from one server, and print its descriptors, children and memory."""
    case = next(case for case in CASES if case.group == "resident")
    series = Series(launcher=case.list_launchers()[0])
    for number in range(num_runs + 1):
        time_job(case, series)
        if number in {1, num_runs}:
            (server,) = list_servers()
            proc = Path(f"/proc/{server.pid}")
            print(
                f"after {server.served} runs: server {server.pid}, {len(list((proc / 'fd').iterdir()))} descriptors, {server.running} runs, "
                f"{len((proc / 'task' / str(server.pid) / 'children').read_text().split())} children, {server.memory_bytes / 1e6:.1f} MB",
                flush=True,
            )  # fmt: skip
    print(
        f"seconds to the launcher's exit: {_spread(series.exit_s, 2)}; {len(series.complaints)} complaints {series.complaints[:3]}"
    )


def compare(args: argparse.Namespace) -> None:
    """Run the cases, ours and torchrun's in turn."""
    cases = [case for case in CASES if args.only in {None, case.group}]
    if find_spec("transformers") is None:
        print("transformers is not installed: left out")
        cases = [case for case in cases if case.group != "transformers"]
    print(describe_host(), flush=True)
    results = list[tuple[Case, list[Series]]]()
    for case in cases:
        if case.flags or case.group not in {done.group for done, _ in results}:
            # The files of torch, and of what else the script imports, come from the disk only once; a resident server is
            # started once.
            for launcher in case.list_launchers():
                time_job(case, Series(launcher=launcher))
        results.append((case, measure(case, args.rounds)))
    show(results)


if __name__ == "__main__":
    main()
