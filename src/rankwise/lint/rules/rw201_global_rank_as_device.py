"""The global rank is used as the number of a GPU, but GPUs are numbered from 0 on each node.

**Why it breaks.** With two nodes of four GPUs, ranks 4 to 7 run on the second node, whose GPUs are 0 to 3: rank 4 fails
with ``CUDA error: invalid device ordinal``. ``rank % num_gpus`` hides that only while all nodes run the same number of
processes, one for each GPU, and ranks are assigned node by node; otherwise two ranks share one GPU and another is idle.

Bad:

```python
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
x = torch.ones(1, device="cuda")
dist.all_reduce(x)
dist.destroy_process_group()
```

Good:

```python
import os

import torch
import torch.distributed as dist

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
x = torch.ones(1, device="cuda")
dist.all_reduce(x)
dist.destroy_process_group()
```

**When it says nothing.** The first argument of a function that ``mp.spawn`` starts, which is the local rank;
``LOCAL_RANK``, ``SLURM_LOCALID``, ``accelerator.local_process_index``, ``rank - node_rank * gpus_per_node``.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.model.values import Items
from rankwise.lint.rule import Rule
from rankwise.lint.topics.device_index import fault_of
from rankwise.lint.topics.job_view import INIT, function_of, once, places, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.model.values import Value
    from rankwise.lint.script import Entry, Script
    from rankwise.lint.topics.job_view import Place

#: Where a library takes a device by position.
_POSITIONS = {
    "torch.cuda.set_device": 0,
    "torch.accelerator.set_device_index": 0,
    "torch.accelerator.set_device_idx": 0,
    "torch.cuda.device": 0,
    "torch.xpu.set_device": 0,
    "torch.npu.set_device": 0,
}
_NAMES = ("device", "device_id", "output_device", "device_ids")


def check(script: Script) -> Iterator[Finding]:
    """Devices that are chosen by the global rank; each expression once in a function."""
    seen: set[tuple[int, str]] = set()
    on_one_node = {id(entry) for entry in script.entries if _is_one_node(entry)}
    for place in once(places(script)):
        if id(place.entry) in on_one_node:
            continue
        for value, node in _devices(place.last):
            fault = fault_of(script, place, value, node)
            key = (id(place.last.function), text_of(node))
            if fault is not None and key not in seen:
                seen.add(key)
                yield _tell(script, place, node, is_bare=fault == "bare")
                break


def _is_one_node(entry: Entry) -> bool:
    """Whether the rank is the process index of `mp.spawn`: all ranks are then on this host, unlike with `node * gpus + number`."""
    history = entry.histories[-1]
    starts = (call.arg(None, "rank") for call in history.calls if call.name == INIT)
    return any(
        rank is not None
        and "spawned" in rank.origin
        and "node_rank" not in rank.origin
        and rank.const == history.rank
        for rank in starts
    )


def _devices(call: Call) -> Iterator[tuple[Value, ast.AST]]:
    """Values that a call takes as a device, each with where it stands."""
    position = _POSITIONS.get(call.name)
    if call.name == "torch.device":
        position = 1 if len(call.args) > 1 else 0
    elif call.name.endswith((".cuda", ".to")):
        position = 0
    if position is not None and position < len(call.args):
        yield call.args[position], call.arg_node(position) or call.node
    for name in _NAMES:
        value = call.kwargs.get(name)
        if value is not None and (
            name == "device" or "rank" in value.origin or isinstance(value.thing, Items)
        ):
            node = call.arg_node(None, name) or call.node
            for one in value.thing.values if isinstance(value.thing, Items) else [value]:
                yield one, node


def _tell(script: Script, place: Place, node: ast.AST, *, is_bare: bool) -> Finding:
    text = text_of(node)
    if is_bare:
        message = f"`{text}` uses the global rank as the number of a GPU: a second node has no such GPU"
    else:
        message = f"`{text}` maps the global rank to a node's GPUs: wrong if nodes differ or start fewer ranks than GPUs"
    fix = f"use the local rank: {_local_rank(script, node)}"
    if any(call.name.startswith("accelerate.") for call in place.entry.histories[0].calls):
        fix = "use accelerator.device, or accelerator.local_process_index"
    at = node if isinstance(node, ast.expr) else place.last.node
    return script.finding(RULE, at, message, fix, severity="error" if is_bare else "warning")


def _local_rank(script: Script, node: ast.AST) -> str:
    """The variable that holds it, if one is in scope there."""
    tree = script.tree
    around = {tree, function_of(tree, node)} if isinstance(node, ast.expr) else {tree}
    for one in ast.walk(tree):
        if (
            isinstance(one, ast.Assign)
            and [text_of(target) for target in one.targets] == ["local_rank"]
            and "local" in text_of(one.value).lower()
            and function_of(tree, one) in around
        ):
            return "`local_rank`"
    return 'int(os.environ["LOCAL_RANK"])'


RULE: Rule[Script] = Rule(
    id="RW201",
    name="global-rank-as-device",
    severity="error",
    classes=("R14",),
    summary="the global rank is used as the number of a GPU",
    check=check,
)
