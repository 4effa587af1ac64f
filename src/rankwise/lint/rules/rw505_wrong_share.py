"""A DistributedSampler gets a wrong rank or a wrong number of ranks.

**Why it breaks.** With ``rank=0`` or ``num_replicas=1`` all ranks draw the same samples; with the two swapped, or with
the local rank on several nodes, ranks fail with ``ValueError: Invalid rank`` or nodes repeat each other's work. If
omitted, both come from the process group.

Bad:

```python
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
dataset = TensorDataset(torch.arange(6400.0))
sampler = DistributedSampler(dataset, num_replicas=dist.get_world_size(), rank=0)
loader = DataLoader(dataset, batch_size=32, sampler=sampler)
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
dataset = TensorDataset(torch.arange(6400.0))
sampler = DistributedSampler(dataset, num_replicas=dist.get_world_size(), rank=dist.get_rank())
loader = DataLoader(dataset, batch_size=32, sampler=sampler)
dist.destroy_process_group()
```

**When it says nothing.** Both are omitted, both come from variables with unknown values, the local rank is the rank
(mp.spawn), or only some ranks create the sampler.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.library.names import SAMPLER
from rankwise.lint.rule import Rule
from rankwise.lint.topics.data_flow import SAMPLER_AT
from rankwise.lint.topics.job_view import is_distributed, once, places, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.base.findings import Severity
    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Script


def check(script: Script) -> Iterator[Finding]:
    """Samplers with another rank's share."""
    for place in once(places(script, SAMPLER)):
        call = place.last
        if not place.is_made_by_all or call.guards or not is_distributed(place.entry):
            continue
        fault = _fault(call)
        if fault is not None and (script.has_init or not _is_of_one(call)):
            severity, name, message = fault
            yield script.finding(
                RULE, call.arg_node(SAMPLER_AT[name], name) or call.node, message, _FIX, severity=severity
            )


def _is_of_one(call: Call) -> bool:
    """Whether it says that this is the first process of one."""
    given = [call.arg(SAMPLER_AT[name], name) for name in ("num_replicas", "rank")]
    return [value.const for value in given if value is not None] == [1, 0]


def _fault(call: Call) -> tuple[Severity, str, str] | None:
    count, rank = call.arg(SAMPLER_AT["num_replicas"], "num_replicas"), call.arg(SAMPLER_AT["rank"], "rank")
    count_node, rank_node = (call.arg_node(SAMPLER_AT[name], name) for name in ("num_replicas", "rank"))
    if count is not None and count.origin == {"rank"} and (rank is None or "world_size" in rank.origin):
        return (
            "error",
            "num_replicas",
            f"num_replicas gets the rank (`{text_of(count_node)}`) and rank the number of ranks",
        )
    if isinstance(count_node, ast.Constant) and count_node.value == 1:
        return "error", "num_replicas", "num_replicas=1 gives all samples to each rank: nothing is split"
    if isinstance(rank_node, ast.Constant) and isinstance(rank_node.value, int):
        return (
            "error",
            "rank",
            f"each rank takes the samples of rank {rank_node.value}, and those of the others are never used",
        )
    if rank is not None and rank.origin == {"local_rank"} and (count is None or "world_size" in count.origin):
        return (
            "warning",
            "rank",
            f"`{text_of(rank_node)}` is the local rank: with two nodes, both take the same samples and skip the others",
        )
    return None


_FIX = "omit rank and num_replicas, or pass rank=dist.get_rank() and num_replicas=dist.get_world_size()"

RULE: Rule[Script] = Rule(
    id="RW505",
    name="wrong-share",
    severity="error",
    classes=("X3",),
    summary="a DistributedSampler gets a wrong rank or a wrong number of ranks",
    check=check,
)
