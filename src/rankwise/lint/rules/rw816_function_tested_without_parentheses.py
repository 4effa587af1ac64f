"""A function of torch.distributed is compared or tested but not called.

**Why it breaks.** ``dist.get_rank == 0`` compares the function itself with 0: it is False on every rank, and none
prints or saves. ``if dist.is_initialized:`` is always true. ``dist.get_rank % 2`` raises TypeError.

Bad:

```python
import torch.distributed as dist

def log(text):
    if dist.get_rank == 0:
        print(text)
```

Good:

```python
import torch.distributed as dist

def log(text):
    if dist.get_rank() == 0:
        print(text)
```

**When it says nothing.** Comparisons with None or with another function, names that may hold something else.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.finding import Edit, Span, span_of
from rankwise.lint.library.names import canonical
from rankwise.lint.rule import Rule
from rankwise.lint.topics.scopes import Scopes, scopes_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script

_FUNCTIONS = frozenset(
    {
        "torch.distributed.get_rank",
        "torch.distributed.get_world_size",
        "torch.distributed.get_node_local_rank",
        "torch.distributed.get_backend",
        "torch.distributed.is_initialized",
        "torch.distributed.is_available",
        "torch.distributed.is_nccl_available",
        "torch.distributed.is_torchelastic_launched",
        "torch.cuda.is_available",
        "torch.cuda.device_count",
        "torch.cuda.current_device",
    }
)
_EQUALS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn)


def check(script: Script) -> Iterator[Finding]:
    """Functions in comparisons, sums and tests."""
    if "torch" not in script.piece.code:
        return
    scopes = scopes_of(script.tree)
    for node in (*scopes.all(ast.Attribute), *(name for name, _ in scopes.loads)):
        parent = scopes.parents.get(node)
        if isinstance(parent, (ast.Call, ast.Attribute)):
            continue
        word = _function(scopes, node)
        if word and parent is not None:
            what = _what_happens(node, parent)
            if what:
                yield _finding(script, node, what)


def _function(scopes: Scopes, node: ast.expr) -> str:
    """The function that a node is, also under a name of the user's that holds nothing else."""
    full = canonical(scopes.dotted(node))
    if full not in _FUNCTIONS and isinstance(node, ast.Name):
        value = scopes.value(node.id, scopes.scope(node))
        full = canonical(scopes.dotted(value)) if value is not None else ""
    return full if full in _FUNCTIONS else ""


def _what_happens(node: ast.expr, parent: ast.AST) -> str:
    if isinstance(parent, ast.Compare):
        return _of_comparison(node, parent)
    if isinstance(parent, ast.BinOp):
        is_text = isinstance(parent.op, ast.Mod) and parent.right is node
        return "" if is_text else "a TypeError"
    if isinstance(parent, ast.BoolOp) or (isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not)):
        return "the function itself is always true"
    is_test = isinstance(parent, (ast.If, ast.While, ast.IfExp, ast.Assert)) and parent.test is node
    return "the function itself is always true" if is_test else ""


def _of_comparison(node: ast.expr, parent: ast.Compare) -> str:
    if len(parent.ops) != 1 or not isinstance(parent.ops[0], _EQUALS):
        return ""
    other = parent.comparators[0] if parent.left is node else parent.left
    if not isinstance(parent.ops[0], (ast.Eq, ast.NotEq)):
        is_searched = isinstance(parent.ops[0], (ast.In, ast.NotIn)) and not _holds_constants(other)
        return "" if is_searched else "the function itself is compared, not its result"
    is_plain = (isinstance(other, ast.Constant) and other.value is not None) or isinstance(other, ast.Call)
    return "the function itself equals nothing else, on any rank" if is_plain else ""


def _holds_constants(node: ast.expr) -> bool:
    return isinstance(node, (ast.List, ast.Tuple, ast.Set)) and all(
        isinstance(one, ast.Constant) for one in node.elts
    )


def _finding(script: Script, node: ast.expr, what: str) -> Finding:
    text = ast.unparse(node)
    span = span_of(node, script.lines)
    behind = Span(span.end_line, span.end_col, span.end_line, span.end_col)
    return script.finding(
        RULE,
        node,
        f"`{text}` without parentheses is not called: {what}",
        f"write `{text}()`",
        edits=[Edit(span=behind, text="()")],
    )


RULE: Rule[Script] = Rule(
    id="RW816",
    name="function-tested-without-parentheses",
    severity="error",
    classes=(),
    summary="a function such as dist.get_rank is compared or tested but not called",
    check=check,
    needs_ranks=False,
    fixable=True,
)
