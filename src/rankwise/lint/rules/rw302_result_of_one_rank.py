"""The result of reduce or gather is used on ranks that do not have it.

**Why it breaks.** `dist.reduce(x, dst=0)` and `dist.gather(...)` leave the result on one rank. The others hold a
partial sum, their own value, or nothing: they continue with wrong numbers, different on each rank.

Bad:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
loss = torch.rand(1)
dist.reduce(loss, dst=0)
rate = 0.1 / (1 + loss.item())
print(rate)
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
loss = torch.rand(1)
dist.all_reduce(loss)
rate = 0.1 / (1 + loss.item())
print(rate)
dist.destroy_process_group()
```

**When it says nothing.** The result is used under a test on the rank, broadcast afterwards, or returned to a caller
that the check can't see.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.finding import span_of
from rankwise.lint.rule import Rule
from rankwise.lint.topics.collective_calls import (
    collectives,
    filled_node,
    has_group,
    root_rank,
    root_value,
    word_of,
)
from rankwise.lint.topics.job_view import above, differs, function_of, is_distributed, statement_of
from rankwise.lint.topics.rank_tests import is_under_rank_test
from rankwise.lint.topics.tensor_text import (
    is_behind,
    key_of,
    loads,
    own_parts,
    root_of,
    statements_in,
    targets_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script
    from rankwise.lint.topics.job_view import Place

_SENDS = (
    "broadcast",
    "all_reduce",
    "all_gather",
    "broadcast_object_list",
    "scatter",
    "send",
    "reduce",
    "all_gather_object",
)
_HARMLESS = frozenset(
    {"shape", "size", "device", "dtype", "numel", "dim", "append", "clear", "update", "extend", "setdefault"}
)
_MARKERS = frozenset({"zero_", "fill_", "copy_", "clear"})


def check(script: Script) -> Iterator[Finding]:
    """Uses of a result that `reduce`, `gather` or `gather_object` leaves on one rank only."""
    for place in collectives(script, "reduce", "gather", "gather_object"):
        call = place.last
        root = root_rank(call)
        key = _key(filled_node(call))
        if (
            not key
            or place.is_made_by_all is False
            or has_group(call)
            or differs(root_value(call))
            or not is_distributed(place.entry)
        ):
            continue
        used = _use(script, place, key)
        if used is None:
            continue
        shown = statement_of(script.tree, used)
        is_shown = isinstance(shown, ast.Expr) and key_of(getattr(shown.value, "func", None)) == "print"
        where = f"rank {root}" if root is not None else "the destination"
        yield script.finding(
            RULE,
            used,
            f"every rank uses `{key}` here, but `{word_of(call)}` gives the result to {where} only; the others hold something else",
            f"use `all_{word_of(call)}`, broadcast `{key}` afterwards, or use it under `if dist.get_rank() == {root or 0}`",
            severity="warning" if is_shown else "error",
            also=[(f"{word_of(call)} to {where}", script.piece.path, span_of(call.node, script.lines))],
        )


def _key(node: ast.AST | None) -> str:
    if isinstance(node, ast.IfExp):
        node = node.body
    return key_of(root_of(node))


def _use(script: Script, place: Place, key: str) -> ast.AST | None:
    tree, start = script.tree, statement_of(script.tree, place.last.node)
    if start is None:
        return None
    has_handle = "async_op" in place.last.kwargs
    function = function_of(tree, start)
    return None if has_handle else _use_behind(tree, function, start, key, 0)


def _use_behind(tree: ast.Module, function: ast.AST, start: ast.AST, key: str, depth: int) -> ast.AST | None:
    for statement in statements_in(function):
        if not is_behind(statement, start):
            continue
        if _is_renewed(statement, key):
            return None
        for read in loads(list(own_parts(statement)), key):
            if is_under_rank_test(tree, read) or _is_harmless(tree, read, statement):
                continue
            if isinstance(statement, ast.Return):
                return _use_at_callers(tree, function, depth)
            if _only_makes(statement):
                # `mean = total / world`: what counts is where that goes.
                found = _use_behind(tree, function, statement, key_of(targets_of(statement)[0]), depth)
                if found is not None:
                    return found
                break
            return read
    return None


def _only_makes(statement: ast.stmt) -> bool:
    targets = targets_of(statement)
    return (
        isinstance(statement, (ast.Assign, ast.AugAssign))
        and len(targets) == 1
        and bool(key_of(targets[0]))
        and "." not in key_of(targets[0])
    )


def _is_renewed(statement: ast.stmt, key: str) -> bool:
    """Whether the statement gives all ranks a value: a broadcast, or a new assignment."""
    for one in own_parts(statement):
        if isinstance(one, ast.Call):
            word = key_of(one.func).rpartition(".")[2]
            if (word in _SENDS or word in _MARKERS or "broadcast" in word or "sync" in word) and loads(
                list(ast.walk(one)), key
            ):
                return True
    reads = loads(list(own_parts(statement)), key)
    return (
        not reads
        and isinstance(statement, (ast.Assign, ast.AnnAssign))
        and any(key_of(one) == key for one in targets_of(statement))
    )


def _is_harmless(tree: ast.Module, read: ast.AST, statement: ast.stmt) -> bool:
    if isinstance(statement, (ast.Delete, ast.Assert)):
        return True
    if isinstance(statement, (ast.If, ast.While)) and _is_test_for_none(statement.test):
        return True
    inner = read
    for one in own_parts(statement):
        if isinstance(one, ast.Attribute) and one.value is inner and one.attr in _HARMLESS:
            return True
        if isinstance(one, ast.Compare) and _is_test_for_none(one) and inner in ast.walk(one):
            return True
    return bool(_below_test_for_none(tree, read))


def _below_test_for_none(tree: ast.Module, read: ast.AST) -> bool:
    return any(
        isinstance(one, (ast.If, ast.IfExp)) and _is_test_for_none(one.test) for one in above(tree, read)
    )


def _is_test_for_none(test: ast.AST) -> bool:
    return isinstance(test, ast.Compare) and any(
        isinstance(one, ast.Constant) and one.value is None for one in test.comparators
    )


def _use_at_callers(tree: ast.Module, function: ast.AST, depth: int) -> ast.AST | None:
    name = getattr(function, "name", "")
    if not name or depth > 3:
        return None
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or key_of(call.func).rpartition(".")[2] != name:
            continue
        statement = statement_of(tree, call)
        if (
            statement is None
            or (isinstance(statement, ast.Expr) and statement.value is call)
            or is_under_rank_test(tree, call)
        ):
            continue
        caller = function_of(tree, call)
        if isinstance(statement, ast.Return):
            found = _use_at_callers(tree, caller, depth + 1)
        elif _only_makes(statement):
            found = _use_behind(tree, caller, statement, key_of(targets_of(statement)[0]), depth + 1)
        else:
            found = call if isinstance(statement, (ast.Expr, ast.If, ast.While)) else None
        if found is not None:
            return found
    return None


RULE: Rule[Script] = Rule(
    id="RW302",
    name="result-of-one-rank",
    severity="error",
    classes=("C16",),
    summary="the result of reduce or gather is used on ranks that do not have it",
    check=check,
)
