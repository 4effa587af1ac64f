"""Command-line options that a script declares with argparse, and expressions traced back to what their names were given."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.script import Script

#: Steps from a name to what it was given, and on from there.
_DEEPEST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One `add_argument`.

    Attributes:
        node: The call.
        flags: As written, ``--local_rank``.
        dest: The name of its value.
        default: The expression of its default, or None.
        is_required: Whether the program ends without it.
    """

    node: ast.Call
    flags: tuple[str, ...]
    dest: str
    default: ast.expr | None
    is_required: bool


def options(tree: ast.Module) -> Iterator[Option]:
    """Options that a text declares."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "add_argument"
        ):
            flags = tuple(
                one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)
            )
            if not flags:
                continue
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            dest = given.get("dest")
            long = next((flag for flag in flags if flag.startswith("--")), flags[0])
            name = dest.value if isinstance(dest, ast.Constant) else long.lstrip("-").replace("-", "_")
            required = given.get("required")
            yield Option(
                node=node,
                flags=flags,
                dest=str(name),
                default=given.get("default"),
                is_required=isinstance(required, ast.Constant) and required.value is True,
            )


def option_of(script: Script, node: ast.AST | None) -> Option | None:
    """The option whose value ``args.name`` is, if the text declares one."""
    if not isinstance(node, ast.Attribute):
        return None
    return next((one for one in options(script.tree) if one.dest == node.attr), None)


@lru_cache(maxsize=16)
def _given(tree: ast.Module) -> dict[str, list[ast.expr]]:
    """What each name or attribute (by its last word) is assigned, and what each function returns."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for name, value in _pairs(target, node.value):
                    found.setdefault(name, []).append(value)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            returned = [
                one.value for one in ast.walk(node) if isinstance(one, ast.Return) and one.value is not None
            ]
            found.setdefault(f"{node.name}()", []).extend(returned)
    return found


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Attribute):
        yield f".{target.attr}", value
    elif (
        isinstance(target, (ast.Tuple, ast.List))
        and isinstance(value, (ast.Tuple, ast.List))
        and len(target.elts) == len(value.elts)
    ):
        for one, part in zip(target.elts, value.elts, strict=True):
            yield from _pairs(one, part)


def sources(tree: ast.Module, node: ast.AST | None) -> Iterator[ast.AST]:
    """All expressions that a value may have been computed from, by the names in it: itself first."""
    given, seen = _given(tree), set[str]()
    waiting: list[tuple[ast.AST, int]] = [(node, 0)] if node is not None else []
    while waiting:
        one, depth = waiting.pop(0)
        yield one
        if depth >= _DEEPEST:
            continue
        for part in ast.walk(one):
            key = _key(part)
            if key and key not in seen:
                seen.add(key)
                waiting += [(value, depth + 1) for value in given.get(key, ())]


def _key(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f".{node.attr}"
    if isinstance(node, ast.Call):
        func = node.func
        return (
            f"{func.id}()"
            if isinstance(func, ast.Name)
            else f"{func.attr}()"
            if isinstance(func, ast.Attribute)
            else ""
        )
    return ""


def parts_of_sources(tree: ast.Module, node: ast.AST | None) -> Iterator[ast.AST]:
    """All nodes of all of `sources`."""
    for one in sources(tree, node):
        yield from ast.walk(one)
