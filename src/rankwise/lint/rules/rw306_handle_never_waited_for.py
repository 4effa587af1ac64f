"""The result of an asynchronous collective is read before `wait()`.

**Why it breaks.** With `async_op=True` (and with `irecv`) the call returns at once with a handle. Until `handle.wait()`
the tensor holds the old value, the new one, or a mixture: the numbers are sometimes wrong, more often with larger
tensors.

Bad:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(4_000_000)
dist.all_reduce(total, async_op=True)
print(total.mean().item())
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(4_000_000)
handle = dist.all_reduce(total, async_op=True)
handle.wait()
print(total.mean().item())
dist.destroy_process_group()
```

**When it says nothing.** The handle is waited for, returned, kept in a list that is read somewhere, or passed on;
`torch.cuda.synchronize()` follows.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.collective_calls import FILLED, collectives, filled_node, word_of
from rankwise.lint.topics.job_view import function_of, parents_of, statement_of
from rankwise.lint.topics.tensor_text import is_behind, key_of, loads, nodes_in, root_of, targets_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Script

_FILLS = frozenset({"append", "clear", "extend", "insert"})
_QUIET = frozenset(
    {
        "shape",
        "size",
        "device",
        "dtype",
        "numel",
        "dim",
        "record_stream",
        "data_ptr",
        "element_size",
        "is_cuda",
        "nelement",
    }
)


def check(script: Script) -> Iterator[Finding]:
    """Asynchronous collectives whose handle is lost, never used, or waited for too late."""
    for place in collectives(script, *FILLED, "isend"):
        call = place.last
        if (
            not _is_async(call)
            or _synchronizes(script.tree, call.node)
            or "_coalescing_manager" in call.contexts
        ):
            continue
        told = _told(script.tree, call)
        if told is None:
            continue
        node, what = told
        name = key_of(root_of(filled_node(call))) if word_of(call) in FILLED else ""
        tensor = f"`{name}`" if name else "its tensor"
        yield script.finding(
            RULE,
            node,
            f"{word_of(call)} only starts here, {what}; {tensor} may hold the old value, the new one or a mixture",
            _fix(script.tree, call, tensor),
            severity="warning"
            if word_of(call) == "isend" or _has_barrier(script.tree, call.node)
            else "error",
        )


def _fix(tree: ast.Module, call: Call, tensor: str) -> str:
    holder = _holder(tree, call.node)
    if not holder:
        return f"keep the handle and call its `wait()` before {tensor} is read or changed"
    if isinstance(parents_of(tree).get(call.node), ast.Assign):
        return f"call `{holder}.wait()` before {tensor} is read or changed"
    return f"call `wait()` on each handle in `{holder}` before {tensor} is read or changed"


def _is_async(call: Call) -> bool:
    if word_of(call) in {"irecv", "isend"}:
        return True
    given = call.kwargs.get("async_op")
    return given is not None and given.const is True


def _synchronizes(tree: ast.Module, node: ast.AST) -> bool:
    return any(
        isinstance(one, ast.Call)
        and key_of(one.func).endswith(("cuda.synchronize", "wait_stream"))
        and is_behind(one, node)
        for one in nodes_in(function_of(tree, node))
    )


def _has_barrier(tree: ast.Module, node: ast.AST) -> bool:
    """Whether a barrier follows: on one stream of a GPU, nothing is left to wait for after it."""
    return any(
        isinstance(one, ast.Call) and key_of(one.func).endswith("barrier") and is_behind(one, node)
        for one in nodes_in(function_of(tree, node))
    )


def _told(tree: ast.Module, call: Call) -> tuple[ast.AST, str] | None:
    parents = parents_of(tree)
    parent, statement = parents.get(call.node), statement_of(tree, call.node)
    if isinstance(parent, ast.Expr):
        return call.node, "and its handle is discarded, so nothing can wait for it"
    holder = _holder(tree, call.node)
    if not holder or statement is None:
        return None
    around: ast.AST = function_of(tree, call.node)
    if "." in holder:
        if not holder.startswith("self."):
            return None  # an object that others may hold too
        last = holder.rpartition(".")[2]
        reads: list[ast.AST] = [
            one
            for one in ast.walk(tree)
            if isinstance(one, ast.Attribute) and one.attr == last and isinstance(one.ctx, ast.Load)
        ]
    else:
        reads = loads(list(ast.walk(around)), holder)
    used = [one for one in reads if not _only_fills(parents, one)]
    if not used:
        return call.node, f"and nothing ever waits for `{holder}`"
    return _too_early(tree, call, holder, used, statement)


def _holder(tree: ast.Module, node: ast.AST) -> str:
    """The variable or list that the handle goes to."""
    parents = parents_of(tree)
    parent = parents.get(node)
    if isinstance(parent, ast.Assign) and len(parent.targets) == 1:
        return key_of(parent.targets[0])
    if (
        isinstance(parent, ast.Call)
        and isinstance(parent.func, ast.Attribute)
        and parent.func.attr == "append"
    ):
        return key_of(parent.func.value) if isinstance(parents.get(parent), ast.Expr) else ""
    if isinstance(parent, ast.ListComp) and parent.elt is node:
        above_it = parents.get(parent)
        if isinstance(above_it, ast.Assign):
            return key_of(above_it.targets[0])
    return ""


def _only_fills(parents: dict[ast.AST, ast.AST], read: ast.AST) -> bool:
    parent = parents.get(read)
    if isinstance(parent, ast.Attribute) and parent.attr in _FILLS:
        return True
    return isinstance(parent, ast.Call) and key_of(parent.func) == "len"


def _too_early(
    tree: ast.Module, call: Call, holder: str, used: list[ast.AST], statement: ast.stmt
) -> tuple[ast.AST, str] | None:
    """A read of the tensor between the call and the first use of a handle that is a plain variable."""
    key = key_of(root_of(filled_node(call))) if word_of(call) in FILLED else ""
    if not key or "." in holder or not isinstance(statement, ast.Assign) or statement.value is not call.node:
        return None
    behind = [one for one in used if is_behind(one, call.node)]
    block = _block(tree, statement)
    if not behind or not block:
        return None
    first = min(behind, key=lambda one: (one.lineno, one.col_offset))  # type: ignore[attr-defined]
    for one in block:
        if one is statement or not is_behind(one, statement):
            continue
        if (
            is_behind(one, first)
            or first in set(ast.walk(one))
            or any(key_of(target) == key for target in targets_of(one))
        ):
            return None
        for read in loads(list(ast.walk(one)), key):
            parent = parents_of(tree).get(read)
            if not (isinstance(parent, ast.Attribute) and parent.attr in _QUIET) and not _is_collective(
                tree, read
            ):
                return (
                    read,
                    f"`{holder}` is waited for only on line {getattr(first, 'lineno', 0)}, and its tensor is read before that",
                )
    return None


def _block(tree: ast.Module, statement: ast.stmt) -> list[ast.stmt]:
    parent = parents_of(tree).get(statement)
    for name in ("body", "orelse", "finalbody"):
        block = getattr(parent, name, None)
        if isinstance(block, list) and statement in block:
            return block
    return []


def _is_collective(tree: ast.Module, read: ast.AST) -> bool:
    parent = parents_of(tree).get(read)
    return isinstance(parent, ast.Call) and any(word.arg == "async_op" for word in parent.keywords)


RULE: Rule[Script] = Rule(
    id="RW306",
    name="handle-never-waited-for",
    severity="error",
    classes=("C12",),
    summary="an asynchronous collective is never waited for",
    check=check,
)
