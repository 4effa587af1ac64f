"""Which conditions a line of the user's script stands under, read from its text: a rank test, an except, a finally."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_RANK_WORDS = re.compile(
    r"(^|_)(rank|local_rank|get_rank|process_index|node_rank)($|_)|is_(main|master|rank|global_zero|local_main|local_zero|chief)"
    r"|main_process|^(LOCAL_)?RANK$|rank_?zero",
    re.IGNORECASE,
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """A condition that a line stands under.

    Attributes:
        kind: "if": an arm of an if, or what follows ``and``. "except", "finally": what is done about an exception.
        line: Where it begins.
        is_rank_test: Whether it asks for the rank.
        opened: Line of the ``try`` that an "except" or "finally" belongs to.
        file: Where it stands; empty if that has not been told.
    """

    kind: Literal["if", "except", "finally", "try"]
    line: int
    is_rank_test: bool = False
    opened: int | None = None
    file: str = ""


@final
class Book:
    """A file of the user's.

    Args:
        text: What stands in it; a text that is no Python has no guards.
    """

    def __init__(self, text: str) -> None:
        try:
            self._tree: ast.Module = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            self._tree = ast.Module(body=[], type_ignores=[])
        self._rank_names = find_rank_names(self._tree)

    def guards_at(self, line: int) -> tuple[Guard, ...]:
        """Return the conditions that a line stands under, innermost first, up to the function that it is in."""
        found: list[Guard] = []
        body: Iterable[ast.stmt] = self._tree.body
        while (node := next((one for one in body if _spans([one], line)), None)) is not None:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.clear()
            found += self._guards_of(node, line)
            body = next((block for block in _blocks(node) if _spans(block, line)), ())
        return tuple(reversed(found))

    def scope_of(self, line: int) -> tuple[int, int] | None:
        """Return first and last line of the innermost function that a line stands in; None outside of all."""
        spans = [
            (node.lineno, node.end_lineno or node.lineno)
            for node in ast.walk(self._tree)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and _spans([node], line)
        ]
        return max(spans, default=None)

    def _guards_of(self, node: ast.stmt, line: int) -> list[Guard]:
        if isinstance(node, ast.If):
            in_arm = _spans(node.body, line) or _spans(node.orelse, line)
            asks = in_arm or isinstance(node.test, ast.BoolOp)
            return (
                [Guard(kind="if", line=node.lineno, is_rank_test=self._asks_rank(node.test))] if asks else []
            )
        if isinstance(node, ast.Try):
            handler = next(
                (one for one in node.handlers if one.lineno <= line <= (one.end_lineno or one.lineno)), None
            )
            if handler is not None:
                return [Guard(kind="except", line=handler.lineno, opened=node.lineno)]
            if _spans(node.finalbody, line):
                return [Guard(kind="finally", line=node.finalbody[0].lineno, opened=node.lineno)]
            return (
                [Guard(kind="try", line=node.lineno, opened=node.lineno)] if _spans(node.body, line) else []
            )
        short = next(
            (one for one in _own_expressions(node) if isinstance(one, (ast.BoolOp, ast.IfExp))), None
        )
        if short is None:
            return []
        return [Guard(kind="if", line=short.lineno, is_rank_test=self._asks_rank(short))]

    def _asks_rank(self, test: ast.expr) -> bool:
        # What is asked after `and` may be what is called only on some ranks: the question comes first.
        asked = (
            test.values[0]
            if isinstance(test, ast.BoolOp)
            else test.test
            if isinstance(test, ast.IfExp)
            else test
        )
        return asks_rank(asked, self._rank_names)


def asks_rank(test: ast.expr, rank_names: frozenset[str] = frozenset()) -> bool:
    """Tell whether a test asks for the rank.

    Args:
        test: What stands behind an ``if``.
        rank_names: Names that a rank is kept under, beside those that say so.
    """
    return any(name in rank_names or _RANK_WORDS.search(name) for name in _names_in(test))


def find_rank_names(tree: ast.Module) -> frozenset[str]:
    """Return the names that a rank is kept under, as in ``r = dist.get_rank()``."""
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for name, value in pairs:
                if isinstance(name, ast.Name) and any(_RANK_WORDS.search(word) for word in _names_in(value)):
                    found.add(name.id)
    return frozenset(found)


def _names_in(node: ast.AST) -> Iterator[str]:
    for one in ast.walk(node):
        if isinstance(one, ast.Name):
            yield one.id
        elif isinstance(one, ast.Attribute):
            yield one.attr
        elif isinstance(one, ast.Constant) and isinstance(one.value, str):
            yield one.value


def _blocks(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        yield getattr(node, name, [])
    for handler in getattr(node, "handlers", ()):
        yield handler.body
    for case in getattr(node, "cases", ()):
        yield case.body


def _own_expressions(node: ast.stmt) -> Iterator[ast.AST]:
    """Return the expressions of a statement without those of the statements inside it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield from ast.walk(child)


def _spans(block: Iterable[ast.stmt], line: int) -> bool:
    return any(one.lineno <= line <= (one.end_lineno or one.lineno) for one in block)
