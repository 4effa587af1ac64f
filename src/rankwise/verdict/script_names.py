"""Names in the text of the user's files: what an expression is called, which words stand in it, what is given to whom."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def name_of(node: ast.AST) -> str:
    """Return the last name of a variable, an attribute, or what is called; empty if it has none."""
    if isinstance(node, ast.Call):
        return name_of(node.func)
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def list_names(node: ast.AST) -> Iterator[str]:
    """Return the variables and attributes that stand in an expression."""
    for one in ast.walk(node):
        if isinstance(one, (ast.Name, ast.Attribute)):
            yield name_of(one)


def list_words(node: ast.AST) -> Iterator[str]:
    """Return the same, and texts, as in ``os.environ["RANK"]``."""
    for one in ast.walk(node):
        if isinstance(one, (ast.Name, ast.Attribute)):
            yield name_of(one)
        elif isinstance(one, ast.Constant) and isinstance(one.value, str):
            yield one.value


def list_assignments(tree: ast.Module) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Return what each assignment gives to whom: of ``a, b = 1, 2`` both, each with its own."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from zip(target.elts, node.value.elts, strict=False)
            else:
                yield target, node.value
