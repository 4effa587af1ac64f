"""Only some ranks run the backward pass of a wrapped model.

**Why it breaks.** The backward pass averages gradients over all ranks. If a rank skips it, the others block, or are
paired with that rank's next collective.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(2, 1))
for step in range(10):
    loss = model(torch.ones(1, 2)).sum()
    if dist.get_rank() != 0:
        loss.backward()
```

Good:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(2, 1))
for step in range(10):
    loss = model(torch.ones(1, 2)).sum()
    loss.backward()
dist.destroy_process_group()
```

**When it says nothing.** The loss does not come from a wrapped model; inside `no_sync()`; inside `join()`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.paths.found import missed_ops
from rankwise.lint.paths.words import also, called, tested, who
from rankwise.lint.rule import Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script


def check(script: Script) -> Iterator[Finding]:
    """Backward passes that some of the simulated ranks do not make."""
    for one in missed_ops(script, "backward"):
        op, guard = one.op, one.guard
        yield script.finding(
            RULE,
            one.at,
            f"{who(one.doers, one.others, 'reach')} {called(op)} (`{tested(op, guard)}`), where gradients are averaged over"
            " all ranks: it waits for the others",
            "make every rank run the same number of backward passes",
            severity="error" if one.is_sure else "warning",
            also=also(op, one.at, guard),
        )


RULE: Rule[Script] = Rule(
    id="RW106",
    name="backward-on-some-ranks",
    severity="error",
    classes=("C27", "D14", "C1"),
    summary="only some ranks run the backward pass of a wrapped model",
    check=check,
)
