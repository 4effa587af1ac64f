"""What a step of a whole training loop costs: by hand with torch, with our parts, with our Trainer, with the peers' loops.

The contenders (`parts/contenders.py`) train the same model on the same data with the same optimizer and the same options of DDP, on
`--ranks` ranks over Gloo on the CPU. All report their loss every ten steps. Our Trainer has its progress lines, journal and table
of steps on, and Lightning its progress bar and CSV logger; nobody saves or evaluates. The same loop by hand runs a second
time as "raw, again": how far its ratio is from 1 tells what the other ratios are worth.

Each framework owns its loop, so the time is taken where all of them pass by: where the loss function of a step begins. There a training also
waits for its next turn (`parts/turns.py`). All of them stand in the same ranks, and run in short blocks of steps: one block of each is a
round, in an order that is drawn anew. Of each round the ratio to "raw" (the mean of both) is taken, of wall time and of the
ranks' CPU time. After some rounds all are built anew, in another order, as where things lie in memory makes a difference. Printed are
medians, and the median ratio with its 95 % confidence bounds, as in `benchmarks/steps.py`. What comes only every hundred steps, such as the norms of the
parameters, is in one of five blocks, and a median hardly sees it: `--block 100` does. The aims: plain parts 1.01, Trainer 1.03 at most.

    python benchmarks/trainer.py [--rounds N] [--model mlp|gpt] [--optimizer sgd|adamw] [--data tensors|items]
                                 [--only plain trainer]

The data are a TensorDataset. `--data items` gives the same samples from a data set with a `__getitem__` of its own; our loader seeds each of them.

What is printed goes to a file, as a job's output does. With `--terminal` the ranks have a terminal, which nobody looks at, so that bars move. They are
moved by threads, which would run in the others' turns too; so each training then runs alone, from its beginning to its end.

    python benchmarks/trainer.py --gpu

is another measurement: tokens per second, and the most memory, of a GPT of 124 million parameters, in bfloat16, compiled, on one GPU;
each training alone, and without DDP where that is the framework's choice. `--gpu --tiny` goes the same way with a tiny one on the CPU: its numbers mean nothing.

The machine should be idle.
"""

from __future__ import annotations

import argparse
import gc
import os
import pty
import random
import statistics
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from parts.contenders import CONTENDERS, NEEDS
from parts.spreads import MESHES
from parts.tasks import Readings, Task, Watch
from parts.turns import Lane
from steps import bound_median

import rankwise
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

