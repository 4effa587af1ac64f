"""A wrapped model is moved to another device.

**Why it breaks.** DDP keeps buckets and hooks for the parameters as they were when it was created. After `.cpu()` and
back, or with a first `.to(device)` after wrapping, gradients are no longer reduced into them: the replicas silently
diverge, or the next step fails.

Bad:

```python
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
model = DDP(torch.nn.Linear(4, 1))
model.to(local_rank)
model(torch.rand(8, 4, device="cuda")).sum().backward()
dist.destroy_process_group()
```

Good:

```python
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
model = DDP(torch.nn.Linear(4, 1).to(local_rank), device_ids=[local_rank])
model(torch.rand(8, 4, device="cuda")).sum().backward()
dist.destroy_process_group()
```

**When it says nothing.** Copies (`copy.deepcopy`), moves after the last training step, and a second `.to` to the device
where the model already is.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.finding import span_of
from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import text_of
from rankwise.lint.topics.tensor_text import is_in, last_value
from rankwise.lint.topics.wrapping import trains_later, wraps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Script
    from rankwise.lint.topics.wrapping import Wrap

_MOVES = frozenset({"to", "cuda", "cpu", "half", "bfloat16", "double", "to_empty"})


def check(script: Script) -> Iterator[Finding]:
    """Moves of a wrapped model, or of the model inside, that training follows."""
    for wrap in wraps(script):
        if not wrap.kind.endswith("DistributedDataParallel") or not wrap.call.name.endswith("Parallel"):
            continue
        for call in wrap.calls_after():
            if (
                not _is_move(call, wrap)
                or not is_in(script.tree, call.node)
                or _is_copy(script.tree, call)
                or wrap.is_wrapped_again(call.index)
            ):
                continue
            if not trains_later(wrap, call) or (_comes_home(call) and _was_moved(wrap)):
                continue
            name = next(iter(sorted(wrap.names)), "the model")
            yield script.finding(
                RULE,
                call.node,
                f"`{text_of(call.node)}` moves the model after it was wrapped; DDP keeps the old parameters, and gradients are no longer averaged",
                f"move the model before it is wrapped; to save it, take a copy of `{name}.module.state_dict()` to the CPU",
                also=[("wrapped here", script.piece.path, span_of(wrap.call.node, script.lines))]
                if is_in(script.tree, wrap.call.node)
                else [],
            )
            break


def _is_move(call: Call, wrap: Wrap) -> bool:
    word = call.name.rpartition(".")[2]
    if (
        word not in _MOVES
        or not isinstance(call.node, ast.Call)
        or not isinstance(call.node.func, ast.Attribute)
    ):
        return False
    thing = call.receiver.thing
    if thing is None or (thing is not wrap.wrapper and thing is not wrap.inner.thing):
        return False
    if word == "to":
        place = call.node.args[0] if call.node.args else None
        is_type = isinstance(place, ast.Attribute) and text_of(place).startswith("torch.")
        return (
            bool(call.node.args or "device" in call.kwargs)
            and not is_type
            and "memory_format" not in call.kwargs
        )
    return True


def _is_copy(tree: ast.Module, call: Call) -> bool:
    owner = last_value(tree, call.node.func.value, call.node)  # type: ignore[attr-defined]
    return any(word in ast.unparse(owner) for word in ("copy", "clone", "state_dict"))


def _comes_home(call: Call) -> bool:
    """`.to(device)` and `.cuda()` go to where the model was before, if it was moved then."""
    return call.name.rpartition(".")[2] in {"to", "cuda"} and not any(
        value.const == "cpu" for value in call.args
    )


def _was_moved(wrap: Wrap) -> bool:
    inner = wrap.inner.thing
    if inner is None or wrap.call.arg(1, "device_ids") is not None:
        return True
    history = wrap.entry.histories[0].calls
    return any(
        one.index < wrap.call.index
        and one.name.rpartition(".")[2] in {"to", "cuda"}
        and one.receiver.thing is inner
        for one in history
    )


RULE: Rule[Script] = Rule(
    id="RW406",
    name="moved-after-wrapping",
    severity="error",
    classes=("D10",),
    summary="a wrapped model is moved to another device",
    check=check,
)
