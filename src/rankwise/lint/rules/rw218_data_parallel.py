"""One process drives all GPUs with DataParallel.

**Why it breaks.** ``nn.DataParallel`` copies the model to all GPUs and gathers all outputs on the first one at each
step: it is slow, GPU 0 runs out of memory first, and a batch is split along its first dimension, whatever that is.
Under torchrun each process does so with all GPUs.

Bad:

```python
import torch

model = torch.nn.DataParallel(torch.nn.Linear(4, 1).cuda())
```

Good:

```python
import os

import torch
import torch.distributed as dist

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1).cuda(), device_ids=[local_rank])
dist.destroy_process_group()
```

**When it says nothing.** ``isinstance(model, nn.DataParallel)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import is_distributed, once, places

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script


def check(script: Script) -> Iterator[Finding]:
    """Models wrapped with DataParallel."""
    for place in once(places(script, "torch.nn.DataParallel", "torch.nn.parallel.DataParallel")):
        is_job = is_distributed(place.entry) and not place.last.tests
        message = "DataParallel drives all GPUs from one process, copies the model at each step and gathers on GPU 0"
        if is_job:
            message = "in a job of several processes each drives all GPUs with DataParallel, and gradients are not averaged"
        fix = "use DistributedDataParallel, one process for each GPU"
        yield script.finding(RULE, place.last.node, message, fix, severity="warning" if is_job else "hint")


RULE: Rule[Script] = Rule(
    id="RW218",
    name="data-parallel",
    severity="hint",
    classes=("L15",),
    summary="one process drives all GPUs with DataParallel",
    check=check,
)
