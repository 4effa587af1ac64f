"""The optimizer is created before the model is sharded.

**Why it breaks.** `fully_shard` replaces the parameters by DTensors, and so does FSDP without `use_orig_params=True`.
An optimizer created before holds the old ones, which no longer get gradients: `step()` silently changes nothing.

Bad:

```python
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
fully_shard(model)
```

Good:

```python
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = torch.nn.Linear(4, 4)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
dist.destroy_process_group()
```

**When it says nothing.** DistributedDataParallel, FSDP with `use_orig_params=True`, an optimizer of another model, one
that is created again afterwards.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.finding import span_of
from rankwise.lint.library.names import FSDP, FULLY_SHARD
from rankwise.lint.model.values import Items, Object
from rankwise.lint.rule import Rule
from rankwise.lint.topics.tensor_text import is_in, key_of
from rankwise.lint.topics.wrapping import parts_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.model.values import Value
    from rankwise.lint.script import Script


def check(script: Script) -> Iterator[Finding]:
    """Optimizers that hold the parameters from before sharding."""
    for entry in script.entries:
        calls = entry.histories[0].calls
        optimizers = [call for call in calls if _is_optimizer(call)]
        for shard in (call for call in calls if _replaces(call)):
            early = [one for one in optimizers if one.index < shard.index and _holds(one, shard, calls)]
            late = [
                one
                for one in optimizers
                if one.index > shard.index and (_holds(one, shard, calls) or not one.args)
            ]
            if not early or late:
                continue
            optimizer = early[-1]
            node = optimizer.node if is_in(script.tree, optimizer.node) else shard.node
            if not is_in(script.tree, node):
                continue
            name = "fully_shard" if shard.name == FULLY_SHARD else "FullyShardedDataParallel"
            yield script.finding(
                RULE,
                node,
                f"the optimizer holds the parameters from before {name}, which replaces them: its step changes nothing",
                f"create the optimizer after {name}",
                also=[(name, script.piece.path, span_of(shard.node, script.lines))]
                if is_in(script.tree, shard.node)
                else [],
            )
            break


def _is_optimizer(call: Call) -> bool:
    last = call.name.rpartition(".")[2]
    return (
        call.name.startswith(("torch.optim.", "bitsandbytes.optim.", "transformers.AdamW"))
        and last[:1].isupper()
        and "lr_scheduler" not in call.name
    )


def _replaces(call: Call) -> bool:
    if call.name == FULLY_SHARD:
        return True
    keeps = call.kwargs.get("use_orig_params")
    return call.name == FSDP and not call.has_star and (keeps is None or keeps.const is False)


def _holds(optimizer: Call, shard: Call, calls: list[Call]) -> bool:
    model = shard.arg(0, "module")
    given = optimizer.arg(0, "params")
    if model is None or given is None:
        return False
    ids = {id(one) for one in parts_of(model)}
    if any(id(thing) in ids for thing in _models(given)):
        return True
    # `[p for p in net.parameters() if ...]`: by the calls that stand within the optimizer's.
    inside = {id(one) for one in ast.walk(optimizer.node)}
    asked = [
        one
        for one in calls
        if one.name.endswith("parameters")
        and (
            id(one.node) in inside
            or (
                one.function is optimizer.function
                and one.function is not None
                and one.index < optimizer.index
            )
        )
    ]
    if any(id(one.receiver.thing) in ids for one in asked):
        return True
    name = key_of(shard.arg_node(0, "module"))
    texts = {
        key_of(one.func.value)
        for one in ast.walk(optimizer.node)
        if isinstance(one, ast.Call)
        and isinstance(one.func, ast.Attribute)
        and one.func.attr.endswith("parameters")
    }
    return bool(name) and name in texts and shard.function is optimizer.function and model.thing is None


def _models(value: Value) -> Iterator[object]:
    thing = value.thing
    if isinstance(thing, Items):
        for one in thing.values:
            yield from _models(one)
    elif isinstance(thing, Object) and thing.kind == "parameters" and thing.call is not None:
        yield thing.call.receiver.thing


RULE: Rule[Script] = Rule(
    id="RW412",
    name="optimizer-before-sharding",
    severity="error",
    classes=("D29",),
    summary="the optimizer is created before the model is sharded",
    check=check,
)
