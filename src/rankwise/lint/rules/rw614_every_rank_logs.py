"""Every rank opens its own run, writer or progress bar.

**Why it breaks.** W&B gets as many runs as there are ranks, all with the same name; TensorBoard's curves zigzag between
the ranks' values in one folder; bars and lines on the terminal overwrite each other.

Bad:

```python
import torch
import torch.distributed as dist
import wandb

dist.init_process_group("gloo")
wandb.init(project="mine")
dist.barrier()
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist
import wandb

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    wandb.init(project="mine")
dist.barrier()
dist.destroy_process_group()
```

**When it says nothing.** A test on the rank encloses it, an argument depends on the rank (``mode``, ``disable``, the
folder), ``group=`` says that many runs are wanted, or the script replaces ``print`` on the other ranks.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import differs, is_distributed, node_in, once, places, starts_group
from rankwise.lint.topics.saved_files import is_chosen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script
    from rankwise.lint.topics.job_view import Place

_RUNS = {
    "wandb.init": "opens its own run in W&B",
    "mlflow.start_run": "starts its own run in MLflow",
    "torch.utils.tensorboard.SummaryWriter": "writes events into one folder",
    "tensorboardX.SummaryWriter": "writes events into one folder",
    "torch.utils.tensorboard.writer.SummaryWriter": "writes events into one folder",
    "neptune.init_run": "opens its own run in Neptune",
    "comet_ml.Experiment": "opens its own experiment in Comet",
    "aim.Run": "opens its own run in Aim",
}
_BARS = frozenset(
    {"tqdm.tqdm", "tqdm.auto.tqdm", "tqdm.trange", "tqdm.auto.trange", "tqdm.std.tqdm", "rich.progress.track"}
)


def check(script: Script) -> Iterator[Finding]:
    """Runs, writers and bars of all ranks; the first bar and the first print only."""
    shown: set[str] = set()
    lines: set[int] = set()
    for place in once(places(script, *_RUNS, *_BARS, "builtins.print", anywhere=True)):
        call, at = place.calls[0], node_in(script, place.calls[0])
        if (
            at is None
            or not _is_made_by_ranks(place)
            or any(differs(value) for value in (*call.args, *call.kwargs.values()))
        ):
            continue
        line = getattr(at, "lineno", 0)
        if line in lines:
            continue
        if call.name in _RUNS and "group" not in call.kwargs:
            lines.add(line)
            yield script.finding(
                RULE, at, f"every rank {_RUNS[call.name]}", "do it on rank 0 only: `if dist.get_rank() == 0:`"
            )
        elif (call.name not in _RUNS and call.loops and call.name not in shown) or (
            call.name in _BARS and call.name not in shown
        ):
            if _is_quiet(script, call.name) or (call.name in _BARS and "disable" in call.kwargs):
                continue
            shown.add(call.name)
            what, fix = (
                ("print", "if dist.get_rank() == 0:")
                if call.name == "builtins.print"
                else ("bar", "disable=dist.get_rank() != 0")
            )
            yield script.finding(
                RULE, at, f"every rank shows this {what}, overwriting the others", f"`{fix}`", severity="hint"
            )


def _is_made_by_ranks(place: Place) -> bool:
    calls = place.entry.histories[0].calls
    is_spawning = any("spawned" in one.contexts for one in calls)
    is_rank = not is_spawning or "spawned" in place.calls[0].contexts
    return (
        is_rank
        and place.is_made_by_all
        and is_distributed(place.entry)
        and any(starts_group(one) for one in calls)
        and not is_chosen(place.calls[0])
    )


def _is_quiet(script: Script, name: str) -> bool:
    """Whether `print` means something else on other ranks, or by rank."""
    if name != "builtins.print":
        return False
    return (
        "builtins.print" in script.piece.code
        or "setup_for_distributed" in script.piece.code
        or any(isinstance(node, ast.FunctionDef) and node.name == "print" for node in ast.walk(script.tree))
    )


RULE: Rule[Script] = Rule(
    id="RW614",
    name="every-rank-logs",
    severity="warning",
    classes=("M5",),
    summary="every rank opens its own run, writer or progress bar",
    check=check,
)
