"""A checkpoint is mapped to the GPU with the number of the global rank.

**Why it breaks.** ``map_location={"cuda:0": f"cuda:{rank}"}`` is right on the first node only. On the second, rank 8
uses a GPU 8 that does not exist: ``Attempting to deserialize object on CUDA device 8``.

Bad:

```python
import os

import torch
import torch.distributed as dist

dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
rank = dist.get_rank()
state = torch.load("start.pt", map_location={"cuda:0": f"cuda:{rank}"})
dist.destroy_process_group()
```

Good:

```python
import os

import torch
import torch.distributed as dist

local_rank = int(os.environ["LOCAL_RANK"])
dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
state = torch.load("start.pt", map_location=f"cuda:{local_rank}")
dist.destroy_process_group()
```

**When it says nothing.** The local rank, ``"cpu"``, and the first argument of a function that ``mp.spawn`` starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.model.values import Items
from rankwise.lint.rule import Rule
from rankwise.lint.topics.device_index import fault_of
from rankwise.lint.topics.job_view import once, places, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script


def check(script: Script) -> Iterator[Finding]:
    """Values of map_location made of the global rank."""
    for place in once(places(script, "torch.load", "torch.jit.load", "torch.hub.load_state_dict_from_url")):
        call = place.last
        position = None if call.name.startswith("torch.hub") else 1
        value, node = call.arg(position, "map_location"), call.arg_node(position, "map_location")
        if value is None or node is None:
            continue
        for one in value.thing.values if isinstance(value.thing, Items) else [value]:
            fault = fault_of(script, place, one, node)
            if fault is not None:
                yield script.finding(
                    RULE,
                    node,
                    f"`{text_of(node)}` uses the global rank as the number of a GPU: a second node has no such GPU",
                    'map to "cpu", or to the GPU of int(os.environ["LOCAL_RANK"])',
                    severity="error" if fault == "bare" else "warning",
                )
                break


RULE: Rule[Script] = Rule(
    id="RW606",
    name="map-location-from-rank",
    severity="error",
    classes=("K3", "R14"),
    summary="a checkpoint is mapped to the GPU with the number of the global rank",
    check=check,
)
