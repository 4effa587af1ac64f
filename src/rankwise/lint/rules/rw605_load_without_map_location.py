"""A checkpoint is loaded without map_location, so all ranks load it onto the GPU that saved it.

**Why it breaks.** ``torch.load`` puts each tensor back on the device from which it was saved, usually ``cuda:0``. All
ranks of a node then hold a copy on GPU 0, which runs out of memory.

Bad:

```python
import os

import torch
import torch.distributed as dist

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = torch.nn.Linear(4, 1).cuda()
model.load_state_dict(torch.load("start.pt"))
dist.destroy_process_group()
```

Good:

```python
import os

import torch
import torch.distributed as dist

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = torch.nn.Linear(4, 1).cuda()
model.load_state_dict(torch.load("start.pt", map_location="cpu"))
dist.destroy_process_group()
```

**When it says nothing.** Programs that use no GPU or one process, only rank 0 loads, and data that is not a model.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import is_distributed
from rankwise.lint.topics.saved_files import is_model_file, reads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script
    from rankwise.lint.topics.saved_files import FileUse


def check(script: Script) -> Iterator[Finding]:
    """Loads by all ranks of what was saved from a GPU."""
    for use in reads(script):
        call = use.call
        if (
            call.name != "torch.load"
            or call.arg(1, "map_location") is not None
            or call.has_star
            or use.place.ranks == {0}
        ):
            continue
        if (
            not _uses_gpus(use)
            or not (is_distributed(use.place.entry) or script.has_init)
            or not is_model_file(script, use)
        ):
            continue
        yield script.finding(
            RULE,
            call.node,
            f"`{ast.unparse(call.node)}` puts tensors back on the GPU that saved them: all ranks of a node fill GPU 0",
            'add map_location="cpu", and let load_state_dict copy',
        )


def _uses_gpus(use: FileUse) -> bool:
    texts = {call.module.text for call in use.place.entry.histories[0].calls}
    return any("cuda" in text or "nccl" in text for text in texts)


RULE: Rule[Script] = Rule(
    id="RW605",
    name="load-without-map-location",
    severity="warning",
    classes=("K3",),
    summary="all ranks load a checkpoint onto the GPU that saved it",
    check=check,
)
