"""Means of the ranks are averaged although the ranks have different numbers of samples.

**Why it breaks.** The mean of means gives a rank with three samples the same weight as one with thirty. With an uneven
last batch, or rare labels, the number is silently wrong: 0.45 instead of 0.82.

Bad:

```python
import torch
import torch.distributed as dist


def accuracy(model, loader):
    correct = total = 0
    for x, y in loader:
        correct += (model(x).argmax(1) == y).sum().item()
        total += y.numel()
    value = torch.tensor(correct / total)
    dist.all_reduce(value)
    return value / dist.get_world_size()
```

Good:

```python
import torch
import torch.distributed as dist


def accuracy(model, loader):
    correct = total = 0
    for x, y in loader:
        correct += (model(x).argmax(1) == y).sum().item()
        total += y.numel()
    both = torch.tensor([correct, total])
    dist.all_reduce(both)
    return both[0] / both[1]
```

**When it says nothing.** Sums and counts are reduced and divided afterwards; one batch of the same size everywhere.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import above, called_names, function_of, once, places, text_of
from rankwise.lint.topics.option_text import sources

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Script

_REDUCES = ("torch.distributed.all_reduce", "torch.distributed.reduce", "accelerate.Accelerator.reduce", "accelerate.Accelerator.gather",
            "lightning.fabric.Fabric.all_reduce")  # fmt: skip
_COUNTS = re.compile(
    r"(self\.)?(n|total|count|cnt|seen|num_(samples|tokens|examples|batches)|n_samples)", re.IGNORECASE
)
_WORLD = ("world", "num_replicas", "num_processes", "n_gpu", "size()")


def check(script: Script) -> Iterator[Finding]:
    """Ratios of this rank's counts that are reduced over ranks and averaged."""
    for place in once(places(script, *_REDUCES)):
        call = place.last
        node = call.arg_node(0, "tensor")
        function = function_of(script.tree, call.node)
        if node is None or "Items" in ast.unparse(node):
            continue
        # A metric's class counts in one method and divides in another.
        around = next(
            (one for one in above(script.tree, function) if isinstance(one, ast.ClassDef)), function
        )
        ratio = next((one for one in _parts_in(script, node, function) if _is_ratio(one, around)), None)
        if ratio is None:
            continue
        if _is_averaged(script, call, function):
            yield script.finding(
                RULE,
                call.node,
                f"`{text_of(ratio)}` is a mean over this rank's samples: averaged over ranks it is wrong if the sample counts differ",
                "reduce the sum and the count, then divide",
            )


def _parts_in(script: Script, node: ast.AST, function: ast.AST) -> Iterator[ast.AST]:
    """What the reduced value was computed from, in the same function."""
    inside = set(ast.walk(function))
    for one in sources(script.tree, node):
        if one in inside:
            yield from ast.walk(one)


def _is_ratio(node: ast.AST, function: ast.AST) -> bool:
    """A division by what is counted in a loop, or the mean of a list that a loop has filled."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        text = ast.unparse(node.right)
        if any(word in text.lower() for word in _WORLD):
            return False
        return (
            _is_counted(node.right, function)
            or _COUNTS.fullmatch(text) is not None
            or ("len(" in text and "loader" in text.lower())
        )
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "mean"
        and node.args == []
    ):
        inner = node.func.value
        return (
            isinstance(inner, ast.Call)
            and getattr(inner.func, "attr", "") in {"stack", "cat", "tensor"}
            and _is_filled(inner, function)
        )
    return False


def _is_counted(node: ast.expr, around: ast.AST) -> bool:
    names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} | {
        one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)
    }
    counted = {
        getattr(one.target, "id", getattr(one.target, "attr", ""))
        for one in ast.walk(around)
        if isinstance(one, ast.AugAssign)
    }
    return bool(names & counted)


def _is_filled(node: ast.Call, function: ast.AST) -> bool:
    names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    return any(
        isinstance(one, ast.Call)
        and isinstance(one.func, ast.Attribute)
        and one.func.attr == "append"
        and getattr(one.func.value, "id", "") in names
        for one in ast.walk(function)
    )


def _is_averaged(script: Script, call: Call, function: ast.AST) -> bool:
    """Whether the sum over ranks becomes a mean: by the operation, or by a division by the number of ranks."""
    text = ast.unparse(call.node)
    if "AVG" in text or "mean" in text or call.name.endswith(".gather"):
        return True
    divisors = [
        one.right for one in ast.walk(function) if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Div)
    ]
    divisors += [
        one.value
        for one in ast.walk(function)
        if isinstance(one, ast.AugAssign) and isinstance(one.op, ast.Div)
    ]
    texts = [ast.unparse(part).lower() for one in divisors for part in sources(script.tree, one)]
    return any(word in one for one in texts for word in _WORLD) or "div_" in called_names(function)


RULE: Rule[Script] = Rule(
    id="RW612",
    name="mean-of-means",
    severity="warning",
    classes=("M2",),
    summary="means of ranks with different numbers of samples are averaged",
    check=check,
)
