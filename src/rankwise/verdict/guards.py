"""Which conditions a line of the user's script stands under, read from its text: a rank test, an except, a finally."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, final

from rankwise.verdict.source_text import Function, find_path, list_assignments, list_words, parse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.verdict.source_text import Step

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
        kind: "if": an arm of an if or a match, what follows ``and``, the body of a ``while rank == 0``, what stands
            behind an ``if rank != 0: return``. "except", "finally": what is done about an exception.
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


@lru_cache(maxsize=256)
def guards_at(text: str, line: int) -> tuple[Guard, ...]:
    """Return the conditions that a line of a file stands under, innermost first, up to the function that it is in."""
    rank_names = find_rank_names(text)
    found: list[Guard] = []
    for step in find_path(text, line):
        if isinstance(step.node, Function | ast.ClassDef):
            found.clear()
        else:
            found += _gates_before(step, rank_names)
        found += _guards_of(step, rank_names)
    return tuple(reversed(found))


def _gates_before(step: Step, rank_names: frozenset[str]) -> list[Guard]:
    """Return the tests of the rank behind which only some ranks go on to a statement of the same block."""
    return [
        Guard(kind="if", line=one.lineno, is_rank_test=True)
        for one in step.block[: step.at]
        if isinstance(one, ast.If)
        and _leaves(one.body) != _leaves(one.orelse)
        and not asks_for_none(one.test)
        and asks_rank(one.test, rank_names)
    ]


def _guards_of(step: Step, rank_names: frozenset[str]) -> list[Guard]:
    """Return the conditions that a statement puts before the line that leads into it."""
    node = step.node
    if isinstance(node, ast.Try):
        return _guards_of_try(node, step)
    if isinstance(node, Function):
        return [
            Guard(kind="if", line=one.lineno, is_rank_test=True)
            for one in node.decorator_list
            if any(_ONLY_WORDS.search(name) for name in list_words(one))
        ]
    tests = _list_tests(step, rank_names)
    asked: ast.stmt | ast.expr = node
    if tests is None:
        found = (one for one in _own_expressions(node) if isinstance(one, ast.BoolOp | ast.IfExp))
        short = next(found, None)
        if short is None:
            return []
        asked, tests = short, [short.test] if isinstance(short, ast.IfExp) else _asked_before(short)
    elif not tests:
        return []
    is_rank_test = any(asks_rank(test, rank_names) for test in tests)
    is_own_test = any(_OWN_WORDS.search(name) for test in tests for name in list_words(test))
    return [Guard(kind="if", line=asked.lineno, is_rank_test=is_rank_test, is_own_test=is_own_test)]


def _list_tests(step: Step, rank_names: frozenset[str]) -> list[ast.expr] | None:
    """Return what is asked before a line of a statement is come to; None if its expressions are to be looked at."""
    match step.node:
        case ast.If(test=test):
            return [test] if step.part else _asked_before(test)
        case ast.Match(subject=subject, cases=cases):
            return [subject, *(case.guard for case in cases if case.guard)] if step.part else []
        case ast.While(test=test) if step.part == "body" and asks_rank(test, rank_names):
            return [test]
        case _:
            return None


def asks_rank(test: ast.expr, rank_names: frozenset[str] = frozenset()) -> bool:
    """Tell whether a test asks for the rank."""
    return any(name in rank_names or _RANK_WORDS.search(name) for name in list_words(test))


@lru_cache(maxsize=32)
def find_rank_names(text: str) -> frozenset[str]:
    """Return the names that a rank is kept under in a file, as in ``r = dist.get_rank()``."""
    found = set()
    for name, value in list_assignments(parse(text)):
        if not any(_RANK_WORDS.search(word) for word in list_words(value)):
            continue
        if isinstance(name, ast.Name):
            found.add(name.id)
        elif isinstance(name, ast.Attribute) and isinstance(value, ast.Compare):
            found.add(name.attr)  # self.writes = rank == 0; not self.device = f"cuda:{rank}"
    return frozenset(found)


def _guards_of_try(node: ast.Try, step: Step) -> list[Guard]:
    if step.arm is not None:
        return [Guard(kind="except", line=step.arm.lineno, opened=node.lineno)]
    if step.part == "finalbody":
        return [Guard(kind="finally", line=node.finalbody[0].lineno, opened=node.lineno)]
    return [Guard(kind="try", line=node.lineno, opened=node.lineno)] if step.part == "body" else []


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


def asks_for_none(test: ast.expr) -> bool:
    """Tell whether a test asks if there is a rank at all: ``rank == -1``, ``rank < 0``, ``rank is None``."""
    match test:
        case ast.Compare(comparators=[ast.UnaryOp(op=ast.USub()) | ast.Constant(value=None)]):
            return True
        case ast.Compare(ops=[ast.Lt()], comparators=[ast.Constant(value=0)]):
            return True
        case ast.BoolOp(values=values):
            return any(asks_for_none(value) for value in values)
        case _:
            return False


def _own_expressions(node: ast.stmt) -> Iterator[ast.AST]:
    """Return the expressions of a statement without those of the statements inside it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield from ast.walk(child)
