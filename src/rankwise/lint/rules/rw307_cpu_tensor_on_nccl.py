"""A CPU tensor is passed to an NCCL group.

**Why it breaks.** NCCL moves data between GPUs only: `RuntimeError: No backend type associated with device type cpu`
(older: `Tensors must be CUDA and dense`). `torch.tensor(x)`, `torch.zeros(n)` and anything from `.cpu()` or numpy are
on the CPU.

Bad:

```python
import os

import torch
import torch.distributed as dist

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
total = torch.tensor([3.0])
dist.all_reduce(total)
dist.destroy_process_group()
```

Good:

```python
import os

import torch
import torch.distributed as dist

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
total = torch.tensor([3.0], device="cuda")
dist.all_reduce(total)
dist.destroy_process_group()
```

**When it says nothing.** The backend is not the literal "nccl", the call uses another group, a default device is set,
or the tensor cannot be traced to where it was created.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.paths.words import place
from rankwise.lint.rule import Rule
from rankwise.lint.topics.collective_calls import FILLED, OBJECTS, backends, collectives, has_group, word_of
from rankwise.lint.topics.job_view import function_of, text_of
from rankwise.lint.topics.tensor_places import is_on_cpu

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Script

_DEFAULTS = frozenset({"torch.set_default_device", "torch.set_default_tensor_type"})


def check(script: Script) -> Iterator[Finding]:
    """Collectives of the default group, NCCL, on tensors that were made on the CPU."""
    if backends(script) != {"nccl"} or any(call.name in _DEFAULTS for call in script.all_calls):
        return
    found: dict[tuple[int, str], list[Call]] = {}
    for one_place in collectives(script, *(set(FILLED) - OBJECTS), "send", "isend"):
        call = one_place.last
        if has_group(call) or {"device"} & set(call.contexts):
            continue
        node = next((one for one in _tensors(call) if is_on_cpu(script.tree, one, call.node)), None)
        if node is None:
            continue
        key = (id(function_of(script.tree, call.node)), text_of(node))
        found.setdefault(key, []).append(call)
    for (_, shown), (call, *others) in found.items():
        yield script.finding(
            RULE,
            call.node,
            f"`{shown}` is on the CPU and {word_of(call)} uses NCCL, which moves data between GPUs only: every rank fails here",
            f'create it on this rank\'s GPU, `device="cuda"`, pass `{shown}.cuda()`, or start the group with "cpu:gloo,cuda:nccl"',
            also=[place(f"{word_of(one)} gets it, too", one.node, one.module) for one in others],
        )


def _tensors(call: Call) -> list[ast.AST]:
    names = (
        "tensor",
        "input_tensor",
        "input",
        "output_tensor",
        "output",
        "tensor_list",
        "gather_list",
        "scatter_list",
    )
    given = [call.arg_node(None, name) for name in names]
    return [
        one
        for one in (*getattr(call.node, "args", ())[:2], *given)
        if one is not None and not isinstance(one, ast.Constant)
    ]


RULE: Rule[Script] = Rule(
    id="RW307",
    name="cpu-tensor-on-nccl",
    severity="error",
    classes=("C17",),
    summary="a CPU tensor is passed to NCCL",
    check=check,
)
