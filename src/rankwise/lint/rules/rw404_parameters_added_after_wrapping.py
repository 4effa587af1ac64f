"""The model gets new parameters after it was wrapped.

**Why it breaks.** DDP registers the parameters once, in its constructor. A layer that is added or replaced afterwards
is not broadcast from rank 0, so it differs from the start, and its gradients are never reduced.

Bad:

```python
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
body = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
model = DDP(body)
model.module.head = nn.Linear(2, 5)
model(torch.rand(4, 8)).sum().backward()
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
body = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
body.head = nn.Linear(2, 5)
model = DDP(body)
model(torch.rand(4, 8)).sum().backward()
dist.destroy_process_group()
```

**When it says nothing.** The model is wrapped again afterwards; what is set is neither a module nor a parameter.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.finding import span_of
from rankwise.lint.model.values import Instance, Object
from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import parents_of, text_of
from rankwise.lint.topics.tensor_text import is_behind, is_in, key_of, last_value
from rankwise.lint.topics.wrapping import refers_to, wraps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.model.values import Value
    from rankwise.lint.script import Script
    from rankwise.lint.topics.wrapping import Wrap

_ADDERS = frozenset({"add_module", "register_module", "register_parameter", "append", "insert", "extend"})
_HEAVY = (
    "Linear",
    "Conv",
    "Embedding",
    "LSTM",
    "GRU",
    "Norm",
    "Attention",
    "Transformer",
    "Parameter",
    "Sequential",
    "ModuleList",
    "RNN",
    "Bilinear",
)


def check(script: Script) -> Iterator[Finding]:
    """Modules and parameters that a wrapped model gets."""
    told: set[int] = set()
    for wrap in wraps(script):
        for node in (*_set_by_call(script, wrap), *_set_by_statement(script, wrap)):
            if id(node) in told:
                continue
            told.add(id(node))
            name = next(iter(sorted(wrap.names)), "the model")
            yield script.finding(
                RULE,
                node,
                f"`{text_of(node)}` adds parameters after `{name}` was wrapped, which knows only the earlier ones: these differ between ranks",
                "build the complete model first, then wrap it",
                also=[("wrapped here", script.piece.path, span_of(wrap.call.node, script.lines))]
                if is_in(script.tree, wrap.call.node)
                else [],
            )


def _set_by_call(script: Script, wrap: Wrap) -> Iterator[ast.AST]:
    for call in wrap.calls_after():
        is_new = call.module is script.module and _adds(script, wrap, call)
        if is_new and not wrap.is_wrapped_again(call.index):
            yield call.node


def _adds(script: Script, wrap: Wrap, call: Call) -> bool:
    """Whether a call gives the wrapped model a new part."""
    if call.name == "builtins.setattr":
        is_there = len(call.args) > 2 and wrap.holds(call.args[0])
        return is_there and _is_heavy(call.args[2], script, call.arg_node(2))
    if call.name.endswith(".__setattr__"):
        is_there = isinstance(call.node, ast.Attribute) and wrap.holds(call.receiver)
        return is_there and _is_heavy(call.args[1], script, None)
    return (
        call.name.rpartition(".")[2] in _ADDERS
        and isinstance(call.node, ast.Call)
        and bool(call.args)
        and _is_on_model(call, wrap)
        and _is_heavy(call.args[-1], script, None)
    )


def _is_on_model(call: Call, wrap: Wrap) -> bool:
    return wrap.holds(call.receiver) or refers_to(call.node.func, wrap)  # type: ignore[attr-defined]


def _set_by_statement(script: Script, wrap: Wrap) -> Iterator[ast.AST]:
    if not wrap.names or not is_in(script.tree, wrap.call.node):
        return
    made_later = [call for call in wrap.calls_after() if call.module is script.module]
    executed, modules = {id(call.node) for call in made_later}, _made_modules(made_later)
    for node in parents_of(script.tree):
        if not isinstance(node, ast.Assign) or not isinstance(
            node.targets[0], (ast.Attribute, ast.Subscript)
        ):
            continue
        target, value = node.targets[0], node.value
        words = ast.unparse(target).replace("[", ".[").split(".")
        if (
            "module" not in words[:-1]
            or words[-1] in {"data", "grad", "requires_grad", "module"}
            or not refers_to(target, wrap)
        ):
            continue
        made = last_value(script.tree, value, node)
        is_later = id(made) in executed or is_behind(node, wrap.call.node)
        if (
            is_later
            and isinstance(made, ast.Call)
            and (_says_heavy(made) or id(made) in modules)
            and not wrap.is_wrapped_again(wrap.call.index + 1)
        ):
            yield node


def _made_modules(calls: list[Call]) -> set[int]:
    return {id(call.node) for call in calls if _is_module(call.result)}


def _is_heavy(value: Value, script: Script, node: ast.AST | None) -> bool:
    if _is_module(value):
        return True
    return isinstance(node, ast.Call) and _says_heavy(node) and script is not None


def _is_module(value: Value) -> bool:
    thing = value.thing
    if isinstance(thing, Object):
        return thing.kind.startswith("torch.nn.") and any(word in thing.kind for word in _HEAVY)
    return isinstance(thing, Instance) and any("Module" in name for name in thing.cls.library_bases())


def _says_heavy(node: ast.Call) -> bool:
    words = key_of(node.func).split(".")
    return words[0] in {"torch", "nn"} and any(word in words[-1] for word in _HEAVY)


RULE: Rule[Script] = Rule(
    id="RW404",
    name="parameters-added-after-wrapping",
    severity="error",
    classes=("D8",),
    summary="a wrapped model gets new parameters",
    check=check,
)
