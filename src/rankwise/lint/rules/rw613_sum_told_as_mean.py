"""A loss or mean is summed over the ranks and never divided by their number.

**Why it breaks.** ``all_reduce`` sums. What is then reported as the mean loss is the sum over all ranks: with eight
ranks eight times too large, and a schedule or an early stop that follows it is wrong too.

Bad:

```python
import torch
import torch.distributed as dist


def reduce_mean(value):
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item()
```

Good:

```python
import torch
import torch.distributed as dist


def reduce_mean(value):
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
```

**When it says nothing.** ``ReduceOp.AVG`` and ``MAX``, counts and sums that are reported as such, and functions in
which anything divides.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import called_names, function_of, once, places, text_of
from rankwise.lint.topics.option_text import sources

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script

_MEAN = re.compile(r"(^|_)(avg|mean|average|averaged)(_|$)|reduce_mean|mean_reduce|average_", re.IGNORECASE)
_LOSS = re.compile(r"loss|acc(uracy)?($|_)|error_rate|ppl", re.IGNORECASE)
_SUM = re.compile(r"sum|total|count|num|n_|correct|tokens|numel|grad|param", re.IGNORECASE)
_DIVIDES = frozenset({"div_", "div", "mean", "true_divide", "divide", "mul_"})


def check(script: Script) -> Iterator[Finding]:
    """Sums over ranks that are called a mean or a loss and never divided."""
    for place in once(places(script, "torch.distributed.all_reduce", "torch.distributed.reduce")):
        call = place.last
        node = call.arg_node(0, "tensor")
        op = ast.unparse(
            call.arg_node(1 if call.name.endswith("all_reduce") else 2, "op") or ast.Constant("SUM")
        )
        if (
            node is None
            or op.rpartition(".")[2].strip("'\"") != "SUM"
            or not isinstance(node, (ast.Name, ast.Attribute))
        ):
            continue
        function = function_of(script.tree, call.node)
        name = text_of(node).rpartition(".")[2]
        told = _told_as(name, function)
        if told is None or _divides(script, node, function, call.node):
            continue
        yield script.finding(
            RULE,
            call.node,
            f"`{name}` is summed over all ranks and never divided by their number, but it is {told}",
            f"divide afterwards: {text_of(node)} /= dist.get_world_size()",
        )


def _told_as(name: str, function: ast.AST) -> str | None:
    """By which word it says that it is a mean."""
    function_name = getattr(function, "name", "")
    if _MEAN.search(function_name) and not _SUM.search(function_name):
        return f"what {function_name}() returns"
    if _MEAN.search(name):
        return "called a mean"
    if _LOSS.search(name) and not _SUM.search(name):
        return "reported as the loss or accuracy of one"
    return None


def _divides(script: Script, node: ast.expr, function: ast.AST, call: ast.AST) -> bool:
    """Whether anything near divides; after the loop counts, so the whole function is read."""
    if _DIVIDES & called_names(function) - {"mean"}:
        return True
    line = getattr(call, "lineno", 0)
    for one in ast.walk(function):
        is_division = isinstance(one, (ast.BinOp, ast.AugAssign)) and isinstance(
            one.op, (ast.Div, ast.FloorDiv, ast.Mult)
        )
        if is_division and (getattr(one, "lineno", 0) >= line or _is_source(script, node, one)):
            return True
    return False


def _is_source(script: Script, node: ast.expr, division: ast.AST) -> bool:
    name = text_of(node)
    if isinstance(division, ast.AugAssign):
        return text_of(division.target) == name
    return any(division in set(ast.walk(one)) for one in sources(script.tree, node))


RULE: Rule[Script] = Rule(
    id="RW613",
    name="sum-told-as-mean",
    severity="warning",
    classes=("M3",),
    summary="a loss is summed over the ranks and never divided",
    check=check,
)
