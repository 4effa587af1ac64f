"""Classes of a text: what they derive from, their methods, and the attributes of ``self``."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.analyses.scopes import FunctionNode, Scopes, is_function

if TYPE_CHECKING:
    from collections.abc import Iterator

MODULE = frozenset({"torch.nn.Module", "torch.nn.modules.Module", "torch.nn.modules.module.Module"})
LIGHTNING = frozenset(
    f"{package}.LightningModule"
    for package in ("lightning", "lightning.pytorch", "pytorch_lightning", "lightning.pytorch.core", "lightning.fabric")
)


def roots(scopes: Scopes, node: ast.ClassDef, depth: int = 0) -> set[str]:
    """Full names of what a class derives from, through classes of the same text; "?" for what is not known."""
    names: set[str] = set()
    for base in node.bases:
        above = scopes.called_class(base)
        if above is not None and above is not node and depth < 8:
            names |= roots(scopes, above, depth + 1) or {"object"}
        else:
            names.add("object" if getattr(base, "id", "") == "object" else scopes.dotted(base) or "?")
    return names


def methods(node: ast.ClassDef) -> dict[str, FunctionNode]:
    """The methods that stand directly in a class's body, by name."""
    return {statement.name: statement for statement in node.body if is_function(statement)}


def self_name(method: FunctionNode) -> str:
    """What a method calls its instance; empty for static and class methods."""
    marks = {d.id for d in method.decorator_list if isinstance(d, ast.Name)}
    first = [*method.args.posonlyargs, *method.args.args][:1]
    return first[0].arg if first and not marks & {"staticmethod", "classmethod"} else ""


def class_around(scopes: Scopes, node: ast.AST) -> tuple[ast.ClassDef, FunctionNode] | None:
    """The class and the method in which a node stands; None outside methods."""
    method: FunctionNode | None = None
    for above in scopes.above(node):
        if isinstance(above, ast.ClassDef):
            return (above, method) if method is not None else None
        if is_function(above):
            method = above
    return None


def self_attribute(scopes: Scopes, node: ast.AST) -> tuple[ast.ClassDef, str] | None:
    """The class and the name for ``self.name`` in one of its methods; None for anything else."""
    if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
        return None
    around = class_around(scopes, node)
    if around is None or self_name(around[1]) != node.value.id:
        return None
    return around[0], node.attr


def self_attributes(scopes: Scopes, cls: ast.ClassDef, name: str) -> Iterator[ast.Attribute]:
    """All places in a class where ``self.name`` stands."""
    for node in scopes.all(ast.Attribute):
        if node.attr == name:
            found = self_attribute(scopes, node)
            if found is not None and found[0] is cls:
                yield node


def is_super_call(node: ast.AST, method: str) -> bool:
    """Whether a node is ``super().method(...)`` or ``super(Class, self).method(...)``."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == method
        and isinstance(node.func.value, ast.Call)
        and isinstance(node.func.value.func, ast.Name)
        and node.func.value.func.id == "super"
    )
