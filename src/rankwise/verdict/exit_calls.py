"""Where the script's text ends a rank without an exception: calls of ``sys.exit``, ``os._exit`` and the like under a condition."""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import TYPE_CHECKING

from rankwise.verdict.guards import Book
from rankwise.verdict.script_names import name_of

if TYPE_CHECKING:
    from collections.abc import Mapping

_ENDING, _MODULES = {"exit", "_exit", "quit", "SystemExit"}, {"sys", "os", "builtins"}


def _is_exit(called: ast.expr) -> bool:
    """Tell whether a call ends the process: a window's ``quit()``, or a parser's ``exit()``, is another one."""
    of_module = isinstance(called, ast.Attribute) and name_of(called.value) in _MODULES
    return name_of(called) in _ENDING and (of_module or isinstance(called, ast.Name))


def find_exit_call(sources: Mapping[str, str], code: int | None) -> str | None:
    """Return ``file.py:LINE`` of the only call by which a rank can have left with an exit code; None if there is none, or several.

    Args:
        sources: Text of the user's files.
        code: The exit code.
    """
    found = [
        f"{file}:{line}"
        for file, text in sources.items()
        for line, given in _list_calls(text)
        if given == code
    ]
    return found[0] if len(found) == 1 else None


def find_exit_words(sources: Mapping[str, str], words: str) -> str | None:
    """Return ``file.py:LINE`` of the only ``sys.exit("…")`` that prints a text; None if there is none, or several.

    Args:
        sources: Text of the user's files.
        words: The line that the rank has printed.
    """
    found = [
        f"{file}:{line}"
        for file, text in sources.items()
        for line, said in _list_words(text)
        if said == words
    ]
    return found[0] if len(found) == 1 else None


@lru_cache(maxsize=64)
def _list_words(text: str) -> list[tuple[int, str]]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    return [
        (node.lineno, said.strip())
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _is_exit(node.func)
        for said in (one.value for one in node.args if isinstance(one, ast.Constant))
        if isinstance(said, str) and said.strip()
    ]


@lru_cache(maxsize=64)
def _list_calls(text: str) -> list[tuple[int, int]]:
    """Return line and exit code of the calls that give one, and that not every rank comes to at the end of the script."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    book, lines = Book(text), text.splitlines()
    return [
        (node.lineno, code)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call | ast.Raise)
        and (code := _read_code(node)) is not None
        and any("__name__" not in lines[guard.line - 1] for guard in book.guards_at(node.lineno))
    ]


def _read_code(node: ast.AST) -> int | None:
    """Return the exit code that a call gives, or ``raise SystemExit``; None for all else."""
    match node:
        case ast.Raise(exc=ast.Name(id="SystemExit")):
            return 0
        case ast.Call(args=[] | [ast.Constant(value=None)]) if _is_exit(node.func):
            return 0
        case ast.Call(args=[ast.Constant(value=int(code))]) if _is_exit(node.func):
            return int(code)
        case _:
            return None
