"""The return value of an in-place collective is used, but it is None.

**Why it breaks.** ``total = dist.all_reduce(x)`` puts the sum into ``x`` and None into ``total``: ``total / world`` is a TypeError and
``total.item()`` an AttributeError on every rank. Printed or logged, it is ``None``.

Bad:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(1)
total = dist.all_reduce(x)
print(total / dist.get_world_size())
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
print(x / dist.get_world_size())
dist.destroy_process_group()
```

**When it says nothing.** With ``async_op`` (a handle is returned), for functional collectives and
``torch.distributed.nn``, where the result is tested before it is used, and where the name may have been assigned
another value.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.library.names import canonical
from rankwise.lint.rule import Rule
from rankwise.lint.topics.scopes import Scopes, is_function, scopes_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script

# The position of the argument async_op; those without it always return None.
_ASYNC_AT = {"all_reduce": 3, "broadcast": 3, "reduce": 4, "all_gather": 3, "all_gather_into_tensor": 3, "gather": 4, "scatter": 4,
             "reduce_scatter": 4, "reduce_scatter_tensor": 4, "all_to_all": 3, "all_to_all_single": 5, "barrier": 1,
             "all_gather_object": 9, "gather_object": 9, "scatter_object_list": 9, "broadcast_object_list": 9}  # fmt: skip
_FILLED_AT = {"gather": (1, "gather_list"), "gather_object": (1, "object_gather_list")}
_FILLED_WORDS = (
    "tensor",
    "tensor_list",
    "output_tensor",
    "output",
    "output_tensor_list",
    "object_list",
    "scatter_object_output_list",
)
_SHOWS = frozenset({"print", "float", "int", "len", "sum", "abs", "round", "list", "tuple", "min", "max"})
_DEFINES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def check(script: Script) -> Iterator[Finding]:
    """Uses of the return value of in-place collectives."""
    if "distributed" not in script.piece.code:
        return
    scopes = scopes_of(script.tree)
    for call in scopes.all(ast.Call):
        word = _returns_none(scopes, call)
        if word:
            use = _use(scopes, call)
            if use is not None:
                yield _finding(script, call, word, use)


def _finding(script: Script, call: ast.Call, word: str, use: ast.AST) -> Finding:
    filled = _filled(call, word)
    where = f"in `{filled}`" if filled else "in its tensor"
    return script.finding(
        RULE,
        use,
        f"`{ast.unparse(call.func)}` returns None and its result is {where}, but `{_shown(use)}` uses the None",
        f"call `{ast.unparse(call)}` on a line of its own and continue with {f'`{filled}`' if filled else 'the tensor passed to it'}"
        if word != "barrier"
        else f"call `{ast.unparse(call)}` on a line of its own",
    )


def _shown(use: ast.AST) -> str:
    text = " ".join(ast.unparse(use).split())
    return text if len(text) <= 60 else text[:59] + "…"


def _filled(call: ast.Call, word: str) -> str:
    position, name = _FILLED_AT.get(word, (0, ""))
    names = (name,) if name else _FILLED_WORDS
    node = next((k.value for k in call.keywords if k.arg in names), None)
    if node is None and position < len(call.args):
        node = call.args[position]
    return ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) and word != "barrier" else ""


def _returns_none(scopes: Scopes, call: ast.Call) -> str:
    """The collective's name, if a call is one of torch's and certainly returns None."""
    full = scopes.dotted(call.func)
    package, _, word = canonical(full).rpartition(".")
    if not full.startswith("torch.distributed.") or package != "torch.distributed" or word not in _ASYNC_AT:
        return ""
    if len(call.args) > _ASYNC_AT[word] or any(isinstance(one, ast.Starred) for one in call.args):
        return ""
    for one in call.keywords:
        if one.arg is None or (
            one.arg == "async_op" and not (isinstance(one.value, ast.Constant) and not one.value.value)
        ):
            return ""
    return word


def _use(scopes: Scopes, call: ast.Call) -> ast.AST | None:
    """The first place at which a None from ``call`` breaks something or is shown."""
    direct = _breaks(scopes, call)
    if direct is not None:
        return direct
    statement = scopes.parents.get(call)
    if not (isinstance(statement, ast.Assign) and statement.value is call and len(statement.targets) == 1):
        return None
    target = statement.targets[0]
    if not isinstance(target, ast.Name):
        return None
    for load in _loads(scopes, statement, target):
        if _is_tested(scopes, load):
            return None
        broken = _breaks(scopes, load)
        if broken is not None:
            return broken
    return None


def _loads(scopes: Scopes, statement: ast.Assign, target: ast.Name) -> Iterator[ast.Name]:
    """Where the name is read before it can have another value."""
    for later in _behind(scopes, statement):
        names = [one for one in _run_now(later) if isinstance(one, ast.Name) and one.id == target.id]
        is_bound = any(not isinstance(one.ctx, ast.Load) for one in names)
        if is_bound and not isinstance(later, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            return
        loads = [one for one in names if isinstance(one.ctx, ast.Load)]
        if isinstance(later, ast.AugAssign) and later.target in names:
            loads.append(later.target)
        yield from loads
        if is_bound:
            return


def _behind(scopes: Scopes, statement: ast.stmt) -> list[ast.stmt]:
    """The statements after one in its block; they run next."""
    parent = scopes.parents.get(statement)
    for name in ("body", "orelse", "finalbody"):
        block = getattr(parent, name, None)
        if isinstance(block, list) and statement in block:
            return block[block.index(statement) + 1 :]
    return []


def _run_now(node: ast.AST) -> Iterator[ast.AST]:
    """A statement's nodes, without the bodies of functions that it only defines."""
    yield node
    if isinstance(node, _DEFINES):
        return
    for child in ast.iter_child_nodes(node):
        yield from _run_now(child)


