"""How many jobs end wrongly although their script is through: rankwise, warm and cold, and torchrun, in turn.

torch 2.13 may abort a Gloo rank while its interpreter goes down ("terminate called without an active exception",
pytorch#190489). Four scripts of four ranks: DDP or plain all_reduce, five steps, with and without
destroy_process_group at the end. A job counts as wrong if its exit code is not 0, if a rank wrote the line "terminate
called", if a rank ended with another code than 0 (rankwise forgives the abort, and says so in its report), or if it
is not through after LIMIT_S.

Run it as `python benchmarks/exit.py [--jobs N] [--torchrun-jobs N]`, where N is the number of jobs for each script.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter

from parts.jobs import RANKWISE, TORCHRUN, Job, Launcher, count_cores, describe_host, prepare, start_job

JOBS = 50
TORCHRUN_JOBS = 10
RANKS = 4
LIMIT_S = 60.0

_DDP = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
"""
_REDUCE = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for _ in range(5):
    dist.all_reduce(torch.ones(1000))
"""
_DESTROY = "dist.destroy_process_group()\n"

SCRIPTS = {
    "DDP, no destroy": _DDP,
    "DDP, destroy": _DDP + _DESTROY,
    "all_reduce, no destroy": _REDUCE,
    "all_reduce, destroy": _REDUCE + _DESTROY,
}
COLD = Launcher("rankwise --cold", (*RANKWISE.argv, "--cold"))
LAUNCHERS = (RANKWISE, COLD, TORCHRUN)


def find_wrong(launcher: Launcher, script: str) -> str:
    """Run a job; tell what was wrong with its end, empty if nothing was."""
    is_ours = launcher is not TORCHRUN
    report = ["--report", "report.json"] if is_ours else []
    with start_job(launcher, ["--nproc-per-node", str(RANKS), *report], script) as job:
        wrong = _judge(job, launcher)
        if wrong and is_ours:
            print(f"{launcher.name}: {wrong}\n{job.errors[-2000:]}", file=sys.stderr, flush=True)
        return wrong


def _judge(job: Job, launcher: Launcher) -> str:
    if job.wait_end(LIMIT_S) is None:
        return f"not through within {LIMIT_S:.0f} s"
    errors = job.errors
    if launcher is RANKWISE and "rankwise: cold start" in errors:
        return "not forked from a warm server"
    if job.process.returncode:
        abort = ", terminate called" if "terminate called" in errors else ""
        return f"exit code {job.process.returncode}{abort}"
    if "terminate called" in errors:
        return "terminate called, and forgiven"
    return "" if launcher is TORCHRUN else _find_wrong_exit(job)


def _find_wrong_exit(job: Job) -> str:
    """Look for ranks that did not end with 0 in a job that did."""
    exits = json.loads((job.folder / "report.json").read_text())["exits"]
    if len(exits) != RANKS:
        return f"the report tells the end of {len(exits)} ranks"
    wrong = sorted({code for code in exits.values() if code != 0})
    return f"a rank's exit code {wrong[0]}, and forgiven" if wrong else ""


def measure(script: str, num_jobs: dict[str, int]) -> dict[str, Counter[str]]:
    """Run all jobs of one script, the launchers in turn; count what was wrong, by launcher."""
    found = {launcher.name: Counter[str]() for launcher in LAUNCHERS}
    for number in range(max(num_jobs.values())):
        for launcher in LAUNCHERS:
            if number < num_jobs[launcher.name] and (wrong := find_wrong(launcher, script)):
                found[launcher.name][wrong] += 1
        if number % 10 == 9:
            print(f"{number + 1} jobs each", file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Count for all scripts, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=JOBS, metavar="N", help=f"jobs a script, ours ({JOBS})")
    parser.add_argument(
        "--torchrun-jobs",
        type=int,
        default=TORCHRUN_JOBS,
        metavar="N",
        help=f"jobs a script, torchrun's ({TORCHRUN_JOBS})",
    )
    parser.add_argument("--cold-jobs", type=int, metavar="N", help="jobs a script, ours with --cold (as --jobs)")
    args = parser.parse_args()
    prepare()
    cold_jobs = args.jobs if args.cold_jobs is None else args.cold_jobs
    num_jobs = {RANKWISE.name: args.jobs, COLD.name: cold_jobs, TORCHRUN.name: args.torchrun_jobs}
    print(describe_host())
    more = f", more than the {count_cores()} cores" if count_cores() < RANKS else ""
    print(f"{RANKS} ranks{more}; jobs that ended wrongly; the aim is 0 for rankwise\n")
    columns = [24, *(max(12, len(launcher.name)) for launcher in LAUNCHERS)]
    _print_row(["", *num_jobs], columns)
    kinds, totals = Counter[tuple[str, str, str]](), Counter[str]()
    for name, script in SCRIPTS.items():
        found = measure(script, num_jobs)
        _print_row([name, *(f"{found[one].total()} of {num}" for one, num in num_jobs.items())], columns)
        for launcher, wrongs in found.items():
            totals[launcher] += wrongs.total()
            kinds.update({(launcher, name, wrong): times for wrong, times in wrongs.items()})
    all_jobs = {one: num * len(SCRIPTS) for one, num in num_jobs.items()}
    _print_row(["all", *(f"{totals[one]} of {num}" for one, num in all_jobs.items())], columns)
    if kinds:
        print()
    for (launcher, name, wrong), times in kinds.items():
        print(f"{launcher}: {name}: {times} x {wrong}")
    ratios = {one: totals[one] / num if num else None for one, num in all_jobs.items()}
    mine, peer = ratios[RANKWISE.name], ratios[TORCHRUN.name]
    if mine is not None and peer:
        print(f"\nratio of the shares, rankwise by torchrun: {mine / peer:.3f}")


def _print_row(texts: list[str], widths: list[int]) -> None:
    print("  ".join(text.ljust(width) for text, width in zip(texts, widths, strict=True)).rstrip(), flush=True)


if __name__ == "__main__":
    main()
