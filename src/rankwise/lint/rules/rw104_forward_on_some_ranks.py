"""Only some ranks run a wrapped model.

**Why it breaks.** The forward pass of DistributedDataParallel broadcasts the model's buffers (BatchNorm) from rank 0;
that of a sharded model gathers its parameters. Both are collectives. Evaluation on rank 0 alone hangs, or works by
accident until the next barrier, metric or last epoch.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
if dist.get_rank() == 0:
    with torch.no_grad():
        print(model(torch.ones(2, 4)))
dist.barrier()
```

Good:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
if dist.get_rank() == 0:
    with torch.no_grad():
        print(model.module(torch.ones(2, 4)))
dist.barrier()
dist.destroy_process_group()
```

**When it says nothing.** `model.module(...)`, a model known to have no buffers, `broadcast_buffers=False`. Where the
model's code is not available it is a warning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.library.names import DDP
from rankwise.lint.model.values import Object
from rankwise.lint.paths.found import missed_ops
from rankwise.lint.paths.words import also, called, tested, who
from rankwise.lint.rule import Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script


def check(script: Script) -> Iterator[Finding]:
    """Forward passes that some of the simulated ranks do not make."""
    for one in missed_ops(script, "forward"):
        op, guard = one.op, one.guard
        model = called(op).removesuffix("()")
        thing = op.call.receiver.thing
        is_ddp = isinstance(thing, Object) and thing.kind == DDP
        why = "each forward pass broadcasts its buffers" if is_ddp else "each forward pass gathers its shards"
        fix = (
            f"evaluate with {model}.module on this rank, or let every rank evaluate"
            if is_ddp
            else f"let every rank run {model}"
        )
        yield script.finding(
            RULE,
            one.at,
            f"{who(one.doers, one.others, 'run')} {model} (`{tested(op, guard)}`), which is distributed over all ranks: {why}",
            fix,
            severity="error" if one.is_sure else "warning",
            also=also(op, one.at, guard),
        )


RULE: Rule[Script] = Rule(
    id="RW104",
    name="forward-on-some-ranks",
    severity="error",
    classes=("D17", "D18", "C1"),
    summary="only some ranks run a model that is distributed over all",
    check=check,
)
