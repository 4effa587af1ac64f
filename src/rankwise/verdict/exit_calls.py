"""Where the script's text ends a rank without an exception: calls of ``sys.exit``, ``os._exit`` and the like under a condition."""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import TYPE_CHECKING

from rankwise.verdict.guards import guards_at
from rankwise.verdict.source_text import name_of, parse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_ENDING, _MODULES = {"exit", "_exit", "quit", "SystemExit"}, {"sys", "os", "builtins"}


def find_exit_call(sources: Mapping[str, str], code: int | None) -> str | None:
    """Return ``file.py:LINE`` of the only call by which a rank can have left with an exit code; None if there is none, or several.

    A call that every rank comes to at the end of the script is none of them.
    """
    return _find_only(sources, lambda given, is_guarded: is_guarded and given == code)


def is_regular_end(sources: Mapping[str, str], place: str) -> bool:
    """Tell whether every rank comes to the exit at a ``file.py:LINE``: it stands under no condition; False where its text is not known."""
    file, _, line = place.rpartition(":")
    return file in sources and not _is_guarded(sources[file], int(line))


def find_exit_words(sources: Mapping[str, str], words: str) -> str | None:
    """Return ``file.py:LINE`` of the only ``sys.exit("…")`` that prints a text; None if there is none, or several."""
    return _find_only(sources, lambda given, _: isinstance(given, str) and given.strip() == words)


def _find_only(sources: Mapping[str, str], fits: Callable[[int | str, bool], bool]) -> str | None:
    found = [
        f"{file}:{line}"
        for file, text in sources.items()
        for line, given, is_guarded in _list_exits(text)
        if fits(given, is_guarded)
    ]
    return found[0] if len(found) == 1 else None


@lru_cache(maxsize=32)
def _list_exits(text: str) -> list[tuple[int, int | str, bool]]:
    """Return the line of each exit, the exit code or the text that it gives, and whether it stands under a condition."""
    return [
        (node.lineno, given, _is_guarded(text, node.lineno))
        for node in ast.walk(parse(text))
        if isinstance(node, ast.Call | ast.Raise) and (given := _read_given(node)) is not None
    ]


def _is_guarded(text: str, at: int) -> bool:
    lines = text.splitlines()
    return any("__name__" not in lines[one.line - 1] for one in guards_at(text, at))


def _read_given(node: ast.Call | ast.Raise) -> int | str | None:
    """Return the exit code or the text that a call gives, or ``raise SystemExit``; None for all else."""
    match node:
        case ast.Raise(exc=ast.Name(id="SystemExit")):
            return 0
        case ast.Call(args=[] | [ast.Constant(value=None)]) if _is_exit(node.func):
            return 0
        case ast.Call(args=[ast.Constant(value=int() | str() as given)]) if _is_exit(node.func):
            return given
        case _:
            return None


def _is_exit(called: ast.expr) -> bool:
    """Tell whether a call ends the process: a window's ``quit()``, or a parser's ``exit()``, is another one."""
    of_module = isinstance(called, ast.Attribute) and name_of(called.value) in _MODULES
    return name_of(called) in _ENDING and (of_module or isinstance(called, ast.Name))
