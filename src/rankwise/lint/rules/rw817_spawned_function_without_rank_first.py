"""The function passed to ``mp.spawn`` does not take its rank first.

**Why it breaks.** ``mp.spawn`` calls ``fn(i, *args)``: the process index comes first. With ``def work(world_size,
rank)`` and ``args=(2,)`` each process gets its index as the world size, and all have rank 2: they wait for each other,
or fail.

Bad:

```python
import torch.multiprocessing as mp

def work(world_size, rank):
    print(rank, world_size)

if __name__ == "__main__":
    mp.spawn(work, args=(2,), nprocs=2)
```

Good:

```python
import torch.multiprocessing as mp

def work(rank, world_size):
    print(rank, world_size)

if __name__ == "__main__":
    mp.spawn(work, args=(2,), nprocs=2)
```

**When it says nothing.** The first parameter may be a process index (``rank``, ``gpu``, ``i``, ``_``), or no later one
is called a rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.finding import span_of
from rankwise.lint.rule import Rule
from rankwise.lint.topics.spawning import spawns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script

_NEVER_RANKS = frozenset({"world_size", "worldsize", "world", "nprocs", "n_procs", "num_procs", "num_processes", "ngpus", "n_gpus", "num_gpus",
                          "ngpus_per_node", "args", "opt", "opts", "options", "config", "cfg", "hparams", "model", "dataset",
                          "epochs", "num_epochs", "total_epochs", "batch_size", "backend", "port"})  # fmt: skip
_RANKS = frozenset({"rank", "local_rank", "gpu", "gpu_id", "proc_id", "process_id", "global_rank"})


def check(script: Script) -> Iterator[Finding]:
    """Functions whose first parameter is not a rank, but a later one is."""
    for scopes, spawn in spawns(script):
        function = scopes.called_function(spawn.target) if spawn.target is not None else None
        if function is None or not spawn.passes_rank or function.decorator_list:
            continue
        names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
        later = next((one for one in names[1:] if one in _RANKS), "")
        if not later or names[0] not in _NEVER_RANKS:
            continue
        order = [later, *(one for one in names if one != later)]
        yield script.finding(
            RULE,
            spawn.call,
            f"`{spawn.word}` passes the process index first: `{names[0]}` gets it, and `{later}` is the same in all processes",
            f"take the rank first: `def {function.name}({', '.join(order)})`",
            also=[
                (
                    "the function",
                    script.piece.path,
                    span_of((*function.args.posonlyargs, *function.args.args)[0], script.lines),
                )
            ],
        )


RULE: Rule[Script] = Rule(
    id="RW817",
    name="spawned-function-without-rank-first",
    severity="error",
    classes=("L13",),
    summary="the function passed to mp.spawn does not take its rank first",
    check=check,
    needs_ranks=False,
)
