"""Collectives run in an order that differs between processes.

**Why it breaks.** A set of strings has a different order in each process (Python salts its hashes), and a folder is
listed in the order of the host's file system. So rank 0 reduces `loss` while rank 1 reduces `accuracy`: the two are
summed, without any error.

Bad:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
metrics = {"loss": torch.ones(1), "accuracy": torch.zeros(1)}
for name in set(metrics):
    dist.all_reduce(metrics[name])
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
metrics = {"loss": torch.ones(1), "accuracy": torch.zeros(1)}
for name in sorted(metrics):
    dist.all_reduce(metrics[name])
dist.destroy_process_group()
```

**When it says nothing.** Dicts (they keep their order), sets of numbers, and anything that goes through `sorted`.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.history_calls import together
from rankwise.lint.topics.job_view import text_of
from rankwise.lint.topics.tensor_text import bindings, key_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script

_SET_METHODS = frozenset({"union", "intersection", "difference", "symmetric_difference"})
_LISTINGS = frozenset({"listdir", "glob", "iglob", "rglob", "scandir", "iterdir"})
_KEEPING = frozenset({"list", "tuple", "enumerate", "iter", "reversed", "map", "filter", "tqdm"})
_DEEPEST = 6


#: Orders that certainly differ: a listing of a folder that ranks share does not have to.
_OF_SETS = ("a set", "a set of keys")


def check(script: Script) -> Iterator[Finding]:
    """Loops with collectives that run over a set or a directory listing."""
    told: set[int] = set()
    for op in together(script):
        if op.family == "barrier":
            # Any two of them can be paired.
            continue
        for loop in op.call.loops:
            sources = (
                [loop.iter]
                if isinstance(loop, (ast.For, ast.AsyncFor))
                else [one.iter for one in getattr(loop, "generators", ())]
            )
            for source in sources:
                order = (
                    _order(script.tree, source, 0)
                    if id(source) not in told and _is_here(script, source)
                    else ""
                )
                if not order:
                    continue
                told.add(id(source))
                yield script.finding(
                    RULE,
                    source,
                    f"{order} has a different order in each process, so ranks call `{op.name}` for different items of `{text_of(source)}`",
                    f"loop over `sorted({text_of(source)})`",
                    severity="error" if order in _OF_SETS else "warning",
                )


def _is_here(script: Script, node: ast.AST) -> bool:
    return any(one is node for one in ast.walk(script.tree))


def _order(tree: ast.Module, node: ast.AST, depth: int) -> str:
    """What makes the order differ; empty if nothing known does."""
    if depth > _DEEPEST:
        return ""
    if isinstance(node, ast.Set):
        return (
            ""
            if all(isinstance(one, ast.Constant) and isinstance(one.value, (int, float)) for one in node.elts)
            else "a set"
        )
    if isinstance(node, ast.SetComp):
        return "" if isinstance(node.elt, ast.Call) and key_of(node.elt.func) in {"int", "len"} else "a set"
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Sub, ast.BitAnd, ast.BitOr, ast.BitXor)):
        return _of_operation(tree, node, depth)
    if isinstance(node, ast.Call):
        return _of_call(tree, node, depth)
    key = key_of(node)
    found = [value for _, value in bindings(tree, key, node) if value is not None] if key else []
    if not found and isinstance(node, ast.Attribute):
        found = _attribute_values(tree, node.attr)
    orders = [_order(tree, value, depth + 1) for value in found]
    return (
        orders[-1] if orders and (all(orders) or "." not in key) and not _is_sorted_later(tree, key) else ""
    )


def _attribute_values(tree: ast.Module, name: str) -> list[ast.expr]:
    """All values assigned to `self.name` in the file, for `model.name`."""
    return [
        one.value
        for one in ast.walk(tree)
        if isinstance(one, ast.Assign)
        and any(isinstance(target, ast.Attribute) and target.attr == name for target in one.targets)
    ]


def _is_sorted_later(tree: ast.Module, key: str) -> bool:
    return any(
        isinstance(one, ast.Call)
        and isinstance(one.func, ast.Attribute)
        and one.func.attr == "sort"
        and key_of(one.func.value) == key
        for one in ast.walk(tree)
    )


def _of_operation(tree: ast.Module, node: ast.BinOp, depth: int) -> str:
    sides = (node.left, node.right)
    if any(
        isinstance(one, ast.Call)
        and isinstance(one.func, ast.Attribute)
        and one.func.attr in {"keys", "items"}
        for one in sides
    ):
        return "a set of keys"
    return next((order for one in sides if (order := _order(tree, one, depth + 1)) in _OF_SETS), "")


def _of_call(tree: ast.Module, node: ast.Call, depth: int) -> str:
    word = key_of(node.func).rpartition(".")[2] or getattr(node.func, "attr", "")
    if word in {"set", "frozenset"} and isinstance(node.func, ast.Name):
        return "a set" if not (node.args and _are_numbers(node.args[0])) else ""
    if word in _SET_METHODS and isinstance(node.func, ast.Attribute):
        return "a set" if _order(tree, node.func.value, depth + 1) else ""
    if word in _LISTINGS:
        return "a directory listing"
    if word == "copy" and isinstance(node.func, ast.Attribute):
        return _order(tree, node.func.value, depth + 1)
    return (
        _order(tree, node.args[-1 if word in {"map", "filter"} else 0], depth + 1)
        if word in _KEEPING and node.args
        else ""
    )


def _are_numbers(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return key_of(node.func) == "range"
    return isinstance(node, (ast.List, ast.Tuple)) and all(
        isinstance(one, ast.Constant) and isinstance(one.value, int) for one in node.elts
    )


RULE: Rule[Script] = Rule(
    id="RW315",
    name="order-differs-between-ranks",
    severity="error",
    classes=("C4",),
    summary="collectives run in the order of a set or of a directory listing",
    check=check,
)
