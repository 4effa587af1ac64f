"""Gradients are summed over the ranks by hand and never divided.

**Why it breaks.** `dist.all_reduce(p.grad)` gives the sum. Each step is then `world_size` times too large, and the run
behaves differently with every number of GPUs.

Bad:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(8, 4)).mean().backward()
for p in model.parameters():
    dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
optimizer.step()
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(8, 4)).mean().backward()
for p in model.parameters():
    dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
    p.grad /= dist.get_world_size()
optimizer.step()
dist.destroy_process_group()
```

**When it says nothing.** Something is divided in the same function, something is divided by the number of ranks
anywhere, or the reduction is `ReduceOp.AVG`.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.collective_calls import collectives, filled_node, word_of
from rankwise.lint.topics.job_view import function_of, text_of
from rankwise.lint.topics.summing import divides, is_sum
from rankwise.lint.topics.tensor_text import bindings, key_of, root_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script

_HOOKS = frozenset({"register_hook", "register_comm_hook", "register_post_accumulate_grad_hook"})


def check(script: Script) -> Iterator[Finding]:
    """Sums of gradients without a division."""
    for place in collectives(script, "all_reduce", "all_reduce_coalesced"):
        call = place.last
        node = filled_node(call) if word_of(call) == "all_reduce" else call.arg_node(0, "tensors")
        if node is None or not is_sum(call):
            continue
        function = function_of(script.tree, call.node)
        if not (_is_gradient(script.tree, node, call.node, 0) or _is_hook(script.tree, function)):
            continue
        if divides(script, function) or not _is_whole(script, function):
            continue
        yield script.finding(
            RULE,
            call.node,
            f"`{text_of(node)}` becomes the sum over all ranks and is never divided, so each step is too large by the number of ranks",
            f"divide afterwards, `{text_of(root_of(node) or node)} /= dist.get_world_size()`, or reduce with `op=dist.ReduceOp.AVG`",
        )


def _is_gradient(tree: ast.Module, node: ast.AST, at: ast.AST, depth: int) -> bool:
    if any(isinstance(one, ast.Attribute) and one.attr == "grad" for one in ast.walk(node)):
        return True
    if any(
        isinstance(one, ast.Call)
        and isinstance(one.func, ast.Attribute)
        and one.func.attr in {"gradients", "buffer"}
        for one in ast.walk(node)
    ):
        return "bucket" in ast.unparse(node)
    keys = (
        {key for one in ast.walk(node) if (key := key_of(one)) and isinstance(one, ast.Name)}
        if depth < 4
        else set()
    )
    for statement, value in (one for key in keys for one in bindings(tree, key, at)[-2:]):
        source = value if value is not None else getattr(statement, "iter", None)
        if source is not None and _is_gradient(tree, source, statement, depth + 1):
            return True
    return False


def _is_hook(tree: ast.Module, function: ast.AST) -> bool:
    """Whether a function is registered as a hook that changes gradients."""
    name = getattr(function, "name", "")
    return bool(name) and any(
        isinstance(one, ast.Call)
        and isinstance(one.func, ast.Attribute)
        and one.func.attr in _HOOKS
        and any(
            key_of(part).rpartition(".")[2] == name
            for part in (*one.args, *(word.value for word in one.keywords))
        )
        for one in ast.walk(tree)
    )


def _is_whole(script: Script, function: ast.AST) -> bool:
    """Whether the callers of the function are in this file too: they may divide."""
    return function is script.tree or any(
        isinstance(one, (ast.Name, ast.Attribute))
        and isinstance(one.ctx, ast.Load)
        and key_of(one).rpartition(".")[2] == getattr(function, "name", "")
        for one in ast.walk(script.tree)
    )


RULE: Rule[Script] = Rule(
    id="RW409",
    name="gradients-not-divided",
    severity="error",
    classes=("D25",),
    summary="gradients are summed over the ranks and never divided",
    check=check,
)
