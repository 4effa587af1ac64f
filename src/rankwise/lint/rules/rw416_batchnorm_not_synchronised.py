"""A model with BatchNorm is trained on many processes without SyncBatchNorm.

**Why it breaks.** DDP does not turn BatchNorm into SyncBatchNorm: each rank normalises with the statistics of its own small batch, and evaluation uses those of
rank 0. This may be what you want; with few samples on each rank it rarely is.

Bad:

```python
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
model(torch.rand(2, 4)).sum().backward()
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4)))
model(torch.rand(2, 4)).sum().backward()
dist.destroy_process_group()
```

**When it says nothing.** SyncBatchNorm is named anywhere in the file, or the model's layers are defined elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.library.names import DDP
from rankwise.lint.model.values import Object
from rankwise.lint.rule import Rule
from rankwise.lint.topics.tensor_text import is_in
from rankwise.lint.topics.wrapping import parts_of, trains_later, wraps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script


def check(script: Script) -> Iterator[Finding]:
    """Wrapped models with layers of BatchNorm that are seen."""
    if "SyncBatchNorm" in script.piece.code or "sync_batchnorm" in script.piece.code:
        return
    for wrap in wraps(script):
        has_norm = any(
            isinstance(one, Object) and one.kind.startswith("torch.nn.BatchNorm")
            for one in parts_of(wrap.inner)
        )
        if (
            wrap.kind != DDP
            or not has_norm
            or not is_in(script.tree, wrap.call.node)
            or not trains_later(wrap, wrap.call)
        ):
            continue
        yield script.finding(
            RULE,
            wrap.call.node,
            "each rank normalises with the statistics of its own batch: DistributedDataParallel does not synchronise BatchNorm",
            "if batches are small, convert first: `model = nn.SyncBatchNorm.convert_sync_batchnorm(model)`",
        )


RULE: Rule[Script] = Rule(
    id="RW416",
    name="batchnorm-not-synchronised",
    severity="hint",
    classes=("D21",),
    summary="BatchNorm keeps statistics of each rank's own batch",
    check=check,
)
