"""device_ids are passed for a model on the CPU.

**Why it breaks.** `ValueError: DistributedDataParallel device_ids and output_device arguments only work with single-device/multiple-device GPU modules or CPU modules,
but got device_ids [0]`: a model on the CPU has no device with a number.

Bad:

```python
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
local_rank = int(os.environ["LOCAL_RANK"])
model = DDP(torch.nn.Linear(4, 1), device_ids=[local_rank])
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
dist.destroy_process_group()
```

**When it says nothing.** The model is moved to a GPU anywhere, is not created in this file, or `device_ids` may be
None.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.library.names import DDP
from rankwise.lint.model.values import Instance, Object
from rankwise.lint.rule import Rule
from rankwise.lint.topics.collective_calls import backends
from rankwise.lint.topics.job_view import text_of
from rankwise.lint.topics.tensor_text import last_value
from rankwise.lint.topics.wrapping import parts_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Script


def check(script: Script) -> Iterator[Finding]:
    """Wrappings with `device_ids` of models that never leave the CPU."""
    for call in script.calls_of(DDP):
        ids, node = call.arg(1, "device_ids"), call.arg_node(1, "device_ids")
        if (
            ids is None
            or node is None
            or (ids.is_known and ids.const is None)
            or not isinstance(last_value(script.tree, node, call.node), ast.List)
        ):
            continue
        if not (_is_cpu_text(script, call) or _stays_on_cpu(script, call)):
            continue
        yield script.finding(
            RULE,
            node,
            f"device_ids={text_of(node)} is for a model on a GPU, but this one is on the CPU: DistributedDataParallel fails with a ValueError",
            "remove `device_ids` and `output_device`, or move the model to the GPU before it is wrapped",
        )


def _is_cpu_text(script: Script, call: Call) -> bool:
    """`DDP(net.cpu(), ...)`, `DDP(net.to("cpu"), ...)`, or `net = Net().cpu()` just before."""
    node = call.arg_node(0, "module")
    value = last_value(script.tree, node, call.node) if node is not None else None
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return False
    if value.func.attr == "cpu":
        return True
    return value.func.attr == "to" and bool(value.args) and _says_cpu(script, value.args[0], call)


def _says_cpu(script: Script, node: ast.AST, call: Call) -> bool:
    place = last_value(script.tree, node, call.node)
    stores = [
        one for one in ast.walk(script.tree) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
    ]
    if isinstance(node, ast.Name) and sum(one.id == node.id for one in stores) > 1:
        return False
    if isinstance(place, ast.Call) and place.args:
        place = place.args[0]
    return isinstance(place, ast.Constant) and place.value == "cpu"


def _stays_on_cpu(script: Script, call: Call) -> bool:
    """Whether the model is created in the file, nothing is ever moved, and GPUs are never mentioned."""
    model = call.arg(0, "module")
    if model is None or not isinstance(model.thing, (Object, Instance)) or {"device"} & set(call.contexts):
        return False
    if isinstance(model.thing, Object) and (
        not model.thing.kind.startswith("torch.nn.")
        or model.thing.call is None
        or "device" in model.thing.call.kwargs
    ):
        return False
    if isinstance(model.thing, Instance) and not any(
        name.startswith("torch.nn.") for name in model.thing.cls.library_bases()
    ):
        return False
    parts = {id(one) for one in parts_of(model)}
    moves = [
        one
        for one in script.all_calls
        if one.name.rpartition(".")[2]
        in {"to", "cuda", "to_empty", "set_default_device", "set_default_tensor_type"}
    ]
    if any(
        id(one.receiver.thing) in parts
        or (one.receiver.thing is None and one.args and one.name.startswith("?"))
        for one in moves
    ):
        return not any(id(one.receiver.thing) in parts and not _goes_to_cpu(one) for one in moves) and any(
            id(one.receiver.thing) in parts for one in moves
        )
    known = backends(script)
    return (
        bool(known)
        and known <= {"gloo", "nccl"}
        and not any(one.name.startswith("torch.set_default") for one in moves)
    )


def _goes_to_cpu(call: Call) -> bool:
    return any(value.const == "cpu" or (isinstance(value.thing, Object) and value.thing.call is not None and any(
        one.const == "cpu" for one in value.thing.call.args)) for value in call.args)  # fmt: skip


RULE: Rule[Script] = Rule(
    id="RW411",
    name="device-ids-of-cpu-model",
    severity="error",
    classes=("D27",),
    summary="device_ids are passed for a model on the CPU",
    check=check,
)
