"""The data is split twice: by a DistributedSampler, and again by the framework that prepares its loader.

**Why it breaks.** ``accelerator.prepare`` gives each process its share of what the loader yields. A loader that already
yields one share of N is split again: each rank sees one sample of N x N, and the rest of the data is never used.

Bad:

```python
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

accelerator = Accelerator()
dataset = TensorDataset(torch.arange(6400.0))
loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset))
loader = accelerator.prepare(loader)
```

Good:

```python
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
dataset = TensorDataset(torch.arange(6400.0))
loader = DataLoader(dataset, batch_size=32, shuffle=True)
loader = accelerator.prepare(loader)
```

**When it says nothing.** The loader is not prepared; Lightning and Fabric, which leave your DistributedSampler alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.library.names import ACCELERATOR
from rankwise.lint.model.values import Object
from rankwise.lint.rule import Rule
from rankwise.lint.topics.data_flow import here, sampler_of
from rankwise.lint.topics.job_view import once, places

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script


def check(script: Script) -> Iterator[Finding]:
    """Loaders with a DistributedSampler that Accelerate prepares."""
    seen: set[object] = set()
    for place in once(
        places(script, f"{ACCELERATOR}.prepare", f"{ACCELERATOR}.prepare_data_loader", anywhere=True)
    ):
        for value in place.last.args:
            loader = value.thing
            sampler = sampler_of(loader) if isinstance(loader, Object) and loader.call is not None else None
            if sampler is None or sampler.call is None:
                continue
            node = here(script, sampler.call) or here(script, place.last)
            if node is not None and node not in seen:
                seen.add(node)
                yield script.finding(RULE, node, _MESSAGE, _FIX)


_MESSAGE = "accelerator.prepare splits this loader again: with N processes each one sees one sample of N x N"
_FIX = "pass shuffle=True and no sampler: accelerator.prepare splits it"

RULE: Rule[Script] = Rule(
    id="RW506",
    name="data-split-twice",
    severity="warning",
    classes=("X3",),
    summary="a loader with a DistributedSampler is passed to accelerator.prepare, which splits it again",
    check=check,
)
