"""SyncBatchNorm is created after the model was wrapped, or where it cannot work.

**Why it breaks.** `convert_sync_batchnorm` puts new layers with new parameters into the model. If
DistributedDataParallel already wraps it, DDP does not know these layers. On the CPU, training fails with `SyncBatchNorm
layers only work with GPU modules`, and without a process group it fails at once.

Bad:

```python
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).cuda()
model = DDP(net, device_ids=[local_rank])
model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
dist.destroy_process_group()
```

Good:

```python
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).cuda()
net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
model = DDP(net, device_ids=[local_rank])
dist.destroy_process_group()
```

**When it says nothing.** The model is converted first and trained on GPUs; on the CPU it is only evaluated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.library.names import DDP
from rankwise.lint.model.values import Object
from rankwise.lint.rule import Rule
from rankwise.lint.topics.collective_calls import backends
from rankwise.lint.topics.job_view import text_of
from rankwise.lint.topics.wrapping import OFF

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Script

_CONVERT = "torch.nn.SyncBatchNorm.convert_sync_batchnorm"


def check(script: Script) -> Iterator[Finding]:
    """Conversions of wrapped models, and synchronised layers on the CPU or without a group."""
    for call in script.calls_of(_CONVERT, "torch.nn.SyncBatchNorm"):
        given = call.arg(0, "module")
        if (
            call.name == _CONVERT
            and given is not None
            and isinstance(given.thing, Object)
            and given.thing.kind == DDP
        ):
            yield script.finding(
                RULE,
                call.node,
                "the model is already wrapped: DDP does not know the SyncBatchNorm layers created here, and their gradients are never reduced",
                _fix(call, given.thing),
            )
        elif _is_only_on_cpu(script) and _trains(script):
            yield script.finding(
                RULE,
                call.node,
                "SyncBatchNorm works on GPUs only, and this model stays on the CPU: its first forward pass in training fails",
                "skip the conversion where the backend is gloo",
            )
        elif _has_no_group(script) and _trains(script):
            yield script.finding(
                RULE,
                call.node,
                "SyncBatchNorm uses the process group in each forward pass of training, and this program creates none",
                "call `dist.init_process_group(...)` first, or convert only if `dist.is_initialized()`",
            )


def _fix(call: Call, wrapped: Object) -> str:
    convert, made = text_of(getattr(call.node, "func", None)), wrapped.call
    inner = made.arg_node(0, "module") if made is not None and made.name == DDP else None
    if made is None or inner is None:
        return f"convert first, then wrap: call `{convert}(...)` on the model before it is wrapped"
    wrap, more = (
        text_of(getattr(made.node, "func", None)),
        ", ..." if len(made.args) + len(made.kwargs) > 1 else "",
    )
    return f"convert first, then wrap: `{wrap}({convert}({text_of(inner)}){more})`"


def _is_only_on_cpu(script: Script) -> bool:
    moved = any(_moves(call) for call in script.all_calls)
    return backends(script) == {"gloo"} and not moved


def _moves(call: Call) -> bool:
    word = call.name.rpartition(".")[2]
    if word == "to":
        return not any(value.const == "cpu" for value in call.args)
    return word in {"cuda", "set_device", "set_default_device"} or (
        "device" in call.kwargs and call.kwargs["device"].const != "cpu"
    )


def _has_no_group(script: Script) -> bool:
    return (
        not script.has_init
        and not script.piece.is_fragment
        and bool(script.entries)
        and not any("init" in call.name.lower() and "dist" in call.name.lower() for call in script.all_calls)
    )


def _trains(script: Script) -> bool:
    """Whether the program itself makes a backward pass, or a forward pass outside of evaluation."""
    calls = script.entries[0].histories[0].calls if script.entries else []
    evaluates = any(call.name.endswith(".eval") for call in calls)
    backward = any(call.name.endswith(".backward") for call in calls)
    forward = any(
        call.name.endswith(".__call__")
        and "DistributedDataParallel" in call.name
        and not OFF & set(call.contexts)
        for call in calls
    )
    return backward or (forward and not evaluates)


RULE: Rule[Script] = Rule(
    id="RW407",
    name="sync-batchnorm-misplaced",
    severity="error",
    classes=("D20",),
    summary="SyncBatchNorm is created after wrapping, on the CPU, or without a process group",
    check=check,
)
