"""The user's files as Python: parsed once, and what several questions need of them: the statements around a line, its function, its loops, names."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While


@final
@dataclass(frozen=True, slots=True)
class Step:
    """A statement that a line stands in.

    Attributes:
        node: The statement.
        block: The block that it is a part of.
        at: Its place in that.
        part: Which part of it holds the line: "body", "orelse", "finalbody", "handler", or the number of a "case";
            empty if that is its head.
        arm: That ``except``.
    """

    node: ast.stmt
    block: Sequence[ast.stmt]
    at: int
    part: str = ""
    arm: ast.ExceptHandler | None = None


# A tree takes forty times as much memory as its text, and the launcher lives as long as the job.
@lru_cache(maxsize=16)
def parse(text: str) -> ast.Module:
    """Return a file's syntax tree, which nobody may change; an empty one if the text is no Python.

    A tree that has left the cache is parsed again, so nodes of two calls are compared by their lines, never by their
    identity.
    """
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module(body=[], type_ignores=[])


def split_site(site: str | None) -> tuple[str, int]:
    """Return file and line of ``file.py:LINE``; line 0, which no file has, where it is no such place."""
    file, _, line = (site or "").rpartition(":")
    return (file, int(line)) if line.isdecimal() else ("", 0)


@lru_cache(maxsize=64)
def find_path(text: str, line: int) -> tuple[Step, ...]:
    """Return the statements that a line stands in, the outermost first."""
    steps: list[Step] = []
    block: Sequence[ast.stmt] = parse(text).body
    while (at := next((n for n, one in enumerate(block) if spans(one, line)), None)) is not None:
        node = block[at]
        part, arm, inner = next(
            (found for found in _list_parts(node) if any(spans(one, line) for one in (found[1], *found[2]) if one)),
            ("", None, ()),
        )
        steps.append(Step(node, block, at, part, arm))
        block = inner
    return tuple(steps)


def find_path_inside(text: str, line: int) -> tuple[Step, ...]:
    """Return those that stand in the innermost function or class around a line."""
    steps = find_path(text, line)
    entered = [n for n, one in enumerate(steps) if isinstance(one.node, Function | ast.ClassDef) and one.part]
    return steps[entered[-1] + 1 :] if entered else steps


def find_function(text: str, line: int) -> Function | None:
    """Return the innermost function that a line stands in; None outside of all."""
    found = [step.node for step in find_path(text, line) if isinstance(step.node, Function)]
    return found[-1] if found else None


def list_loops(text: str, line: int) -> list[Loop]:
    """Return the loops that a line stands in, up to its function, the innermost first."""
    return [step.node for step in reversed(find_path_inside(text, line)) if isinstance(step.node, Loop)]


def list_calls_of(text: str, name: str) -> list[int]:
    """Return the lines at which a function is called by its name."""
    calls = (node for node in ast.walk(parse(text)) if isinstance(node, ast.Call))
    return sorted({node.lineno for node in calls if name_of(node) == name})


def _list_parts(node: ast.stmt) -> Iterator[tuple[str, ast.ExceptHandler | None, Sequence[ast.stmt]]]:
    for name in ("body", "orelse", "finalbody"):
        yield name, None, getattr(node, name, ())
    for handler in getattr(node, "handlers", ()):
        yield "handler", handler, handler.body
    for number, case in enumerate(getattr(node, "cases", ())):
        yield f"case {number}", None, case.body


def lines_of(node: ast.stmt | ast.expr | ast.ExceptHandler) -> tuple[int, int]:
    """Return the first and the last line of a statement or an expression."""
    return node.lineno, node.end_lineno or node.lineno


def spans(node: ast.stmt | ast.expr | ast.ExceptHandler, line: int) -> bool:
    """Tell whether a line is one of those of a statement or an expression."""
    first, last = lines_of(node)
    return first <= line <= last


@lru_cache(maxsize=64)
def are_alternatives(text: str, line: int, other: int) -> bool:
    """Tell whether no rank can pass by both lines in one turn: they stand in an ``if`` and its ``else``, or in cases of one ``match``.

    So do those of two functions that are called only there.
    """
    if _are_in_different_arms(text, line, other):
        return True
    functions = [find_function(text, number) for number in (line, other)]
    calls = [list_calls_of(text, one.name) if one is not None else [] for one in functions]
    return all(calls) and all(_are_in_different_arms(text, one, two) for one in calls[0] for two in calls[1])


def _are_in_different_arms(text: str, line: int, other: int) -> bool:
    """Tell whether two lines stand in different arms of one condition: then they are one place, written twice."""
    for one, two in zip(find_path(text, line), find_path(text, other), strict=False):
        if lines_of(one.node) != lines_of(two.node):
            break
        has_arms = isinstance(one.node, ast.If | ast.Match) and one.part and two.part
        if has_arms and one.part != two.part:
            return True
    pairs = [(node.body, node.orelse) for node in ast.walk(parse(text)) if isinstance(node, ast.IfExp)]
    return line != other and any(
        (spans(body, line) and spans(orelse, other)) or (spans(body, other) and spans(orelse, line))
        for body, orelse in pairs
    )


# ------------------------------------------------------------------ names


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


def list_imported(text: str, package: str) -> set[str]:
    """Return the names that a file's imports give to a package, and to what is in it."""
    found = [node for node in ast.walk(parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    named = [(getattr(node, "module", None) or one.name, one) for node in found for one in node.names]
    return {one.asname or one.name.split(".")[0] for path, one in named if path.split(".")[0] == package}


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
