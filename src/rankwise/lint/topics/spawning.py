"""Calls that start processes with a function of the text: ``mp.spawn`` and ``Process``."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from rankwise.lint.topics.scopes import FunctionNode, Scopes, is_function, scopes_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.script import Script

_PACKAGES = ("torch.multiprocessing", "multiprocessing", "torch.multiprocessing.spawn", "multiprocess")
_CHOOSES_SPAWN = re.compile(
    r"(set_start_method|get_context)\(\s*(method\s*=\s*)?[\"'](spawn|forkserver)[\"']"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawn:
    """One call that starts processes.

    Attributes:
        call: The call.
        word: What it is called in the text, ``mp.spawn``.
        passes_rank: Whether the function gets the number of its process before ``args``.
        is_fresh: Whether the children certainly import the script anew (start method spawn or forkserver).
        target: The function that is handed over.
        args: The ``args`` that are handed over.
        kwargs: Whether keyword arguments are handed over too.
    """

    call: ast.Call
    word: str
    passes_rank: bool
    is_fresh: bool
    target: ast.expr | None
    args: ast.expr | None
    kwargs: bool


def spawns(script: Script) -> Iterator[tuple[Scopes, Spawn]]:
    """All calls of a text that start processes, under any import."""
    code = script.piece.code
    if "multiprocess" in code and ("spawn" in code or "Process" in code or "start_processes" in code):
        scopes = scopes_of(script.tree)
        for spawn in _found(scopes, code):
            yield scopes, spawn


@lru_cache(maxsize=4)
def _found(scopes: Scopes, code: str) -> tuple[Spawn, ...]:
    chooses_spawn = bool(_CHOOSES_SPAWN.search(code))
    made = (_spawn(scopes, call, is_fresh=chooses_spawn) for call in scopes.all(ast.Call))
    return tuple(spawn for spawn in made if spawn is not None)


def _spawn(scopes: Scopes, call: ast.Call, *, is_fresh: bool) -> Spawn | None:
    package, _, name = scopes.dotted(call.func).rpartition(".")
    if _is_context(scopes, call.func):
        package, name = "multiprocessing", "Process"
    elif package not in _PACKAGES:
        return None
    keywords = {k.arg: k.value for k in call.keywords}
    if None in keywords or any(isinstance(a, ast.Starred) for a in call.args):
        return None
    word = ast.unparse(call.func)
    if name in ("spawn", "start_processes") and package.startswith("torch"):
        method = keywords.get("start_method")
        if method is not None and not (
            isinstance(method, ast.Constant) and method.value in ("spawn", "forkserver")
        ):
            return None
        return Spawn(
            call=call,
            word=word,
            passes_rank=True,
            is_fresh=True,
            target=keywords.get("fn") or _at(call, 0),
            args=keywords.get("args") or _at(call, 1),
            kwargs=False,
        )
    if name == "Process":
        return Spawn(
            call=call,
            word=word,
            passes_rank=False,
            is_fresh=is_fresh,
            target=keywords.get("target") or _at(call, 1),
            args=keywords.get("args") or _at(call, 3),
            kwargs="kwargs" in keywords or len(call.args) > 4,
        )
    return None


def _is_context(scopes: Scopes, node: ast.expr) -> bool:
    """Whether a call's function is ``Process`` of what ``get_context`` gave."""
    if not (isinstance(node, ast.Attribute) and node.attr == "Process" and isinstance(node.value, ast.Name)):
        return False
    made = scopes.value(node.value.id, scopes.scope(node.value))
    return isinstance(made, ast.Call) and scopes.dotted(made.func).endswith("multiprocessing.get_context")


def _at(call: ast.Call, number: int) -> ast.expr | None:
    return call.args[number] if number < len(call.args) else None


def is_under_main_guard(scopes: Scopes, node: ast.AST) -> bool:
    """Whether a node stands under a test of ``__name__``, whichever way it is written."""
    return any(
        isinstance(above, ast.If) and "__name__" in ast.unparse(above.test) for above in scopes.above(node)
    )


def is_in_body_of_guard(scopes: Scopes, node: ast.AST) -> bool:
    """Whether a node is only reached where ``__name__ == "__main__"`` holds: children of a spawn do not get there."""
    below = node
    for above in scopes.above(node):
        if isinstance(above, ast.If) and below in above.body:
            test = ast.unparse(above.test)
            if "__name__" in test and "__main__" in test and "!=" not in test and " or " not in test:
                return True
        below = above
    return False


def outermost_function(scopes: Scopes, node: ast.AST) -> FunctionNode | ast.ClassDef | ast.Lambda | None:
    """The function or class at module level in which a node stands; None for the module's own code."""
    found: FunctionNode | ast.ClassDef | ast.Lambda | None = None
    for above in scopes.above(node):
        if is_function(above) or isinstance(above, (ast.ClassDef, ast.Lambda)):
            found = above
    return found
