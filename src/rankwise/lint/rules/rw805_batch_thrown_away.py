"""A batch is loaded in every epoch only to read its size.

**Why it breaks.** ``next(iter(loader))`` starts all workers of the loader, waits for a first batch, and discards it: a
pause in each epoch, and samples that are read twice. With an iterable data set the batch may be lost.

Bad:

```python
import torch
from torch.utils.data import DataLoader

def fit(model, dataset, num_epochs):
    loader = DataLoader(dataset, batch_size=32)
    for epoch in range(num_epochs):
        batch_size = len(next(iter(loader))[0])
        print(epoch, batch_size, len(loader))
```

Good:

```python
import torch
from torch.utils.data import DataLoader

def fit(model, dataset, num_epochs):
    loader = DataLoader(dataset, batch_size=32)
    for epoch in range(num_epochs):
        print(epoch, loader.batch_size, len(loader))
```

**When it says nothing.** Outside loops, and where the batch itself is used (to initialise lazy layers, to overfit one
batch).
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.scopes import FunctionNode, Scopes, is_function, scopes_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script


def check(script: Script) -> Iterator[Finding]:
    """Calls of ``next(iter(loader))`` in loops whose result only gives a size."""
    if "iter(" not in script.piece.code or "next" not in script.piece.code:
        return
    scopes = scopes_of(script.tree)
    for call in scopes.all(ast.Call):
        source = _source(scopes, call)
        if source is None or not _is_loader(scopes, source):
            continue
        if _only_sized(scopes, call) and _runs_often(scopes, call):
            text = ast.unparse(source)
            yield script.finding(
                RULE,
                call,
                f"next(iter({text})) starts the loader's workers and discards a batch each time, only to read a size",
                f"read `{text}.batch_size`, or read the size of the batch inside the loop over `{text}`",
            )


def _source(scopes: Scopes, call: ast.Call) -> ast.expr | None:
    """What is iterated in ``next(iter(x))``, also through a name or ``__next__``."""
    if isinstance(call.func, ast.Name) and call.func.id == "next" and len(call.args) == 1:
        inner = call.args[0]
    elif isinstance(call.func, ast.Attribute) and call.func.attr in ("next", "__next__") and not call.args:
        inner = call.func.value
    else:
        return None
    if isinstance(inner, ast.Name):
        owner = scopes.owner(inner.id, scopes.scope(inner))
        if sum(n.id == inner.id and scopes.owner(n.id, at) is owner for n, at in scopes.loads) == 1:
            inner = scopes.value(inner.id, scopes.scope(inner)) or inner
    if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id == "iter":
        return inner.args[0] if inner.args else None
    return None


def _is_loader(scopes: Scopes, source: ast.expr) -> bool:
    name = (
        source.id
        if isinstance(source, ast.Name)
        else source.attr
        if isinstance(source, ast.Attribute)
        else ""
    )
    if "loader" in name.lower() or name.lower().endswith("_dl"):
        return True
    if "data" in name.lower() and isinstance(source, ast.Attribute):
        return True
    value = scopes.value(name, scopes.scope(source)) if isinstance(source, ast.Name) else None
    return isinstance(value, ast.Call) and ast.unparse(value.func).endswith("DataLoader")


def _only_sized(scopes: Scopes, call: ast.expr) -> bool:
    """Whether all that is read of a batch is its length or a dimension."""
    node: ast.AST = call
    above = scopes.parents[node]
    while isinstance(above, ast.Subscript) and above.value is node:
        node, above = above, scopes.parents[above]
    if isinstance(above, ast.Call) and isinstance(above.func, ast.Name) and above.func.id == "len":
        return True
    if isinstance(above, ast.Attribute):
        return above.attr in ("shape", "size")
    return (
        isinstance(above, ast.Assign)
        and len(above.targets) == 1
        and _names_only_sized(scopes, above.targets[0])
    )


def _names_only_sized(scopes: Scopes, target: ast.expr) -> bool:
    """Whether names that a batch is stored in are read for their sizes, and for nothing else."""
    names = target.elts if isinstance(target, ast.Tuple) else [target]
    read: list[ast.Name] = []
    for name in names:
        if not isinstance(name, ast.Name) or len(scopes.bindings(name.id, scopes.scope(name))) != 1:
            return False
        owner = scopes.owner(name.id, scopes.scope(name))
        read += [n for n, at in scopes.loads if n.id == name.id and scopes.owner(n.id, at) is owner]
    return bool(read) and all(_only_sized(scopes, n) for n in read)


def _runs_often(scopes: Scopes, node: ast.AST, depth: int = 0) -> bool:
    """Whether a node is in a loop, or in a function that a loop of this file calls, directly or not."""
    for above in scopes.above(node):
        if isinstance(above, (ast.For, ast.While, ast.AsyncFor)):
            return True
        if is_function(above):
            return "epoch" in above.name or (depth < 3 and _is_called_often(scopes, above, depth))
    return False


def _is_called_often(scopes: Scopes, function: FunctionNode, depth: int) -> bool:
    is_method = isinstance(scopes.parents.get(function), ast.ClassDef)
    for call in scopes.all(ast.Call):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        is_it = name == function.name and isinstance(call.func, ast.Attribute) == is_method
        if is_it and function not in scopes.above(call) and _runs_often(scopes, call, depth + 1):
            return True
    return False


RULE: Rule[Script] = Rule(
    id="RW805",
    name="batch-thrown-away",
    severity="warning",
    classes=(),
    summary="a batch is loaded in every epoch only to read its size",
    check=check,
    needs_ranks=False,
)
