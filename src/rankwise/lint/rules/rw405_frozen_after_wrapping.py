"""Parameters are frozen or unfrozen after the model was wrapped.

**Why it breaks.** DDP reduces the parameters that required a gradient when it was created. A layer unfrozen later
trains on this rank's gradients alone, silently. A layer frozen later is still waited for: `Expected to have finished
reduction in the prior iteration` in the second step.

Bad:

```python
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
net[0].requires_grad_(False)
model = DDP(net)
model.module[0].requires_grad_(True)
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
net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
model = DDP(net)
model(torch.rand(4, 8)).sum().backward()
dist.destroy_process_group()
```

**When it says nothing.** The model is wrapped again afterwards, gradients are switched off and on in turn (as for a
discriminator), or only for evaluation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rankwise.lint.finding import span_of
from rankwise.lint.model.values import Method, Object
from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import node_in, statement_of, text_of
from rankwise.lint.topics.tensor_text import is_in
from rankwise.lint.topics.wrapping import trains_later, wraps

if TYPE_CHECKING:
    import ast
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.model.values import Value
    from rankwise.lint.script import Script
    from rankwise.lint.topics.wrapping import Wrap


class _Change(NamedTuple):
    node: ast.AST
    value: bool | None
    is_whole: bool


def check(script: Script) -> Iterator[Finding]:
    """Changes of `requires_grad` of a wrapped model's parameters."""
    for wrap in wraps(script):
        if not wrap.kind.endswith("DistributedDataParallel"):
            continue
        changes = [change for call in wrap.calls_after() if (change := _change(script, wrap, call))]
        # Off and on in turn is legal; and where all is frozen, as in a teacher, nothing is left to wait for.
        if len({change.value for change in changes}) != 1 or wrap.is_wrapped_again(wrap.call.index + 1):
            continue
        node, value, is_whole = changes[0]
        if is_whole:
            continue
        name = next(iter(sorted(wrap.names)), "the model")
        verb = "frozen or unfrozen" if value is None else "unfrozen" if value else "frozen"
        what = (
            "is still waited for: the second step fails"
            if value is False
            else "trains on this rank's gradients alone"
        )
        yield script.finding(
            RULE,
            node,
            f"`{text_of(node)}` comes after `{name}` was wrapped, which had chosen its parameters by then: what is {verb} {what}",
            "set `requires_grad` before the model is wrapped, or wrap it again after the change",
            also=[("wrapped here", script.piece.path, span_of(wrap.call.node, script.lines))]
            if is_in(script.tree, wrap.call.node)
            else [],
        )


def _change(script: Script, wrap: Wrap, call: Call) -> _Change | None:
    """`part.requires_grad_(...)`, or `p.requires_grad = ...` for a parameter of it."""
    if call.name.endswith(".requires_grad_"):
        given = call.arg(0, "requires_grad")
        value = True if given is None else given.const
    elif call.name == "parameter.__setattr__" and call.args[0].const == "requires_grad":
        value = call.args[1].const
    else:
        return None
    owner, tests = call.receiver, call.tests
    if isinstance(owner.thing, Object) and owner.thing.kind == "parameter" and owner.thing.call is not None:
        listed = owner.thing.call
        owner, tests = listed.receiver, call.tests[len(listed.tests) :]
    module = _module_of(owner)
    node = node_in(script, call)
    if node is None or not wrap.holds(module) or not trains_later(wrap, call):
        return None
    is_whole = value is False and not tests and owner.thing in {wrap.wrapper, wrap.inner.thing}
    node = statement_of(script.tree, node) if call.name == "parameter.__setattr__" else node
    return None if node is None else _Change(node, value if isinstance(value, bool) else None, is_whole)


def _module_of(value: Value) -> Value:
    """The model that ``model.module.layer4`` is a part of, where its own parts are not known."""
    while isinstance(value.thing, Method):
        value = value.thing.receiver
    return value


RULE: Rule[Script] = Rule(
    id="RW405",
    name="frozen-after-wrapping",
    severity="error",
    classes=("D9",),
    summary="parameters are frozen or unfrozen after the model was wrapped",
    check=check,
)
