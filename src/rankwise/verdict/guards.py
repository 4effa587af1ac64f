"""Which conditions a line of the user's script stands under, read from its text: a rank test, an except, a finally."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

from rankwise.verdict.script_names import list_assignments, list_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_RANK_WORDS = re.compile(
    r"(^|_)(rank|local_rank|get_rank|process_index|node_rank)($|_)|is_(main|master|chief|rank|global_zero|local_main|local_zero|chief)"
    r"|main_process|cluster_resolver|task_type|^(LOCAL_)?RANK$|rank_?zero",
    re.IGNORECASE,
)
#: Decorators that let only some ranks in.
_ONLY_WORDS = re.compile(
    r"(main|master|chief|rank|rank_?zero|rank_?0|main_process)_only$|only_(on_)?(main|master|chief|rank)|^on_(local_)?(main|last)_process$|^on_process$",
    re.IGNORECASE,
)
#: What each rank has of its own: a clock, a loss, what lies on its disk or in its queue.
_OWN_WORDS = re.compile(
    r"^(time|monotonic|perf_counter|now|elapsed|random|rand|exists|is_file|is_dir|listdir|qsize|empty|item|memory_allocated)$"
    r"|(^|_)(loss|acc|accuracy|score|metric|elapsed|seconds|deadline|grad_norm)(_|$)",
    re.IGNORECASE,
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """A condition that a line stands under.

    Attributes:
        kind: "if": an arm of an if or a match, what follows ``and``, the body of a ``while rank == 0``, what stands behind an
            ``if rank != 0: return``. "except", "finally": what is done about an exception.
        line: Where it begins.
        is_rank_test: Whether it asks for the rank.
        is_own_test: Whether it asks for something else that each rank has of its own: a time, a loss, a file.
        opened: Line of the ``try`` that an "except" or "finally" belongs to.
        file: Where it stands; empty if that has not been told.
    """

    kind: Literal["if", "except", "finally", "try"]
    line: int
    is_rank_test: bool = False
    is_own_test: bool = False
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
        body: Sequence[ast.stmt] = self._tree.body
        while (node := next((one for one in body if _spans([one], line)), None)) is not None:
            found += self._gates_before(node, body)
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

    def function_at(self, line: int) -> str | None:
        """Return the name of the innermost function that a line stands in; None outside of all."""
        scope = self.scope_of(line)
        return next(
            (
                node.name
                for node in ast.walk(self._tree)
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
                and scope
                and node.lineno == scope[0]
            ),
            None,
        )

    def calls_of(self, name: str) -> tuple[int, ...]:
        """Return the lines at which a function is called by its name."""
        return tuple(
            sorted(
                {
                    node.lineno
                    for node in ast.walk(self._tree)
                    if isinstance(node, ast.Call) and name_of_call(node) == name
                }
            )
        )

    def loops_at(self, line: int) -> tuple[range, ...]:
        """Return the lines of the loops that a line stands in, innermost first, up to the function that it is in."""
        first, last = self.scope_of(line) or (0, line)
        spans = [
            range(node.lineno, (node.end_lineno or node.lineno) + 1)
            for node in ast.walk(self._tree)
            if isinstance(node, (ast.For, ast.AsyncFor, ast.While))
            and _spans(node.body, line)
            and first <= node.lineno <= last
        ]
        return tuple(sorted(spans, key=lambda span: -span.start))

    def _gates_before(self, node: ast.stmt, block: Sequence[ast.stmt]) -> list[Guard]:
        """Return the tests of the rank behind which only some ranks go on to a statement of the same block."""
        return [
            Guard(kind="if", line=one.lineno, is_rank_test=True)
            for one in block[: block.index(node)]
            if isinstance(one, ast.If)
            and _leaves(one.body) != _leaves(one.orelse)
            and not _asks_for_none(one.test)
            and asks_rank(one.test, self._rank_names)
        ]

    def _guards_of(self, node: ast.stmt, line: int) -> list[Guard]:
        if isinstance(node, ast.Try):
            return _guards_of_try(node, line)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return [
                Guard(kind="if", line=one.lineno, is_rank_test=True)
                for one in node.decorator_list
                if any(_ONLY_WORDS.search(name) for name in list_words(one))
            ]
        tests = self._list_tests(node, line)
        if tests is not None:
            return [self._guard(node, *tests)] if tests else []
        short = next(
            (one for one in _own_expressions(node) if isinstance(one, (ast.BoolOp, ast.IfExp))), None
        )
        if short is None:
            return []
        return [
            self._guard(short, *((short.test,) if isinstance(short, ast.IfExp) else _asked_before(short)))
        ]

    def _list_tests(self, node: ast.stmt, line: int) -> list[ast.expr] | None:
        """Return what is asked before a line of a statement is come to; None if its expressions are to be looked at."""
        if isinstance(node, ast.If):
            in_arm = _spans(node.body, line) or _spans(node.orelse, line)
            return [node.test] if in_arm else _asked_before(node.test)
        if isinstance(node, ast.Match):
            in_arm = any(_spans(case.body, line) for case in node.cases)
            return [node.subject, *(case.guard for case in node.cases if case.guard)] if in_arm else []
        is_turned = isinstance(node, ast.While) and _spans(node.body, line)
        if isinstance(node, ast.While) and is_turned and asks_rank(node.test, self._rank_names):
            return [node.test]
        return None

    def _guard(self, node: ast.stmt | ast.expr, *asked: ast.expr) -> Guard:
        return Guard(
            kind="if",
            line=node.lineno,
            is_rank_test=any(asks_rank(test, self._rank_names) for test in asked),
            is_own_test=any(_OWN_WORDS.search(name) for test in asked for name in list_words(test)),
        )


def name_of_call(node: ast.AST) -> str | None:
    """Return the name of the function or method that an expression calls; None if it is no such call."""
    if not isinstance(node, ast.Call):
        return None
    called = node.func
    return (
        called.attr
        if isinstance(called, ast.Attribute)
        else called.id
        if isinstance(called, ast.Name)
        else None
    )


def asks_rank(test: ast.expr, rank_names: frozenset[str] = frozenset()) -> bool:
    """Tell whether a test asks for the rank.

    Args:
        test: What stands behind an ``if``.
        rank_names: Names that a rank is kept under, beside those that say so.
    """
    return any(name in rank_names or _RANK_WORDS.search(name) for name in list_words(test))


def find_rank_names(tree: ast.Module) -> frozenset[str]:
    """Return the names that a rank is kept under, as in ``r = dist.get_rank()``."""
    found = set()
    for name, value in list_assignments(tree):
        if not any(_RANK_WORDS.search(word) for word in list_words(value)):
            continue
        if isinstance(name, ast.Name):
            found.add(name.id)
        elif isinstance(name, ast.Attribute) and isinstance(value, ast.Compare):
            found.add(name.attr)  # self.writes = rank == 0; not self.device = f"cuda:{rank}"
    return frozenset(found)


def _guards_of_try(node: ast.Try, line: int) -> list[Guard]:
    handler = next(
        (one for one in node.handlers if one.lineno <= line <= (one.end_lineno or one.lineno)), None
    )
    if handler is not None:
        return [Guard(kind="except", line=handler.lineno, opened=node.lineno)]
    if _spans(node.finalbody, line):
        return [Guard(kind="finally", line=node.finalbody[0].lineno, opened=node.lineno)]
    return [Guard(kind="try", line=node.lineno, opened=node.lineno)] if _spans(node.body, line) else []


def _asked_before(test: ast.expr) -> list[ast.expr]:
    """Return the parts of an ``and`` behind which the last of its calls stands: what is called there is called only on some ranks."""
    if not isinstance(test, ast.BoolOp):
        return []
    calls = [
        at
        for at, value in enumerate(test.values)
        if not asks_rank(value) and any(isinstance(one, ast.Call) for one in ast.walk(value))
    ]
    return test.values[: calls[-1]] if calls else test.values[:1]


def _leaves(block: list[ast.stmt]) -> bool:
    """Tell whether a block ends in going elsewhere. One that raises sees to it that its test never holds."""
    return bool(block) and isinstance(block[-1], (ast.Return, ast.Break, ast.Continue))


def _asks_for_none(test: ast.expr) -> bool:
    """Tell whether a test asks if there is a rank at all: ``rank == -1``, ``rank < 0``, ``rank is None``."""
    match test:
        case ast.Compare(comparators=[ast.UnaryOp(op=ast.USub()) | ast.Constant(value=None)]):
            return True
        case ast.Compare(ops=[ast.Lt()], comparators=[ast.Constant(value=0)]):
            return True
        case ast.BoolOp(values=values):
            return any(_asks_for_none(value) for value in values)
        case _:
            return False


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
