"""The learning rate depends on a metric that only this rank has measured.

**Why it breaks.** `ReduceLROnPlateau` lowers the learning rate when its metric stops improving. With the loss of this
rank's own samples it does so at different steps on different ranks. Gradients are still averaged, but each rank applies
them with its own rate: the replicas silently diverge.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
data = list(torch.load("data.pt", map_location="cpu"))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
model = DDP(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for batch in loader:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
    scheduler.step(loss.item())
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
data = list(torch.load("data.pt", map_location="cpu"))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
model = DDP(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for batch in loader:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    scheduler.step(mean.item() / dist.get_world_size())
dist.destroy_process_group()
```

**When it says nothing.** The metric was reduced, gathered or broadcast first; schedulers that only count steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.model.values import Spread
from rankwise.lint.paths.words import written
from rankwise.lint.rule import Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script

_STEP = "torch.optim.lr_scheduler.ReduceLROnPlateau.step"


def check(script: Script) -> Iterator[Finding]:
    """Steps of a scheduler with a value that differs between ranks."""
    if not script.has_init:
        return
    for call in script.calls_of(_STEP):
        metric = call.arg(0, "metrics")
        if metric is not None and metric.spread is Spread.LOCAL and not call.guards:
            text = written(call.arg_node(0, "metrics"))
            yield script.finding(
                RULE,
                call.node,
                f"`{text}` comes from this rank's own data: ranks lower their learning rates at different steps, and the replicas diverge",
                f"average `{text}` over all ranks (all_reduce) before the scheduler gets it",
            )


RULE: Rule[Script] = Rule(
    id="RW616",
    name="schedule-of-one-rank",
    severity="error",
    classes=("M4",),
    summary="the learning rate depends on a metric that only this rank has measured",
    check=check,
)