ROUNDS, BUILDS, BLOCK = 400, 8, 20
#: With --terminal one training is one round: the blocks of each are longer, and there are more of them.
ALONE_ROUNDS, ALONE_BLOCK = 12, 100
GPU_ROUNDS, GPU_BLOCK = 3, 40
#: Rounds of each build that don't count: DDP builds its buckets, models are compiled, and caches fill.
WARM_ROUNDS = 3
AIMS = {"plain parts": 1.01, "Trainer": 1.03}
KINDS = ("wall", "CPU")
LIMIT_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the ranks are told to do.

    Attributes:
        names: The contenders.
        rounds: Rounds of each build.
        builds: How often all are built anew.
        block: Steps of a round.
        is_alone: Whether each training runs from its beginning to its end, and not in turn with the others.
        is_on_gpu: Whether each rank has a GPU.
        has_terminal: Whether the ranks print to a terminal.
    """

    task: Task
    names: tuple[str, ...]
    rounds: int
    builds: int
    block: int
    is_alone: bool
    is_on_gpu: bool
    has_terminal: bool


@contextmanager
def printing_elsewhere(folder: Path, rank: int, *, has_terminal: bool) -> Iterator[None]:
    """Let all that is printed go to a file, or to a terminal that another process empties."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    reader = None
    if has_terminal:
        seen_by, target = pty.openpty()
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
        reader = subprocess.Popen(["cat"], stdin=seen_by, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(seen_by)
    else:
        target = os.open(folder / f"printed-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(target, descriptor)
    os.close(target)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, old in zip((1, 2), kept, strict=True):
            os.dup2(old, descriptor)
            os.close(old)
        if reader is not None:
            reader.terminate()
            reader.wait()


def measure(plan: Plan, folder_name: str) -> dict[str, Readings]:
    """In a rank: train with all contenders; return what was read."""
    folder = Path(folder_name)
    ctx = rankwise.init(device=None if plan.is_on_gpu else "cpu", mesh=MESHES.get(plan.task.spread) or None)
    torch.set_num_threads(1)
    found = {name: Readings() for name in plan.names}
    with ctx, printing_elsewhere(folder, ctx.rank, has_terminal=plan.has_terminal):
        for build in range(plan.builds):
            draw = random.Random(build)  # the same on all ranks
            watches = {name: Watch(plan.block, ctx.device) for name in plan.names}
            folders = {name: folder / f"{build}-{name.replace(' ', '-')}" for name in plan.names}
            (run_alone if plan.is_alone else run_in_turn)(plan, watches, folders, draw)
            for name, watch in watches.items():
                found[name].add(watch, num_warm=WARM_ROUNDS)
    return found


def run_in_turn(plan: Plan, watches: dict[str, Watch], folders: dict[str, Path], draw: random.Random) -> None:
    """Build all trainings, and let each do one block in each round."""
    lanes = {}
    for name in draw.sample(plan.names, len(plan.names)):
        work = partial(CONTENDERS[name], plan.task, watches[name], folders[name])
        lanes[name] = Lane(work, begin=partial(rankwise.barrier, "a block"))
        watches[name].pause = lanes[name].pause
        lanes[name].go()
    clean(watches[plan.names[0]].device)
    # What was built lives on: only what the steps themselves leave is to be looked through.
    gc.freeze()
    for _ in range(WARM_ROUNDS + plan.rounds):
        for name in draw.sample(plan.names, len(plan.names)):
            lanes[name].go()
    for lane in lanes.values():
        while not lane.is_over:
            lane.go()
    gc.unfreeze()
    clean(watches[plan.names[0]].device)


def run_alone(plan: Plan, watches: dict[str, Watch], folders: dict[str, Path], draw: random.Random) -> None:
    """Let each training run from its beginning to its end, in this thread."""
    for name in draw.sample(plan.names, len(plan.names)):
        clean(watches[name].device)
        rankwise.barrier("a training")
        CONTENDERS[name](plan.task, watches[name], folders[name])


def clean(device: torch.device) -> None:
    """Leave nothing of a training to the next."""
    gc.collect()
    if device.type == "cuda":
        torch.compiler.reset()
        torch.cuda.empty_cache()


def shorten(name: str) -> str:
    """Return what a contender is called on the command line."""
    return name.split(maxsplit=1)[0].strip(",").lower()


def choose_names(only: list[str]) -> tuple[str, ...]:
    """Return the contenders that are asked for and can be had; say which can't."""
    names = []
    for name in CONTENDERS:
        short = shorten(name)
        if only and short not in only and short != "raw":
            continue
        try:
            for module in NEEDS.get(name, ()):
                import_module(module)
        except ImportError as error:
            print(f"{name} is left out: {error}")
        else:
            names.append(name)
    return tuple(names)


def name_versions() -> str:
    """Name what is compared."""
    found = [f"torch {torch.__version__}"]
    for name in ("accelerate", "lightning", "deepspeed"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def average(ranks: list[dict[str, Readings]], name: str, kind: str) -> list[float]:
    """Return a number of each round, the mean of the ranks: they run in step."""
    return [statistics.fmean(same) for same in zip(*(getattr(found[name], kind) for found in ranks), strict=True)]


def print_table(plan: Plan, ranks: list[dict[str, Readings]], aim: float | None = None) -> None:
    """Print times and ratios; ``aim``: what ours should reach, in place of the usual."""
    print(f"{'':14}{'time':8}{'a step':>10}{'ratio':>8}  {'95 % bounds':16}  aim")
    for name in plan.names:
        for kind in KINDS:
            values = average(ranks, name, kind)
            raw = average(ranks, "raw", kind)
            if name == "raw":
                print(f"{name:14}{kind:8}{statistics.median(values) * 1e6:7.0f} us")
                continue
            if name != "raw, again":
                again = average(ranks, "raw, again", kind)
                raw = [(one + other) / 2 for one, other in zip(raw, again, strict=True)]
            ratio, low, high = bound_median([one / other for one, other in zip(values, raw, strict=True)])
            wanted = f"<= {aim or AIMS[name]}" if name in AIMS and kind == "wall" else ""
            print(
                f"{name:14}{kind:8}{statistics.median(values) * 1e6:7.0f} us{ratio:8.3f}  {f'{low:.3f} to {high:.3f}':16}  {wanted}"
            )


def print_gpu_table(plan: Plan, ranks: list[dict[str, Readings]]) -> None:
    """Print tokens per second of all ranks, and memory of the fullest."""
    tokens = plan.task.batch * plan.task.terms * plan.task.world_size
    raw = average(ranks, "raw", "wall")
    print(f"{'':14}{'tokens/s':>12}{'of raw':>9}  {'least to most':18}{'memory':>10}")
    for name in plan.names:
        values = average(ranks, name, "wall")
        # A ratio of speeds: above 1 is faster than raw.
        ratios = sorted(other / one for one, other in zip(values, raw, strict=True))
        peak = max(found[name].peak_bytes for found in ranks)
        spread = f"{ratios[0]:.3f} to {ratios[-1]:.3f}"
        memory = f"{peak / 2**30:.2f} GiB" if peak else "-"
        print(
            f"{name:14}{tokens / statistics.median(values):12,.0f}{statistics.median(ratios):9.3f}  {spread:18}{memory:>10}"
        )


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--rounds",
        type=int,
        help=f"default: {ROUNDS}, with --terminal {ALONE_ROUNDS}, with --gpu {GPU_ROUNDS}",
    )
    parser.add_argument(
        "--block",
        type=int,
        help=f"steps of a round; default: {BLOCK}, with --terminal {ALONE_BLOCK}, with --gpu {GPU_BLOCK}",
    )
    parser.add_argument("--builds", type=int, default=BUILDS, help=f"how often all are built anew; default: {BUILDS}")
    parser.add_argument("--ranks", type=int, help="default: 2, with --gpu 1")
    parser.add_argument("--batch", type=int, help="samples of a step on each rank; default: 16")
    parser.add_argument("--model", choices=("mlp", "gpt"), default="mlp")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), help="default: sgd, with --gpu a fused adamw")
    parser.add_argument(
        "--data",
        choices=("tensors", "items"),
        default="tensors",
        help="torch's TensorDataset, or a class of one's own",
    )
    parser.add_argument("--fused", action="store_true", help="let the optimizers of all run fused")
    parser.add_argument("--terminal", action="store_true", help="let the ranks print to a terminal")
    short = sorted({shorten(name) for name in CONTENDERS} - {"raw"})
    parser.add_argument(
        "--only", nargs="+", choices=short, default=[], metavar="NAME", help=f"beside raw: {', '.join(short)}"
    )
    parser.add_argument("--gpu", action="store_true", help="a GPT of 124M parameters on a GPU")
    parser.add_argument("--tiny", action="store_true", help="with --gpu: try it without one")
    return parser.parse_args()


