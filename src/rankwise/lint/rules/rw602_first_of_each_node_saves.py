"""The first rank of each node writes the same file.

**Why it breaks.** ``local_rank == 0`` is true once on each node. With two nodes and a shared disk two ranks write one
file at once, and it is sometimes damaged.

Bad:

```python
import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
if int(os.environ["LOCAL_RANK"]) == 0:
    torch.save(model.state_dict(), "model.pt")
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
if dist.get_rank() == 0:
    torch.save(model.state_dict(), "model.pt")
dist.destroy_process_group()
```

**When it says nothing.** Files that are local to each node (``/tmp``, a scratch folder, a path with the node's number).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import node_in, text_of
from rankwise.lint.topics.saved_files import writes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script


def check(script: Script) -> Iterator[Finding]:
    """Files that one rank of each node writes."""
    for use in writes(script, anywhere=True):
        call, at = use.call, node_in(script, use.call)
        if at is None or not use.place.is_once_a_node or not use.is_shared() or use.is_node_local():
            continue
        if {"save_function", "is_main_process"} & call.kwargs.keys() or "spawned" in call.contexts:
            continue
        if any("spawned" in guard.origin for guard in call.guards):
            continue
        yield script.finding(
            RULE,
            at,
            f"the first rank of each node writes `{text_of(use.node)}`: on a disk that nodes share, they write at the same time",
            "test the global rank: `if dist.get_rank() == 0:` (accelerator.is_main_process)",
        )


RULE: Rule[Script] = Rule(
    id="RW602",
    name="first-of-each-node-saves",
    severity="warning",
    classes=("K5", "K1"),
    summary="the first rank of each node writes the same file",
    check=check,
)
