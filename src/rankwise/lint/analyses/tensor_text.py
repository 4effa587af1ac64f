"""Where a tensor in the text comes from and where it goes, by the names it is given."""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import TYPE_CHECKING

from rankwise.lint.analyses.job_view import above
from rankwise.lint.finding import Span, span_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rankwise.lint.script import Script

#: Methods and attributes that show the same memory in another way.
VIEWS = frozenset(
    """view view_as data detach squeeze unsqueeze narrow select expand contiguous flatten reshape requires_grad_ t T
    transpose permute mT detach_ real swapaxes movedim""".split()  # noqa: SIM905
)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def key_of(node: ast.AST | None) -> str:
    """The name of a variable or attribute, ``total`` or ``self.total``; empty for all else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = key_of(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def root_of(node: ast.AST | None) -> ast.AST | None:
    """What a view is taken of: ``x`` for ``x.data.view(-1)``, ``x[0]`` and ``x.add_(1)``."""
    while node is not None:
        if isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr in VIEWS):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_view(node.func.attr):
            node = node.func.value
        else:
            return node
    return None


def _is_view(method: str) -> bool:
    return method in VIEWS or (method.endswith("_") and not method.startswith("_"))


@lru_cache(maxsize=512)
def nodes_in(function: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes of a function's own body in the order of the text; functions defined inside are left out."""
    found: list[ast.AST] = []
    todo = list(getattr(function, "body", ()))[::-1]
    while todo:
        node = todo.pop()
        found.append(node)
        if not isinstance(node, _FUNCTIONS):
            todo += list(ast.iter_child_nodes(node))[::-1]
    return tuple(found)


def targets_of(statement: ast.AST) -> list[ast.expr]:
    """What a statement assigns to, tuples taken apart."""
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = list(statement.targets)
    elif isinstance(statement, (ast.AnnAssign, ast.AugAssign, ast.For, ast.AsyncFor, ast.NamedExpr)):
        targets = [statement.target]
    found: list[ast.expr] = []
    while targets:
        one = targets.pop(0)
        if isinstance(one, (ast.Tuple, ast.List)):
            targets = [*one.elts, *targets]
        else:
            found.append(one.value if isinstance(one, ast.Starred) else one)
    return found


def _start(node: ast.AST) -> tuple[int, int]:
    return (getattr(node, "lineno", 0), getattr(node, "col_offset", 0))


def _end(node: ast.AST) -> tuple[int, int]:
    return (getattr(node, "end_lineno", 0), getattr(node, "end_col_offset", 0))


def is_in(tree: ast.Module, node: ast.AST) -> bool:
    """Whether a node is one of this text's."""
    return next((one for one in above(tree, node)), None) is not None


def mention(script: Script, what: str, node: ast.AST) -> list[tuple[str, str, Span]]:
    """A place beside that of a finding, if it is in this text."""
    return [(what, script.unit.path, span_of(node, script.unit.lines))] if is_in(script.tree, node) else []


def is_behind(node: ast.AST, other: ast.AST) -> bool:
    """Whether a node stands behind another one in the text."""
    return _start(node) >= _end(other)


def loads(nodes: Iterator[ast.AST] | Sequence[ast.AST], key: str) -> list[ast.AST]:
    """Where a variable is read."""
    return [
        one
        for one in nodes
        if isinstance(one, (ast.Name, ast.Attribute)) and isinstance(one.ctx, ast.Load) and key_of(one) == key
    ]
