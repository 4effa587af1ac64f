"""A rank from the environment is a string but is compared with a number.

**Why it breaks.** ``os.environ["LOCAL_RANK"]`` is ``"0"``, and ``"0" == 0`` is false on every rank: none saves or logs,
without any error. ``"0"`` is also true as a condition. A comparison with ``<`` raises TypeError.

Bad:

```python
import os

import torch.distributed as dist

dist.init_process_group("gloo")
if os.environ["RANK"] == 0:
    print("I am the first")
dist.destroy_process_group()
```

Good:

```python
import os

import torch.distributed as dist

dist.init_process_group("gloo")
if int(os.environ["RANK"]) == 0:
    print("I am the first")
dist.destroy_process_group()
```

**When it says nothing.** ``== "0"``, ``int(...)``, and tests whether the variable is set at all.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.library.hints import ENVIRON
from rankwise.lint.model.notes import TextComparison
from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import STARTS, text_of
from rankwise.lint.topics.option_text import sources

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script

_READS = frozenset({"os.environ.__getitem__", "os.environ.get", "os.getenv"})


def check(script: Script) -> Iterator[Finding]:
    """Comparisons of such strings with numbers, and such strings as conditions."""
    seen: set[ast.AST] = set()
    for note in script.notes:
        if isinstance(note, TextComparison) and note.module is script.module and note.node not in seen:
            seen.add(note.node)
            yield _tell_comparison(script, note.node, text_is_left=_is_number(note.node.comparators[0]))
    if "environ" not in script.piece.code and "getenv" not in script.piece.code:
        return
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Compare) and node not in seen and _in_numbers(script, node):
            yield _tell_comparison(script, node, text_is_left=True)
    yield from _conditions(script)


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not isinstance(node.value, str)


def _tell_comparison(script: Script, node: ast.Compare, *, text_is_left: bool) -> Finding:
    text = node.left if text_is_left else node.comparators[0]
    shown = text_of(text)
    if isinstance(node.ops[0], (ast.Lt, ast.Gt, ast.LtE, ast.GtE)):
        message = f"`{shown}` is a string from the environment: `{text_of(node)}` raises TypeError"
    elif isinstance(node.ops[0], (ast.Eq, ast.In)):
        message = f'`{shown}` is a string such as "0": `{text_of(node)}` is false on every rank'
    else:
        message = f'`{shown}` is a string such as "0": `{text_of(node)}` is true on every rank'
    return script.finding(RULE, node, message, f"compare int({shown})")


def _in_numbers(script: Script, node: ast.Compare) -> bool:
    """``os.environ["RANK"] in (0, -1)``."""
    if not isinstance(node.ops[0], (ast.In, ast.NotIn)) or not isinstance(
        node.comparators[0], (ast.Tuple, ast.List, ast.Set)
    ):
        return False
    elements = node.comparators[0].elts
    return bool(elements) and all(_is_int(one) for one in elements) and _is_rank_text(script, node.left)


def _is_int(node: ast.expr) -> bool:
    node = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(node, ast.Constant) and isinstance(node.value, int)


def _is_rank_text(script: Script, node: ast.expr) -> bool:
    """Whether an expression can only be a rank's variable read as a string."""
    found = [
        one
        for one in sources(script.tree, node)
        if isinstance(one, (ast.Call, ast.Subscript)) or not isinstance(one, (ast.Name, ast.Attribute))
    ]
    return bool(found) and all(_reads_rank(one) for one in found[:1])


def _reads_rank(node: ast.AST) -> bool:
    if isinstance(node, ast.Subscript):
        key = node.slice
        return (
            "environ" in ast.unparse(node.value)
            and isinstance(key, ast.Constant)
            and ENVIRON.get(str(key.value)) is not None
        )
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        name = ast.unparse(node.func)
        return name.endswith(("environ.get", "getenv")) and ENVIRON.get(str(node.args[0].value)) is not None
    return False


def _conditions(script: Script) -> Iterator[Finding]:
    """``if not os.environ.get("LOCAL_RANK"):`` where the variable is surely set: after init."""
    started: dict[ast.AST, bool] = {}
    for entry in script.entries:
        calls = entry.histories[0].calls
        first = next((call.index for call in calls if call.name in STARTS), None)
        for call in calls:
            if call.name in _READS and call.module is script.module:
                started[call.node] = first is not None and call.index > first
    for node in ast.walk(script.tree):
        if not isinstance(node, (ast.If, ast.IfExp)):
            continue
        test = (
            node.test.operand
            if isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)
            else node.test
        )
        if started.get(test) and _reads_rank(test) and "SIZE" not in ast.unparse(test):
            word = "false" if test is not node.test else "true"
            message = f'`{text_of(test)}` is a string, and "0" counts as true: `{text_of(node.test)}` is {word} on every rank'
            yield script.finding(RULE, node.test, message, f"compare int({text_of(test)}) with 0")


RULE: Rule[Script] = Rule(
    id="RW204",
    name="rank-compared-as-text",
    severity="error",
    classes=("I26",),
    summary="a rank from the environment is a string but is compared with a number",
    check=check,
)
