"""The loss uses features from all_gather, which carry no gradient.

**Why it breaks.** The tensors that `dist.all_gather` writes have no graph, not even this rank's own. A contrastive loss
on the gathered features gets almost no gradient and does not decrease, or fails with `element 0 of tensors does not
require grad`.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(8, 4))
z = model(torch.randn(16, 8))
parts = [torch.zeros_like(z) for _ in range(dist.get_world_size())]
dist.all_gather(parts, z)
everything = torch.cat(parts)
loss = torch.nn.functional.cross_entropy(z @ everything.t(), torch.arange(16))
loss.backward()
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(8, 4))
z = model(torch.randn(16, 8))
parts = [torch.zeros_like(z) for _ in range(dist.get_world_size())]
dist.all_gather(parts, z)
parts[dist.get_rank()] = z
everything = torch.cat(parts)
loss = torch.nn.functional.cross_entropy(z @ everything.t(), torch.arange(16))
loss.backward()
dist.destroy_process_group()
```

**When it says nothing.** This rank's own features are put back into the list, the features are gathered without
gradients on purpose (`torch.no_grad()`, `.detach()`), or by `torch.distributed.nn`.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.finding import span_of
from rankwise.lint.rule import Rule
from rankwise.lint.topics.collective_calls import D, filled_node, word_of
from rankwise.lint.topics.tensor_text import (
    backward_of,
    is_in,
    is_made_up,
    key_of,
    model_calls,
    root_of,
    targets_of,
    touches_model,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Script

_FILLING = frozenset({D + "all_gather", D + "all_gather_into_tensor", D + "_all_gather_base"})
_RETURNING = frozenset({"accelerate.Accelerator.gather", "accelerate.utils.gather"})
_OFF = frozenset({"no_grad", "inference_mode", "set_grad_enabled"})


def check(script: Script) -> Iterator[Finding]:
    """Gathered tensors with a gradient of their own that go into a backward pass."""
    models = model_calls(script.all_calls)
    told: set[int] = set()
    for call in _calls(script):
        if id(call.node) in told or _OFF & set(call.contexts) or _is_autograd(call) or _is_of_numbers(call):
            continue
        given = call.arg_node(0 if call.name in _RETURNING else 1, "tensor", "input_tensor")
        value = call.arg(0 if call.name in _RETURNING else 1, "tensor", "input_tensor")
        if given is None or is_made_up(call.module.tree, given, call.node):
            continue
        if not ((value is not None and value.via) or touches_model(call.module.tree, given, models)):
            continue
        back = _back(call)
        if back is None:
            continue
        node = call.node if call.module is script.module else back
        if not is_in(script.tree, node):
            continue
        told.add(id(call.node))
        shown = ast.unparse(given)
        yield script.finding(
            RULE,
            node,
            f"the loss uses what {word_of(call)} gathered from `{shown}`, which carries no gradient, not even for this rank's part",
            _fix(call, shown),
            also=[("the backward pass", script.piece.path, span_of(back, script.lines))]
            if is_in(script.tree, back)
            else [],
        )


def _calls(script: Script) -> Iterator[Call]:
    for entry in script.entries:
        for history in entry.histories[:1]:
            yield from (call for call in history.calls if call.name in _FILLING | _RETURNING)


def _is_of_numbers(call: Call) -> bool:
    """Whether a function that averages statistics gathers them: a weight in the loss needs no gradient."""
    name = getattr(getattr(call.function, "node", None), "name", "").lower()
    return any(word in name for word in ("average", "sum", "stat", "metric", "count"))


def _is_autograd(call: Call) -> bool:
    owner = getattr(call.function, "owner", None)
    return owner is not None and any("Function" in name for name in owner.library_bases())


def _back(call: Call) -> ast.Call | None:
    if call.name in _RETURNING:
        return backward_of(call.module, call.node, "", call.stack)
    key = key_of(root_of(_filled(call)))
    return backward_of(call.module, call.node, key, call.stack, stops=_puts_back) if key else None


def _filled(call: Call) -> ast.AST | None:
    if call.name.endswith("_all_gather_base"):
        return call.arg_node(0, "output_tensor")
    return filled_node(call)


def _puts_back(statement: ast.AST, key: str) -> bool:
    """`parts[rank] = z`, or a new list with this rank's part in it."""
    return any(
        isinstance(one, ast.Subscript) and key_of(root_of(one)) == key for one in targets_of(statement)
    ) or (
        isinstance(statement, ast.Assign)
        and isinstance(statement.value, (ast.List, ast.BinOp))
        and any(key_of(one) == key for one in statement.targets)
    )


def _fix(call: Call, shown: str) -> str:
    if call.name in _FILLING and call.name.endswith("all_gather"):
        name = key_of(root_of(_filled(call)))
        return f"put this rank's part back, `{name}[dist.get_rank()] = {shown}`, or use torch.distributed.nn.all_gather"
    return f"use `torch.distributed.nn.all_gather({shown})`, which has a backward pass"


RULE: Rule[Script] = Rule(
    id="RW305",
    name="gathered-features-without-gradient",
    severity="error",
    classes=("C14",),
    summary="the loss uses gathered features that carry no gradient",
    check=check,
)
