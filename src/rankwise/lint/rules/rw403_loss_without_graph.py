"""For some batches the loss is a constant without a graph.

**Why it breaks.** `return torch.tensor(0.)` for a batch without targets gives a loss without a graph. A rank with such
a batch makes no backward pass through the model, or fails (`element 0 of tensors does not require grad`), while the
others wait for its gradients.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def masked(pred, mask):
    if mask.sum() == 0:
        return torch.tensor(0.0, requires_grad=True)
    return pred[mask].square().mean()


dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
loss = masked(model(torch.randn(8, 4)), torch.rand(8, 1) > 0.9)
loss.backward()
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def masked(pred, mask):
    if mask.sum() == 0:
        return pred.sum() * 0.0
    return pred[mask].square().mean()


dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
loss = masked(model(torch.randn(8, 4)), torch.rand(8, 1) > 0.9)
loss.backward()
dist.destroy_process_group()
```

**When it says nothing.** The constant is only an initial value to which each batch adds, depends on settings alone, or
is not differentiated.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.finding import span_of
from rankwise.lint.model.values import Spread
from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import above, function_of, is_distributed, statement_of
from rankwise.lint.topics.tensor_text import (
    backward_of,
    is_in,
    key_of,
    loads,
    own_parts,
    statements_in,
    targets_of,
)
from rankwise.lint.topics.wrapping import OFF

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Script

_CONSTANTS = frozenset({"torch.tensor", "torch.zeros", "torch.zeros_like", "torch.as_tensor", "torch.full"})
_ASKS_DATA = frozenset(
    {
        "len",
        "sum",
        "any",
        "all",
        "numel",
        "size",
        "nonzero",
        "isnan",
        "item",
        "count_nonzero",
        "isfinite",
        "isinf",
        "max",
        "min",
        "is_empty",
    }
)


def check(script: Script) -> Iterator[Finding]:
    """Constants in a branch on the data that get a backward pass."""
    told: set[int] = set()
    for entry in script.entries:
        if not is_distributed(entry):
            continue
        for call in entry.histories[0].calls:
            if (
                not _is_constant(call)
                or OFF & set(call.contexts)
                or _is_input(call, entry.histories[0].calls)
            ):
                continue
            back = _back(call)
            node = call.node if is_in(script.tree, call.node) else back
            if back is None or node is None or not is_in(script.tree, node) or id(node) in told:
                continue
            told.add(id(node))
            yield script.finding(
                RULE,
                node,
                "for some batches the loss is this constant, which has no graph: this rank reduces no gradients while the others wait",
                "keep the graph: use `prediction.sum() * 0.0` as the loss of such a batch",
                also=[("the backward pass", script.piece.path, span_of(back, script.lines))]
                if is_in(script.tree, back)
                else [],
            )


def _is_constant(call: Call) -> bool:
    word = call.name.rpartition(".")[2]
    if call.name in _CONSTANTS:
        first = call.arg_node(0)
        if word in {"zeros_like", "zeros"}:
            return True
        if word == "full":
            return False
        return isinstance(first, ast.Constant) or (
            isinstance(first, ast.List) and all(isinstance(one, ast.Constant) for one in first.elts)
        )
    return word == "new_zeros" or (word == "new_tensor" and isinstance(call.arg_node(0), ast.Constant))


def _is_input(call: Call, calls: list[Call]) -> bool:
    """Whether a model is called on the constant: it replaces a batch, and the output has a graph."""
    statement = statement_of(call.module.tree, call.node)
    if not isinstance(statement, ast.Assign):
        return False
    keys = {key_of(one) for one in statement.targets}
    return any(
        key_of(argument) in keys
        for one in calls
        if one.name.endswith(("Parallel.__call__", "nn.Module.__call__")) and one.function is call.function
        for argument in getattr(one.node, "args", ())
    )


def _back(call: Call) -> ast.Call | None:
    tree = call.module.tree
    statement = statement_of(tree, call.node)
    parent = next(above(tree, call.node), None)
    if statement is None or not isinstance(parent, (ast.stmt, ast.IfExp, ast.Call, ast.Attribute)):
        return None
    if _is_in_data_branch(call, statement):
        return _follow(call)
    if isinstance(statement, ast.Assign) and _grows_only_sometimes(call, statement):
        return _follow(call)
    return None


def _follow(call: Call) -> ast.Call | None:
    def stops(statement: ast.AST, key: str) -> bool:
        """`loss = loss + more` for every batch."""
        if isinstance(statement, ast.AugAssign) and key_of(statement.target) == key:
            return not isinstance(statement.value, ast.Constant) and not _is_in_branch(
                call.module.tree, statement
            )
        if not isinstance(statement, ast.Assign) or key not in {key_of(one) for one in statement.targets}:
            return False
        others = {key_of(one) for one in ast.walk(statement.value) if isinstance(one, ast.Name)} - {key}
        return (
            isinstance(statement.value, ast.BinOp)
            and isinstance(statement.value.op, ast.Add)
            and bool(others)
            and not _is_in_branch(call.module.tree, statement)
        )

    return backward_of(call.module, call.node, "", call.stack, stops=stops)


def _is_in_branch(tree: ast.Module, node: ast.AST) -> bool:
    for one in above(tree, node):
        if isinstance(one, (ast.If, ast.ExceptHandler, ast.IfExp)):
            return True
        if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return False
    return False


def _is_in_data_branch(call: Call, statement: ast.stmt) -> bool:
    """Whether the nearest branch around it tests the data: the number of targets, whether all is finite."""
    tree = call.module.tree
    for one in above(tree, call.node):
        if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.For, ast.While)):
            return False
        if isinstance(one, (ast.If, ast.IfExp)):
            return _asks_data(call, one.test)
        if isinstance(one, ast.ExceptHandler):
            return isinstance(statement, (ast.Return, ast.Assign))
    return False


def _asks_data(call: Call, test: ast.AST) -> bool:
    value = next((value for node, value, _ in call.tests if node is test), None)
    if value is not None and value.spread is Spread.LOCAL:
        return True
    words = {
        key_of(one.func).rpartition(".")[2] or getattr(one.func, "attr", "")
        for one in ast.walk(test)
        if isinstance(one, ast.Call)
    }
    shaped = any(
        isinstance(one, ast.Attribute) and one.attr in {"shape", "nelement"} for one in ast.walk(test)
    )
    return bool(words & _ASKS_DATA) or shaped


def _grows_only_sometimes(call: Call, statement: ast.Assign) -> bool:
    """`loss = torch.zeros(1)` to which only some batches add, below a test on the data."""
    tree, key = call.module.tree, key_of(statement.targets[0])
    grows = [
        one
        for one in statements_in(function_of(tree, statement))
        if one is not statement and isinstance(one, (ast.Assign, ast.AugAssign)) and key in {key_of(part) for part in targets_of(one)}
        and one.lineno > statement.lineno and (isinstance(one, ast.AugAssign) or loads(list(own_parts(one)), key))
    ]  # fmt: skip
    return bool(key) and bool(grows) and all(_is_below_data_test(call, one) for one in grows)


def _is_below_data_test(call: Call, node: ast.AST) -> bool:
    for one in above(call.module.tree, node):
        if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return False
        if isinstance(one, ast.If):
            return _asks_data(call, one.test) or any(
                isinstance(part, ast.Compare) and isinstance(part.left, ast.Subscript)
                for part in ast.walk(one.test)
            )
    return False


RULE: Rule[Script] = Rule(
    id="RW403",
    name="loss-without-graph",
    severity="error",
    classes=("D3",),
    summary="for some batches the loss is a constant without a graph",
    check=check,
)
