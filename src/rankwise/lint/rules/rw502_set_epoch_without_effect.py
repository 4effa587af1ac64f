"""set_epoch is called where it has no effect: before the epochs, with a constant, or after the order was drawn.

**Why it breaks.** The order is drawn from ``seed + epoch`` when the loop over the loader begins. A call before all
epochs, or with the same number each time, gives the same order in each epoch. A call inside the loop over the batches,
or after it, comes one epoch late: the first two epochs are equal.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
dataset = TensorDataset(torch.arange(6400.0).unsqueeze(1))
sampler = DistributedSampler(dataset)
sampler.set_epoch(0)
loader = DataLoader(dataset, batch_size=32, sampler=sampler)
model = DDP(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for epoch in range(10):
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
dataset = TensorDataset(torch.arange(6400.0).unsqueeze(1))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=32, sampler=sampler)
model = DDP(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for epoch in range(10):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
dist.destroy_process_group()
```

**When it says nothing.** Another call of ``set_epoch`` on the same sampler takes effect; ``set_epoch(epoch + 1)`` at
the end of an epoch; samplers that do not shuffle.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.data_flow import here, shown
from rankwise.lint.topics.epochs import loops_of, reshuffled, set_epoch_calls
from rankwise.lint.topics.job_view import text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.base.findings import Severity
    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Script
    from rankwise.lint.topics.data_flow import Pass


def check(script: Script) -> Iterator[Finding]:
    """Samplers whose set_epoch calls are all in the wrong place."""
    for one in reshuffled(script):
        first = one.passes[0]
        loops = loops_of(first, one)
        calls = set_epoch_calls(first)
        unclear = [call for call in first.history.calls if call.name == "?.set_epoch"]
        faults = [_fault(call, first, loops) for call in calls]
        if unclear or not calls or None in faults:
            continue
        for call, fault in zip(calls, faults, strict=True):
            node = here(script, call)
            if node is not None and fault is not None:
                target = next(
                    (text_of(loop.target) for loop in reversed(loops) if isinstance(loop, ast.For)), "epoch"
                )
                fix = f"call set_epoch({'epoch' if target == '_' else target}) at the start of each epoch, before the loop over `{shown(first)}`"
                yield script.finding(RULE, node, fault[1], fix, severity=fault[0])


def _fault(call: Call, one: Pass, loops: list[ast.AST]) -> tuple[Severity, str] | None:
    over = shown(one)
    given = call.arg_node(0, "epoch")
    if not set(loops) & set(call.loops):
        return (
            "error",
            f"set_epoch is called once, before all epochs, so each epoch reads `{over}` in the same order",
        )
    if isinstance(given, ast.Constant):
        return (
            "error",
            f"set_epoch gets {given.value!r} in each epoch, so each epoch reads `{over}` in the same order",
        )
    plain = isinstance(given, ast.Name) and any(
        isinstance(loop, ast.For) and isinstance(loop.target, ast.Name) and loop.target.id == given.id
        for loop in loops
    )
    if not plain:
        return None
    if one.loop in call.loops:
        return (
            "warning",
            f"set_epoch is called after the order of this epoch was drawn: the first two epochs over `{over}` are equal",
        )
    if one.inside and call.index > one.inside[-1].index:
        return (
            "warning",
            f"set_epoch is called after the loop over `{over}`, for a finished epoch: the first two epochs are equal",
        )
    return None


RULE: Rule[Script] = Rule(
    id="RW502",
    name="set-epoch-without-effect",
    severity="error",
    classes=("X1",),
    summary="set_epoch is called where it cannot change the order of the samples",
    check=check,
)