def make_plan(arguments: argparse.Namespace) -> Plan:
    """Say what the ranks shall do."""
    on_gpu, is_alone = arguments.gpu, arguments.gpu or arguments.terminal
    rounds = arguments.rounds or (GPU_ROUNDS if on_gpu else ALONE_ROUNDS if is_alone else ROUNDS)
    builds = rounds if is_alone else min(arguments.builds, rounds)
    block = arguments.block or (GPU_BLOCK if on_gpu else ALONE_BLOCK if is_alone else BLOCK)
    task = Task(
        model=("tiny" if arguments.tiny else "124M") if on_gpu else arguments.model,
        optimizer=arguments.optimizer or ("adamw" if on_gpu else "sgd"),
        fused=arguments.fused or on_gpu,
        batch=arguments.batch or 16,
        # One more begins, where the last block ends.
        steps=(WARM_ROUNDS + rounds // builds) * block + 1,
        world_size=arguments.ranks or (1 if on_gpu else 2),
        precision="bf16" if on_gpu else "fp32",
        is_own_data=arguments.data == "items",
        # What inductor makes needs a C++ compiler on a CPU; the way there is the same.
        compiler=("aot_eager" if arguments.tiny else "inductor") if on_gpu else None,
    )
    names = choose_names(arguments.only)
    return Plan(
        task=task,
        names=tuple(
            name for name in names if name != "DeepSpeed" and not (on_gpu and name in ("raw, again", "loader + DDP"))
        ),
        rounds=rounds // builds,
        builds=builds,
        block=block,
        is_alone=is_alone,
        is_on_gpu=on_gpu and not arguments.tiny,
        has_terminal=arguments.terminal,
    )


def main() -> None:
    """Measure all and print a table."""
    arguments = read_arguments()
    if arguments.gpu and not arguments.tiny and not torch.cuda.is_available():
        print("skipped: --gpu needs a CUDA device, and there is none; --gpu --tiny tries the way on the CPU")
        return
    plan = make_plan(arguments)
    task = plan.task
    print(
        f"{name_versions()}; {task.world_size} ranks, {plan.builds} x {plan.rounds} rounds of {plan.block} steps{', each training alone' if plan.is_alone else ''}\n"
        f"model {task.model}, {task.optimizer}{' fused' if task.fused else ''}, {task.batch} samples a step on each rank from {'items' if task.is_own_data else 'tensors'}, {'a terminal' if plan.has_terminal else 'no terminal'}"
    )
    with tempfile.TemporaryDirectory(prefix="rankwise-trainer-") as folder:
        ranks = run_ranks(measure, task.world_size, plan, folder, timeout_s=LIMIT_S, cuda=plan.is_on_gpu)
    (print_gpu_table if arguments.gpu else print_table)(plan, ranks)


if __name__ == "__main__":
    main()
