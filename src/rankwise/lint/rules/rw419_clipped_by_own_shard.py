"""Gradients of a model under FullyShardedDataParallel are clipped by the norm of each rank's own shard.

**Why it breaks.** Each rank holds a shard of every gradient, and `torch.nn.utils.clip_grad_norm_` computes the norm of
that shard alone. Nothing fails: the norm is too small and differs between ranks, and the shards of one gradient are
scaled by different factors. `torch.amp.GradScaler`, too, looks for infinities in this rank's shards only: where one rank
skips a step, the others make it.

Bad:

```python
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
model = FSDP(torch.nn.Linear(4, 1).cuda())
optimizer = torch.optim.AdamW(model.parameters())
model(torch.rand(2, 4, device="cuda")).sum().backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
dist.destroy_process_group()
```

Good:

```python
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
model = FSDP(torch.nn.Linear(4, 1).cuda())
optimizer = torch.optim.AdamW(model.parameters())
model(torch.rand(2, 4, device="cuda")).sum().backward()
model.clip_grad_norm_(1.0)
optimizer.step()
dist.destroy_process_group()
```

**When it says nothing.** Models of `fully_shard`, whose parameters are DTensors; DistributedDataParallel; ``NO_SHARD``,
or a strategy that can't be seen; inside `summon_full_params`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.library.names import FSDP
from rankwise.lint.model.values import Object
from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import text_of
from rankwise.lint.topics.tensor_text import is_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Script

_CLIPS = ("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad.clip_grad_norm_")
_SHARDS = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


def check(script: Script) -> Iterator[Finding]:
    """Calls of torch's own clipping on the parameters of a wrapped model."""
    models = {
        call.node: call
        for call in script.calls
        if call.name.endswith(".parameters")
        and isinstance(call.receiver.thing, Object)
        and call.receiver.thing.kind == FSDP
        and _is_sharded(call.receiver.thing.call)
    }
    for call in script.calls_of(*_CLIPS):
        node = call.arg_node(0, "parameters")
        given = models.get(node) if node is not None else None
        if (
            given is None
            or not is_in(script.tree, call.node)
            or any("summon" in one for one in call.contexts)
        ):
            continue
        model = text_of(getattr(getattr(given.node, "func", None), "value", None))
        limit = text_of(call.arg_node(1, "max_norm"))
        yield script.finding(
            RULE,
            call.node,
            f"each rank holds a shard of the gradients of `{model}` and clips it by this shard's norm: too small, and not"
            " the same on all ranks",
            f"let FSDP compute the norm: `{model}.clip_grad_norm_({limit})`",
        )

    yield from _scaler(script)


def _scaler(script: Script) -> Iterator[Finding]:
    if not any(_is_sharded(call) for call in script.all_calls):
        return
    for call in script.calls_of("torch.amp.GradScaler"):
        enabled = call.arg(None, "enabled")
        if enabled is None or enabled.const is not False:
            yield script.finding(
                RULE,
                call.node,
                "this scaler looks for infinities in the shards of its own rank: one rank skips a step that the others make",
                "use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler, or bfloat16 without a scaler",
            )


def _is_sharded(made: Call | None) -> bool:
    if made is None or made.name != FSDP or made.has_star:
        return False
    strategy = made.arg_node(2, "sharding_strategy")
    return strategy is None or text_of(strategy).rpartition(".")[2] in _SHARDS


RULE: Rule[Script] = Rule(
    id="RW419",
    name="clipped-by-own-shard",
    severity="warning",
    classes=(),
    summary="gradients under FSDP are clipped by the norm of each rank's own shard",
    check=check,
)
