"""What a step costs, and what each rank holds, where a model is spread over the ranks: by hand with torch, with ours, with the peers.

The spreads: FSDP2, ZeRO-1, hybrid sharding, tensor parallel, and both (`parts/spreads.py`); a GPT on `--ranks` ranks over Gloo on the CPU.

- Time: as in `benchmarks/trainer.py`, all contenders in the same ranks and in turn. The aim: 1.02 times by hand.
- Memory: each contender alone in ranks of its own, with a model of 26 million parameters and AdamW. `held` is a rank's part of parameters and
  optimizer states beside the ideal share, all of it divided by the ranks; the aim: 1.05. `peak` is what the process had at most above what it had
  before the model was built (its parameters are built whole, by all contenders), beside by hand; our Trainer's holds the copy from which it
  writes its last checkpoint, which no other writes.

Accelerate and Lightning take part in FSDP only; Lightning with its ModelParallelStrategy, which trains the model as torch's functions have spread it.
DeepSpeed, where it is installed (`DS_ACCELERATOR=cpu` on a host without a GPU), trains with its own ZeRO-3 and ZeRO-1; what its engine holds is not
counted, as its parameters are views of buffers of its own.

Run it as `python benchmarks/sharded.py [--rounds N] [--ranks N] [--spread NAME ...] [--only NAME ...] [--what time memory]`; the machine should be idle.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from parts.contenders import CONTENDERS
from parts.spreads import MESHES
from parts.tasks import Readings, Task
from trainer import LIMIT_S, WARM_ROUNDS, Plan, choose_names, measure, name_versions, print_table, shorten

import rankwise
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

ROUNDS, BUILDS, BLOCK = 80, 4, 4
#: What each is spread by.
PEERS = {"fsdp": ("Accelerate", "Lightning", "DeepSpeed"), "zero1": ("DeepSpeed",)}
#: Each reads its own ranks' memory, so that it stands alone.
MEMORY_STEPS = 6


def measure_memory(plan: Plan, folder_name: str) -> tuple[int, int]:
    """In a rank: train with the first contender, alone; return the bytes that it holds, and the most that the process had above its start."""
    before = read_memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what there is
    found = measure(plan, folder_name)
    return found[plan.names[0]].held_bytes, read_memory("VmHWM") - before


def read_memory(name: str) -> int:
    """Return a figure of this process, in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    return int(found[1]) * 1024 if found else 0


def count_ideal(task: Task) -> float:
    """Return the bytes of parameters and AdamW's two states, divided by the ranks; what a spread keeps whole is counted whole."""
    with torch.device("meta"):
        model = task.build_model()
    parts = {
        "zero1": (1, task.world_size),
        "hsdp": (task.world_size // 2, task.world_size // 2),
    }.get(task.spread, (task.world_size, task.world_size))
    total = 0.0
    for name, parameter in model.named_parameters():
        of_weights, of_states = parts
        if task.spread == "tp" and not re.search(r"mlp\.(0|2\.weight)", name):
            of_weights = of_states = 1
        elif task.spread == "tp-fsdp" and not re.search(r"mlp\.(0|2\.weight)", name):
            of_weights = of_states = task.world_size // 2
        total += parameter.nbytes / of_weights + 2 * parameter.nbytes / of_states
    return total


def compare_memory(plan: Plan) -> None:
    """Print what each contender holds."""
    plan = replace(
        plan,
        builds=1,
        is_alone=True,
        block=1,
        task=replace(plan.task, model="wide", optimizer="adamw", batch=4, steps=MEMORY_STEPS),
    )
    ideal, by_hand = count_ideal(plan.task), 0
    print(f"{'':14}{'held':>10}{'of ideal':>10}{'peak':>10}{'of by hand':>12}")
    for name in plan.names:
        if name == "raw, again":
            continue
        alone = replace(plan, names=(name,))
        with tempfile.TemporaryDirectory(prefix="rankwise-sharded-") as folder:
            ranks = run_ranks(measure_memory, plan.task.world_size, alone, folder, timeout_s=LIMIT_S, cuda=False)
        held, peak = max(held for held, _ in ranks), max(peak for _, peak in ranks)
        by_hand = by_hand or peak
        print(f"{name:14}{held / 2**20:6.1f} MiB{held / ideal:10.3f}{peak / 2**20:6.0f} MiB{peak / by_hand:12.3f}")


def compare_times(plan: Plan) -> None:
    """Print what a step of each contender costs."""
    with tempfile.TemporaryDirectory(prefix="rankwise-sharded-") as folder:
        ranks: Sequence[dict[str, Readings]] = run_ranks(
            measure, plan.task.world_size, plan, folder, timeout_s=LIMIT_S, cuda=False
        )
    print_table(plan, list(ranks), aim=1.02)


def make_plan(spread: str, arguments: argparse.Namespace) -> Plan:
    """Say what the ranks shall do."""
    builds = min(BUILDS, arguments.rounds)
    rounds = arguments.rounds // builds
    task = Task(
        model="gpt",
        optimizer="adamw",
        fused=False,
        batch=16,
        steps=(WARM_ROUNDS + rounds) * BLOCK + 1,
        world_size=arguments.ranks,
        spread=spread,
    )
    ours = ("raw", "raw, again", "plain parts", "Trainer")
    names = tuple(name for name in choose_names(arguments.only) if name in (*ours, *PEERS.get(spread, ())))
    return Plan(
        task=task,
        names=names,
        rounds=rounds,
        builds=builds,
        block=BLOCK,
        is_alone=False,
        is_on_gpu=False,
        has_terminal=False,
    )


def main() -> None:
    """Measure each spread and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--spread", nargs="+", choices=tuple(MESHES), default=["fsdp", "zero1", "tp"])
    parser.add_argument("--only", nargs="+", choices=sorted({shorten(name) for name in CONTENDERS}), default=[])
    parser.add_argument("--what", nargs="+", choices=("time", "memory"), default=["time", "memory"])
    arguments = parser.parse_args()
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    print(f"rankwise {rankwise.__version__}, {name_versions()}; {arguments.ranks} ranks")
    for spread in arguments.spread:
        plan = make_plan(spread, arguments)
        print(f"\n{spread}")
        if "time" in arguments.what:
            compare_times(plan)
        if "memory" in arguments.what:
            compare_memory(plan)


if __name__ == "__main__":
    main()
