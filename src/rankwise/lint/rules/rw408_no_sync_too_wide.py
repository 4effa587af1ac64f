"""Gradients are never averaged, because every backward pass is inside no_sync.

**Why it breaks.** Inside `model.no_sync()` each rank only accumulates its own gradients. The last micro-batch before
`optimizer.step()` must run outside, or each rank steps with its own gradients and the replicas diverge. Around the
backward pass alone it has no effect: the forward pass decides.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    with model.no_sync():
        model(torch.rand(2, 4)).sum().backward()
    if step % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
```

Good:

```python
import contextlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    is_last = step % 4 == 3
    with contextlib.nullcontext() if is_last else model.no_sync():
        model(torch.rand(2, 4)).sum().backward()
    if is_last:
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
```

**When it says nothing.** One backward pass is outside, a condition chooses the context, or gradients are reduced by
hand.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import above
from rankwise.lint.topics.tensor_text import is_in, last_value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Entry, Script

_CONTEXTS = frozenset({"no_sync", "no_backward_sync"})


def check(script: Script) -> Iterator[Finding]:
    """Programs whose backward passes are all inside `no_sync`, or are there without their forward pass."""
    for entry in script.entries:
        calls = entry.histories[0].calls
        backs = [call for call in calls if call.name.endswith(".backward")]
        yield from _without_forward(script, calls, backs)
        inside = [call for call in backs if _in_context(call)]
        if not inside:
            continue
        node = _with_of(script, inside[0])
        if node is None:
            continue
        if len(inside) == len(backs) and not _shares(calls) and _steps(calls, entry):
            yield script.finding(
                RULE,
                node,
                "every backward pass is inside no_sync, so gradients are never averaged: each rank steps with its own",
                "run the last micro-batch before `optimizer.step()` outside: `with contextlib.nullcontext() if is_last else model.no_sync():`",
            )


def _without_forward(script: Script, calls: list[Call], backs: list[Call]) -> Iterator[Finding]:
    """`no_sync` around the backward pass, while the forward pass is outside."""
    for call in backs:
        block = next(
            (
                one
                for one in above(script.tree, call.node)
                if isinstance(one, ast.With) and _leads_to_no_sync(script.tree, one)
            ),
            None,
        )
        if block is None:
            continue
        inside = {id(one) for one in ast.walk(block)}
        forwards = [one for one in calls if _is_forward(one)]
        if forwards and not any(
            id(node) in inside for one in forwards for node in (one.node, *(site.node for site in one.stack))
        ):
            yield script.finding(
                RULE,
                block.items[0].context_expr,
                "no_sync has no effect here: whether gradients are reduced is decided in the forward pass, which is outside",
                "move the forward pass into the same `with`",
                severity="warning",
            )


def _leads_to_no_sync(tree: ast.Module, block: ast.With) -> bool:
    return any(_calls_no_sync(last_value(tree, item.context_expr, block)) for item in block.items)


def _in_context(call: Call) -> bool:
    return bool(_CONTEXTS & set(call.contexts))


def _is_forward(call: Call) -> bool:
    return call.name.endswith(".__call__") and (
        "DistributedDataParallel" in call.name or "FullyShardedDataParallel" in call.name
    )


def _shares(calls: list[Call]) -> bool:
    return any(call.name.startswith("torch.distributed.") and "reduce" in call.name for call in calls)


def _steps(calls: list[Call], entry: Entry) -> bool:
    return any(call.name.endswith(".step") for call in calls) and bool(entry.name)


def _with_of(script: Script, call: Call) -> ast.AST | None:
    """The `no_sync()` that encloses a call, in this file; None if it is chosen by a test."""
    for node in (call.node, *(site.node for site in reversed(call.stack))):
        if not is_in(script.tree, node):
            continue
        for one in above(script.tree, node):
            if (
                isinstance(one, ast.If)
                and any(_calls_no_sync(part) for part in one.body if isinstance(part, ast.With))
                and one.orelse
            ):
                return None
            if isinstance(one, ast.With):
                item = next(
                    (item.context_expr for item in one.items if _calls_no_sync(item.context_expr)), None
                )
                if item is not None:
                    return None if _is_switched(item) else item
    return None


def _is_switched(item: ast.AST) -> bool:
    """`fabric.no_backward_sync(model, enabled=is_accumulating)`."""
    given = [one.value for one in item.keywords if one.arg == "enabled"] if isinstance(item, ast.Call) else []
    given += item.args[1:2] if isinstance(item, ast.Call) else []
    return isinstance(item, ast.IfExp) or any(not isinstance(one, ast.Constant) for one in given)


def _calls_no_sync(node: ast.AST) -> bool:
    return any(isinstance(one, ast.Attribute) and one.attr in _CONTEXTS for one in ast.walk(node))


RULE: Rule[Script] = Rule(
    id="RW408",
    name="no-sync-too-wide",
    severity="error",
    classes=("D23",),
    summary="every backward pass is inside no_sync, or no_sync has no effect",
    check=check,
)
