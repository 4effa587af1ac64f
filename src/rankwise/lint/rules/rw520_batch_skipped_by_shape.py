"""A rank skips a batch because of its shape, and the others run the backward pass without it.

**Why it breaks.** Lengths differ from batch to batch, so one rank moves on to its next batch while the others wait in
the backward pass of this one. They are then paired across steps (gradients of different steps are averaged), and at the
end of the epoch the ranks with more steps hang.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
dataset = [torch.ones(length) for length in range(1, 600)]
loader = DataLoader(dataset, batch_size=1, sampler=DistributedSampler(dataset, shuffle=False))
model = DDP(torch.nn.Linear(1, 1))
for x in loader:
    if x.shape[1] > 512:
        continue
    model(x.mean(1, keepdim=True)).sum().backward()
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
dataset = [torch.ones(length) for length in range(1, 600)]
loader = DataLoader(dataset, batch_size=1, sampler=DistributedSampler(dataset, shuffle=False))
model = DDP(torch.nn.Linear(1, 1))
for x in loader:
    model(x[:, :512].mean(1, keepdim=True)).sum().backward()
dist.destroy_process_group()
```

**When it says nothing.** The number of samples in a batch (``len(x)``, ``x.shape[0]``), which a DistributedSampler
keeps equal; ranks agree on the skip by a collective; under ``join()``.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.data_flow import passes
from rankwise.lint.topics.job_view import text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script
    from rankwise.lint.topics.data_flow import Pass


def check(script: Script) -> Iterator[Finding]:
    """`continue` under a test of a batch's length, in a loop that trains together."""
    seen: set[int] = set()
    for one in passes(script):
        if (
            not one.syncs
            or one.module is not script.module
            or id(one.loop) in seen
            or any("join" in call.contexts for call in one.inside)
        ):
            continue
        seen.add(id(one.loop))
        for test in _skips(one):
            message = f"a rank whose batch has `{text_of(test)}` skips this step, and the others wait for it in the backward pass"
            yield script.finding(
                RULE,
                test,
                message,
                "truncate or filter the samples before the sampler sees them, or let all ranks agree: all_reduce the test with MAX",
            )


def _skips(one: Pass) -> Iterator[ast.AST]:
    target, body = getattr(one.loop, "target", None), getattr(one.loop, "body", [])
    if target is None:
        return
    names = {part.id for part in ast.walk(target) if isinstance(part, ast.Name)}
    for number, statement in enumerate(body):
        if not isinstance(statement, ast.If) or not isinstance(statement.body[-1], ast.Continue):
            continue
        later = any("backward" in text for rest in body[number + 1 :] for text in _called(rest))
        if later and any(_is_length(part, names) for part in ast.walk(statement.test)):
            yield statement.test


def _called(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and isinstance(part.func, (ast.Attribute, ast.Name)):
            yield part.func.attr if isinstance(part.func, ast.Attribute) else part.func.id


def _is_length(node: ast.AST, names: set[str]) -> bool:
    """`x.shape[1]` or `x.size(1)` of the batch: any dimension but the first."""
    if (
        isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "shape"
    ):
        return _is_inner(node.slice) and _starts_with(node.value.value, names)
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "size"
        and node.args
    ):
        return _is_inner(node.args[0]) and _starts_with(node.func.value, names)
    return False


def _is_inner(index: ast.AST) -> bool:
    if isinstance(index, ast.UnaryOp) and isinstance(index.op, ast.USub):
        return True
    return isinstance(index, ast.Constant) and isinstance(index.value, int) and index.value > 0


def _starts_with(node: ast.AST, names: set[str]) -> bool:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return isinstance(node, ast.Name) and node.id in names


RULE: Rule[Script] = Rule(
    id="RW520",
    name="batch-skipped-by-shape",
    severity="error",
    classes=("X10", "D15"),
    summary="a rank skips a step because of its batch's shape",
    check=check,
)
