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

import ast
from typing import TYPE_CHECKING, NamedTuple

from rankwise.lint.finding import span_of
from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import parents_of, text_of
from rankwise.lint.topics.tensor_text import bindings, is_behind, is_in, key_of
from rankwise.lint.topics.wrapping import refers_to, trains_later, wraps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
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
        changes = [*_by_method(script, wrap), *_by_assignment(script, wrap)]
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


def _by_method(script: Script, wrap: Wrap) -> list[_Change]:
    found: list[_Change] = []
    for call in wrap.calls_after():
        if (
            call.name.rpartition(".")[2] != "requires_grad_"
            or not is_in(script.tree, call.node)
            or not isinstance(call.node, ast.Call)
        ):
            continue
        given = call.arg(0, "requires_grad")
        value = True if given is None else given.const if isinstance(given.const, bool) else None
        is_its = (
            wrap.holds(call.receiver)
            or refers_to(call.node.func, wrap)
            or (isinstance(call.node.func, ast.Attribute) and _runs_over(script, wrap, call.node.func.value))
        )
        is_copy = "copy" in ast.unparse(call.node) or "copy" in _origin(script, call.node)
        is_whole = value is False and call.receiver.thing in {wrap.wrapper, wrap.inner.thing}
        if is_its and not is_copy and trains_later(wrap, call):
            found.append(_Change(call.node, value, is_whole))
    return found


def _origin(script: Script, node: ast.Call) -> str:
    owner = node.func.value if isinstance(node.func, ast.Attribute) else node
    found = bindings(script.tree, key_of(owner), node) if key_of(owner) else []
    return " ".join(ast.unparse(value) for _, value in found if value is not None)


def _by_assignment(script: Script, wrap: Wrap) -> list[_Change]:
    if not is_in(script.tree, wrap.call.node):
        return []
    behind = {id(loop) for call in wrap.calls_after() for loop in call.loops}
    found: list[_Change] = []
    for node in ast.walk(script.tree):
        if not (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Attribute)
            and isinstance(node.value, ast.Constant)
        ):
            continue
        target = node.targets[0]
        if target.attr != "requires_grad" or not isinstance(node.value.value, bool):
            continue
        if not (refers_to(target.value, wrap) or _runs_over(script, wrap, target.value)):
            continue
        if not _learns_after(wrap, node):
            continue
        if (
            is_behind(node, wrap.call.node)
            or _runs_over(script, wrap, target.value)
            or any(
                id(one) in behind
                for one in ast.walk(script.tree)
                if isinstance(one, ast.For) and node in ast.walk(one)
            )
        ):
            is_whole = node.value.value is False and _is_whole(script, wrap, node)
            found.append(_Change(node, node.value.value, is_whole))
    return found


def _is_whole(script: Script, wrap: Wrap, node: ast.AST) -> bool:
    """Whether all parameters are frozen: then none is reduced, as of a teacher."""
    loop = parents_of(script.tree)[node]
    whole = {
        id(call.node)
        for call in wrap.calls_after()
        if call.name.endswith(".parameters") and call.receiver.thing in {wrap.wrapper, wrap.inner.thing}
    }
    return isinstance(loop, ast.For) and id(loop.iter) in whole


def _learns_after(wrap: Wrap, node: ast.AST) -> bool:
    """Whether a backward pass may follow: further down, in a loop around this place, or in another function."""
    backward = [call for call in wrap.calls_after() if call.name.endswith("backward")]
    return any(
        is_behind(call.node, node)
        or any(node in ast.walk(loop) for loop in call.loops)
        or (call.function is not None and node not in ast.walk(call.function.node))
        for call in backward
    )


def _runs_over(script: Script, wrap: Wrap, node: ast.AST) -> bool:
    """Whether a name is a parameter out of `for p in ddp.module.body.parameters()`."""
    key = key_of(node)
    asked = {
        id(call.node): wrap.holds(call.receiver)
        for call in wrap.calls_after()
        if call.name.endswith("parameters")
    }
    for statement, value in bindings(script.tree, key, node)[-1:] if key else []:
        if value is None and isinstance(statement, ast.For):
            return any(
                isinstance(one, ast.Call)
                and isinstance(one.func, ast.Attribute)
                and one.func.attr in {"parameters", "named_parameters"}
                and id(one) in asked
                and (
                    refers_to(one.func.value, wrap) or (asked[id(one)] and "copy" not in _origin(script, one))
                )
                for one in ast.walk(statement.iter)
            )
    return False


RULE: Rule[Script] = Rule(
    id="RW405",
    name="frozen-after-wrapping",
    severity="error",
    classes=("D9",),
    summary="parameters are frozen or unfrozen after the model was wrapped",
    check=check,
)
