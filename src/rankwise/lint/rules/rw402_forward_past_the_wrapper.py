"""Training uses the model inside DistributedDataParallel and bypasses the wrapper.

**Why it breaks.** DDP reduces the gradients of what went through its own `forward`. A loss computed with
`model.module(x)`, with `model.module.training_step(batch)` or with the bare model has only this rank's gradients: the
replicas silently diverge.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = model.module(torch.randn(8, 4)).square().mean()
loss.backward()
optimizer.step()
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = model(torch.randn(8, 4)).square().mean()
loss.backward()
optimizer.step()
dist.destroy_process_group()
```

**When it says nothing.** Evaluation without gradients, a loss that also went through the wrapper, gradients reduced by hand.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.finding import span_of
from rankwise.lint.rule import Rule
from rankwise.lint.topics.tensor_text import backward_of, is_in, key_of, nodes_in
from rankwise.lint.topics.wrapping import OFF, wraps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Script
    from rankwise.lint.topics.wrapping import Wrap


def check(script: Script) -> Iterator[Finding]:
    """Wrapped models whose wrapper is never called with gradients, although the model inside is trained."""
    for wrap in wraps(script):
        if wrap.call.tests or _has_other_ends(wrap):
            continue  # wrapped in some settings only: elsewhere the bare model is right
        after = list(wrap.calls_after())
        if any(_is_forward(call, wrap) for call in after) or any("grad" in _argument(call) for call in after):
            continue
        inner = next((call for call in after if _is_past(call, wrap)), None)
        if inner is None:
            continue
        back = next(
            (
                one
                for one in after
                if one.name.endswith("backward") and one.index > inner.index and not _via(one)
            ),
            None,
        )
        node = next(
            (
                one
                for one in (*(site.node for site in reversed(inner.stack)), inner.node)
                if _names_module(one) and is_in(script.tree, one)
            ),
            None,
        )
        node = node or (inner.node if is_in(script.tree, inner.node) else None)
        if back is None or node is None or backward_of(inner.module, inner.node, "", inner.stack) is None:
            continue
        name = next(iter(sorted(wrap.names)), "the wrapped model")
        yield script.finding(
            RULE,
            node,
            f"the loss bypasses `{name}`, so its gradients are never averaged: every rank trains its own model",
            f"call `{name}(...)` itself; move what the loss needs into the model's `forward`",
            also=[("wrapped here", script.piece.path, span_of(wrap.call.node, script.lines))]
            if is_in(script.tree, wrap.call.node)
            else [],
        )


def _has_other_ends(wrap: Wrap) -> bool:
    """Whether the function that wraps returns something else in other settings."""
    function = getattr(wrap.call.function, "node", None)
    returns = (
        [one for one in nodes_in(function) if isinstance(one, ast.Return) and one.value]
        if function is not None
        else []
    )
    return len(returns) > 1


def _is_forward(call: Call, wrap: Wrap) -> bool:
    if OFF & set(call.contexts):
        return False
    if call.name.endswith(".__call__") and call.receiver.thing is wrap.wrapper:
        return True
    # Passed to an unknown function, which may call it.
    return (
        call.name.startswith("?")
        or not call.name.startswith(("torch.", "builtins.", "user.", "accelerate", "copy"))
    ) and any(value.thing is wrap.wrapper for value in (*call.args, *call.kwargs.values()))


def _via(call: Call) -> bool:
    return bool(call.receiver.via) or any(value.via for value in call.args)


def _argument(call: Call) -> str:
    if call.name.startswith("torch.distributed.") and call.name.endswith(
        ("all_reduce", "reduce", "reduce_scatter_tensor", "all_gather")
    ):
        node = call.arg_node(0, "tensor")
        return ast.unparse(node) if node is not None else ""
    return ""


def _is_past(call: Call, wrap: Wrap) -> bool:
    if OFF & set(call.contexts):
        return False
    if call.name.endswith(".__call__"):
        return call.receiver.thing is wrap.inner.thing or (
            id(call.receiver.thing) in wrap.parts() and call.receiver.thing is not None
        )
    if wrap.inner.thing is None and wrap.inner.path and call.name == f"?{wrap.inner.path}":
        return isinstance(call.node, ast.Call) and key_of(call.node.func) not in wrap.names
    return (
        wrap.inner.thing is None
        and ("module" in call.receiver.origin or call.name == "?module")
        and _names_module(call.node)
    )


def _names_module(node: ast.AST) -> bool:
    """`ddp.module(x)` or `ddp.module.loss(x)`."""
    if not isinstance(node, ast.Call):
        return False
    words = key_of(node.func).split(".")
    return len(words) > 1 and "module" in words[-2:]


RULE: Rule[Script] = Rule(
    id="RW402",
    name="forward-past-the-wrapper",
    severity="error",
    classes=("D7",),
    summary="training bypasses the DistributedDataParallel around the model",
    check=check,
)