def _is_tested(scopes: Scopes, load: ast.AST) -> bool:
    parent = scopes.parents.get(load)
    if isinstance(parent, ast.Compare):
        return not any(isinstance(op, _ORDERS) for op in parent.ops)
    return isinstance(parent, (ast.BoolOp, ast.If, ast.IfExp, ast.While, ast.Assert)) or (
        isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not)
    )


def _breaks(scopes: Scopes, node: ast.expr) -> ast.AST | None:
    """The expression or statement around a None that fails with it, or shows it."""
    parent = scopes.parents.get(node)
    is_wrong = (
        (isinstance(parent, (ast.Attribute, ast.Subscript)) and parent.value is node)
        or (isinstance(parent, ast.BinOp) and not isinstance(parent.op, ast.Mod))
        or (isinstance(parent, ast.UnaryOp) and not isinstance(parent.op, ast.Not))
        or (isinstance(parent, ast.Compare) and any(isinstance(op, _ORDERS) for op in parent.ops))
        or isinstance(parent, (ast.AugAssign, ast.FormattedValue, ast.Starred))
        or (isinstance(parent, ast.For) and parent.iter is node)
        or (isinstance(parent, ast.Call) and _is_read_by(scopes, parent, node))
    )
    if not is_wrong or _is_expected(scopes, node):
        return None
    return node if isinstance(parent, ast.For) else parent


def _is_read_by(scopes: Scopes, call: ast.Call, node: ast.expr) -> bool:
    if call.func is node:
        return True
    full = scopes.dotted(call.func)
    is_built_in = (
        isinstance(call.func, ast.Name)
        and call.func.id in _SHOWS
        and scopes.owner(call.func.id, scopes.scope(call.func)) is None
    )
    return node in call.args and (
        is_built_in or full in {"torch.stack", "torch.cat", "torch.mean", "torch.sum"}
    )


def _is_expected(scopes: Scopes, node: ast.AST) -> bool:
    """Whether a failure is caught, or wanted by a test."""
    for one in scopes.above(node):
        if is_function(one):
            return False
        if isinstance(one, ast.Try) and one.handlers:
            return True
        if (
            isinstance(one, ast.With)
            and "raises" in " ".join(ast.unparse(i.context_expr) for i in one.items).lower()
        ):
            return True
    return False


RULE: Rule[Script] = Rule(
    id="RW319",
    name="result-of-collective-is-none",
    severity="error",
    classes=(),
    summary="the return value of an in-place collective is used, but it is None",
    check=check,
    needs_ranks=False,
)
